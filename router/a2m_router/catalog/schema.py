"""The catalog's tables.

An absent text is stored as '', a present one with '=' before it. So one equality finds both, and indexes hold both.
"""

from typing import Final

APPLICATION: Final = b"A2Mc"

SCHEMA: Final = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;

    CREATE TABLE tiers (
        no INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        identity TEXT,                            -- of the tier's server, when it was last greeted
        scanned INTEGER NOT NULL DEFAULT 0,       -- whether the catalog has all records that it holds
        records INTEGER NOT NULL DEFAULT 0,       -- how many records live there
        half_life REAL, per_session INTEGER, promote_after INTEGER   -- the settings its rows were computed with
    ) STRICT;

    -- What a capacity applies to: a tier, or one conversation of a per_session tier.
    CREATE TABLE buckets (
        no INTEGER PRIMARY KEY,
        tier INTEGER NOT NULL,
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        records INTEGER NOT NULL,
        UNIQUE (tier, owner, session)
    ) STRICT;
    CREATE INDEX bucket_by_size ON buckets (tier, records);

    -- One row a record. home NULL: reserved for a write under way to `destination`; no read sees it.
    CREATE TABLE records (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        home INTEGER,
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        grp TEXT NOT NULL,
        role TEXT NOT NULL,
        key TEXT NOT NULL,
        revision INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        digest BLOB NOT NULL,
        version INTEGER NOT NULL,
        salience REAL NOT NULL,
        access_count INTEGER NOT NULL,
        accessed_at INTEGER,
        strength REAL NOT NULL,
        bucket INTEGER,
        destination INTEGER,
        batch INTEGER,
        found INTEGER
    ) STRICT;
    CREATE UNIQUE INDEX record_by_key ON records (key, owner) WHERE key != '' AND home IS NOT NULL;
    CREATE INDEX record_by_session ON records (session, owner, created_at, seq) WHERE home IS NOT NULL;
    CREATE INDEX record_by_owner ON records (owner, created_at, seq) WHERE home IS NOT NULL;
    CREATE INDEX record_by_home ON records (home, created_at, seq) WHERE home IS NOT NULL;
    CREATE INDEX record_by_group ON records (grp, owner, home, strength) WHERE grp != '' AND home IS NOT NULL;
    CREATE INDEX record_by_strength ON records (bucket, strength, seq) WHERE grp = '' AND home IS NOT NULL;
    CREATE INDEX record_by_reservation ON records (batch) WHERE home IS NULL;

    -- A group's share of a bucket; `strength` and `seq` are those of its strongest member in the whole tier.
    CREATE TABLE groups (
        home INTEGER NOT NULL,
        owner TEXT NOT NULL,
        grp TEXT NOT NULL,
        bucket INTEGER NOT NULL,
        records INTEGER NOT NULL,
        strength REAL NOT NULL,
        seq INTEGER NOT NULL,
        PRIMARY KEY (home, owner, grp, bucket)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX group_by_strength ON groups (bucket, strength, seq);

    CREATE TABLE sessions (
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        tier INTEGER NOT NULL,
        records INTEGER NOT NULL,
        PRIMARY KEY (owner, session, tier)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX session_by_name ON sessions (session);
    CREATE INDEX session_by_tier ON sessions (tier);

    -- Copies that may exist in a tier that is not the record's home; `kind` is one of entries.Stray.
    CREATE TABLE strays (
        tier INTEGER NOT NULL,
        id TEXT NOT NULL,
        kind INTEGER NOT NULL,
        owner TEXT NOT NULL,
        key TEXT NOT NULL,
        PRIMARY KEY (tier, id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX stray_by_id ON strays (id);
    CREATE INDEX stray_by_key ON strays (tier, key, owner) WHERE key != '';

    -- Replacements under way: the entry that becomes true if the tier turns out to hold this digest.
    CREATE TABLE replacing (id TEXT PRIMARY KEY, tier INTEGER NOT NULL, entry BLOB NOT NULL) STRICT, WITHOUT ROWID;

    -- Tombstones. `by`: the owner of the deleted record, '' if it had none. If the id was unknown: the owner who
    -- forgot it, '' for a caller who sees all.
    CREATE TABLE forgotten (
        id TEXT NOT NULL, by TEXT NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (id, by)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX forgotten_by_time ON forgotten (at);

    -- Records that have earned their promotion.
    CREATE TABLE due (id TEXT PRIMARY KEY, tier INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    CREATE INDEX due_by_tier ON due (tier);
    """,
    """
    -- Whether this file's index `nearest` holds the vectors of the tier's records, because its server has no index, and
    -- whether its records were written there lifted.
    ALTER TABLE tiers ADD COLUMN indexed INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE tiers ADD COLUMN lifted INTEGER NOT NULL DEFAULT 0;

    -- Pending writes: the new records, whole. They are true already; a row is deleted when its tier holds the record.
    CREATE TABLE redo (id TEXT PRIMARY KEY, tier INTEGER NOT NULL, draft BLOB NOT NULL) STRICT, WITHOUT ROWID;
    CREATE INDEX redo_by_tier ON redo (tier);
    """,
    """
    -- Strays whose groups are to be decided, and quarantined records; `kind` as in entries.Stray.
    CREATE INDEX stray_by_kind ON strays (kind, tier) WHERE kind >= 3;

    -- What records have earned that no tier is known to hold: records that a tier has lost, and records of an earlier
    -- catalog. A record that a scan finds gets these values back. `seq`: its number in the order of writing.
    CREATE TABLE earned (
        id TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        salience REAL NOT NULL,
        access_count INTEGER NOT NULL,
        accessed_at INTEGER
    ) STRICT, WITHOUT ROWID;

    -- A replacement is true here first, and noted in `redo`.
    DROP TABLE replacing;
    """,
    """
    -- Whether the server of a lifted tier was seen to keep the metadata that it is sent: NULL before it was sent any.
    -- For records that were written before this was checked, nothing is known.
    ALTER TABLE tiers ADD COLUMN shows_metadata INTEGER;
    UPDATE tiers SET shows_metadata = FALSE WHERE lifted AND records > 0;
    """,
    """
    -- One row a start: the epoch that it has drawn. A store or a record with an unlisted epoch was written by a router
    -- that this catalog does not know.
    CREATE TABLE epochs (number INTEGER PRIMARY KEY, epoch TEXT NOT NULL UNIQUE) STRICT;

    -- The number of the last epoch that the tier's store was seen to hold.
    ALTER TABLE tiers ADD COLUMN epoch INTEGER;

    -- Other federations whose records were adopted, where the records carry the federation's id.
    CREATE TABLE adopted (federation TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;

    -- The last records that came to live in a tier, or were replaced there: a restored older file lacks these first.
    CREATE INDEX record_by_version ON records (home, version) WHERE home IS NOT NULL;
    """,
    """
    -- Whether the tier's store is older than this catalog, which knows all that was written to it and deleted from it
    -- since. Reset when the tier was scanned.
    ALTER TABLE tiers ADD COLUMN set_back INTEGER NOT NULL DEFAULT 0;
    """,
    """
    -- The last number in the order of writing when the epoch was drawn: records with a greater number were written
    -- since. NULL if it was not noted, and for epochs that were not drawn here.
    ALTER TABLE epochs ADD COLUMN newest INTEGER;
    """,
    """
    -- How many records of other federations the tier was last seen to hold.
    ALTER TABLE tiers ADD COLUMN strange INTEGER NOT NULL DEFAULT 0;
    """,
    """
    -- When the record was created: another record of the same id does not get these values. NULL if it was not noted.
    ALTER TABLE earned ADD COLUMN created_at INTEGER;
    """,
    """
    -- A write under way when a router ends was not acknowledged, and the next router gives it up. The version before
    -- acknowledged a new record when its reservation was durable, and a power cut may have left no more than that: a
    -- scan of its tier finds such a record. A batch with replacements (found = 0) was not acknowledged that early.
    UPDATE tiers SET scanned = 0
        WHERE no IN (SELECT destination FROM records WHERE home IS NULL AND found IS NOT 0);
    DELETE FROM strays
        WHERE (tier, id) IN (SELECT destination, id FROM records WHERE home IS NULL AND found IS NOT 0);
    DELETE FROM forgotten WHERE id IN (SELECT id FROM records WHERE home IS NULL AND found IS NOT 0);
    DELETE FROM records WHERE home IS NULL AND found IS NOT 0;
    DROP INDEX record_by_reservation;
    ALTER TABLE records DROP COLUMN found;
    ALTER TABLE records DROP COLUMN batch;
    CREATE INDEX record_by_reservation ON records (key, owner) WHERE home IS NULL;
    """,
)
