PRAGMA application_id = 1093815651;
PRAGMA user_version = 3;
BEGIN TRANSACTION;
CREATE TABLE buckets (
        no INTEGER PRIMARY KEY,
        tier INTEGER NOT NULL,
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        records INTEGER NOT NULL,
        UNIQUE (tier, owner, session)
    ) STRICT;
INSERT INTO "buckets" VALUES(1,1,'','',3);
INSERT INTO "buckets" VALUES(2,2,'','',1);
CREATE TABLE due (id TEXT PRIMARY KEY, tier INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE earned (
        id TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        salience REAL NOT NULL,
        access_count INTEGER NOT NULL,
        accessed_at INTEGER
    ) STRICT, WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;
INSERT INTO "facts" VALUES('clean',1);
INSERT INTO "facts" VALUES('clock',1790000000005);
INSERT INTO "facts" VALUES('opened',1);
CREATE TABLE forgotten (
        id TEXT NOT NULL, by TEXT NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (id, by)
    ) STRICT, WITHOUT ROWID;
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
INSERT INTO "groups" VALUES(1,'=ann','=pair',1,2,0.0,3);
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
INSERT INTO "records" VALUES(1,'plain',2,'','','','','',0,1790000000002,X'A52D03A4CDAF1241E8B3FC7513B8613B',9,1.0,0,NULL,0.0,2,NULL,NULL,NULL);
INSERT INTO "records" VALUES(2,'turn-1',1,'=ann','=s','=pair','=user','',0,1790000000003,X'196174F47C6357CFDE23582719D50CDE',6,1.0,0,NULL,0.0,1,NULL,NULL,NULL);
INSERT INTO "records" VALUES(3,'turn-2',1,'=ann','=s','=pair','=assistant','',0,1790000000004,X'C8FE49624A24BF440D80B3FE3B4D5379',7,1.0,0,NULL,0.0,1,NULL,NULL,NULL);
INSERT INTO "records" VALUES(4,'page',1,'','','','=memory','=ropes/hemp',1,1790000000005,X'183302CF83D0F6C588CBC797C0B26B73',11,1.0,0,NULL,0.0,1,NULL,NULL,NULL);
CREATE TABLE redo (id TEXT PRIMARY KEY, tier INTEGER NOT NULL, draft BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE sessions (
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        tier INTEGER NOT NULL,
        records INTEGER NOT NULL,
        PRIMARY KEY (owner, session, tier)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "sessions" VALUES('','',1,1);
INSERT INTO "sessions" VALUES('','',2,1);
INSERT INTO "sessions" VALUES('=ann','=s',1,2);
CREATE TABLE strays (
        tier INTEGER NOT NULL,
        id TEXT NOT NULL,
        kind INTEGER NOT NULL,
        owner TEXT NOT NULL,
        key TEXT NOT NULL,
        PRIMARY KEY (tier, id)
    ) STRICT, WITHOUT ROWID;
CREATE TABLE tiers (
        no INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        identity TEXT,                            -- of the server behind it, when it was last greeted
        scanned INTEGER NOT NULL DEFAULT 0,       -- whether all that it holds is accounted for
        records INTEGER NOT NULL DEFAULT 0,       -- how many records live there
        half_life REAL, per_session INTEGER, promote_after INTEGER   -- the settings its rows were computed with
    , indexed INTEGER NOT NULL DEFAULT 0, lifted INTEGER NOT NULL DEFAULT 0) STRICT;
INSERT INTO "tiers" VALUES(1,'working','core-only at - #3973e022e932',1,3,NULL,0,NULL,1,1);
INSERT INTO "tiers" VALUES(2,'semantic','core-only at - #3973e022e932',1,1,NULL,0,NULL,1,1);
CREATE INDEX bucket_by_size ON buckets (tier, records);
CREATE UNIQUE INDEX record_by_key ON records (key, owner) WHERE key != '' AND home IS NOT NULL;
CREATE INDEX record_by_session ON records (session, owner, created_at, seq) WHERE home IS NOT NULL;
CREATE INDEX record_by_owner ON records (owner, created_at, seq) WHERE home IS NOT NULL;
CREATE INDEX record_by_home ON records (home, created_at, seq) WHERE home IS NOT NULL;
CREATE INDEX record_by_group ON records (grp, owner, home, strength) WHERE grp != '' AND home IS NOT NULL;
CREATE INDEX record_by_strength ON records (bucket, strength, seq) WHERE grp = '' AND home IS NOT NULL;
CREATE INDEX record_by_reservation ON records (batch) WHERE home IS NULL;
CREATE INDEX group_by_strength ON groups (bucket, strength, seq);
CREATE INDEX session_by_name ON sessions (session);
CREATE INDEX session_by_tier ON sessions (tier);
CREATE INDEX stray_by_id ON strays (id);
CREATE INDEX stray_by_key ON strays (tier, key, owner) WHERE key != '';
CREATE INDEX forgotten_by_time ON forgotten (at);
CREATE INDEX due_by_tier ON due (tier);
CREATE INDEX redo_by_tier ON redo (tier);
CREATE INDEX stray_by_kind ON strays (kind, tier) WHERE kind >= 3;
COMMIT;
