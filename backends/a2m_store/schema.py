"""The tables of a store's file, and the migrations that create them.

A record is one row of `record`. The other tables refer to it by its number `seq`, which is the order of insertion and
is never used twice. Every column that is looked up by equality has an index, so no write, fetch or replay reads the
whole table.
"""

import uuid
from pathlib import Path
from typing import Final

import apsw

from a2m_router.storage import nearest
from a2m_router.storage.database import Database

APPLICATION: Final = b"a2ms"

# Small columns come first: a filter then never reads the pages of a long content.
_TABLES: Final = """
CREATE TABLE store (
    identity TEXT NOT NULL,
    metric TEXT NOT NULL,
    dimensions INTEGER,           -- null until the first vector fixes it
    records INTEGER NOT NULL,
    newest INTEGER NOT NULL       -- when it last wrote: it gives no earlier created_at
) STRICT;

CREATE TABLE record (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,  -- milliseconds since 1970
    owner TEXT,
    session TEXT,
    key TEXT,
    revision INTEGER,
    "group" TEXT,
    role TEXT,
    salience REAL NOT NULL,
    uri TEXT,
    media_type TEXT,
    content TEXT NOT NULL,
    metadata BLOB                 -- the JSON text as it came
) STRICT;
CREATE INDEX record_created ON record (created_at);
CREATE INDEX record_owner ON record (owner, created_at);
CREATE INDEX record_session ON record (session, owner, created_at) WHERE session IS NOT NULL;
CREATE INDEX record_group ON record ("group", owner) WHERE "group" IS NOT NULL;
CREATE INDEX record_uri ON record (uri) WHERE uri IS NOT NULL;
-- two records without an owner may not share a key either; to an index nulls differ, so the store checks that
CREATE UNIQUE INDEX record_key ON record (key, owner) WHERE key IS NOT NULL;

-- a row is added at a record's first recall: counting must not rewrite the content
CREATE TABLE access (record INTEGER PRIMARY KEY, count INTEGER NOT NULL, at INTEGER NOT NULL) STRICT;

-- top-level members of metadata, except nulls; long names and atoms as a hash
CREATE TABLE member (
    name BLOB NOT NULL, atom BLOB NOT NULL, record INTEGER NOT NULL, PRIMARY KEY (name, atom, record)
) STRICT, WITHOUT ROWID;

CREATE TABLE vector (record INTEGER PRIMARY KEY, doubles BLOB NOT NULL) STRICT;

-- The tokens are prepared by the caller and hold only ASCII letters, digits and non-ASCII: `ascii` splits them at
-- spaces and changes none. bm25 needs each token's frequency; without a content table only `detail=full` keeps it.
CREATE VIRTUAL TABLE lexical USING fts5(
    tokens, content='', contentless_delete=1, tokenize='ascii', detail=full
);
"""

# The present index of words. It keeps the tokens, so a record's tokens can be deleted again. `secure-delete` deletes
# them at once; a contentless FTS5 table would keep them until its next merge.
_WORDS: Final = """
CREATE TEMP TABLE words AS
    SELECT doc, group_concat(term, ' ') AS tokens FROM (SELECT doc, term FROM occurrence ORDER BY doc, "offset")
    GROUP BY doc;
DROP TABLE occurrence;
DROP TABLE lexical;
CREATE VIRTUAL TABLE lexical USING fts5(tokens, tokenize='ascii', detail=full);
INSERT INTO lexical (lexical, rank) VALUES ('secure-delete', 1);
INSERT INTO lexical (rowid, tokens) SELECT doc, tokens FROM words ORDER BY doc;
CREATE VIRTUAL TABLE occurrence USING fts5vocab('lexical', 'instance');
DROP TABLE words;
ALTER TABLE store DROP COLUMN newest;
"""

# The federation that the store belongs to, and the epoch of the last router that enrolled it.
_ENROLMENT: Final = """
ALTER TABLE store ADD COLUMN federation TEXT;
ALTER TABLE store ADD COLUMN epoch TEXT;
"""

# Each owner's share of the index of words: a ranking for an owner may use only the word statistics of these records.
_SHARES: Final = """
ALTER TABLE record ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;  -- in the index of words
CREATE TABLE share (
    owner TEXT PRIMARY KEY,       -- "=" and the owner; empty for what has none
    records INTEGER NOT NULL,     -- with tokens
    tokens INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
-- every token of `lexical` with the record it stands in
CREATE VIRTUAL TABLE occurrence USING fts5vocab('lexical', 'instance');
"""


def open_file(path: Path | None, *, holder: str = "an a2m-store") -> Database:
    """Open the store's database at `path`, or a private one in memory if it is None. Raises DatabaseError."""
    return Database(
        path, [_first, _second, _WORDS, _ENROLMENT], application=APPLICATION, holder=holder, prepare=nearest.load
    )


def _first(connection: apsw.Connection) -> None:
    connection.execute(_TABLES)
    connection.execute("INSERT INTO store VALUES (?, 'cosine', NULL, 0, ?)", (str(uuid.uuid4()), -(2**62)))


def _second(connection: apsw.Connection) -> None:
    connection.execute(_SHARES)
    connection.execute(
        "UPDATE record SET tokens = found.tokens"
        " FROM (SELECT doc, count(*) AS tokens FROM occurrence GROUP BY doc) AS found WHERE seq = found.doc"
    )
    connection.execute(
        "INSERT INTO share SELECT coalesce('=' || owner, ''), count(*), sum(tokens) FROM record WHERE tokens > 0"
        " GROUP BY owner"
    )
