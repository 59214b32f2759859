"""Older stores: records that a store held before there was a router, and files of an earlier schema."""

import contextlib
from pathlib import Path
from typing import Any

import apsw

from a2m_router.protocol.wire.method_params import Remember
from a2m_router.protocol.wire.records import Draft
from a2m_router.protocol.wire.timestamps import render
from a2m_store.store import Store
from tests.support.federated import LOCAL, START, Clock


def hold(folder: Path, tier: str, drafts: list[Draft]) -> None:
    """Make a store that held these records before there was a router."""
    store = Store(folder / f"{tier}.db", clock=Clock())
    with store.transaction():
        store.remember(Remember(records=drafts), LOCAL)
    store.close()


def draft(id: str, **fields: Any) -> Draft:
    told = {"content": f"{id}'s", "created_at": render(START), "revision": 0, **fields}
    return Draft(id=id, **told)


def set_back(path: Path, version: int) -> None:
    """Turn a store's file into one of an earlier schema, with a deleted record whose bytes stay in the file."""
    with contextlib.closing(apsw.Connection(str(path))) as old:
        for step in (
            "CREATE TEMP TABLE words AS SELECT rowid AS doc, tokens FROM lexical",
            "DROP TABLE occurrence; DROP TABLE lexical",
            "CREATE VIRTUAL TABLE lexical USING fts5(tokens, content='', contentless_delete=1, tokenize='ascii')",
            "INSERT INTO lexical (rowid, tokens) SELECT doc, tokens FROM words",
            "INSERT INTO lexical (rowid, tokens) VALUES (1000, 'oldsecretword')",
            "DELETE FROM lexical WHERE rowid = 1000",
            "INSERT INTO access VALUES (1000, 1, 1); CREATE TABLE secret (text)",
            f"INSERT INTO secret VALUES ('{'oldsecrettext ' * 500}'); DELETE FROM access WHERE record = 1000",
            "DROP TABLE secret; ALTER TABLE store ADD COLUMN newest INTEGER NOT NULL DEFAULT 0",
            "ALTER TABLE store DROP COLUMN federation; ALTER TABLE store DROP COLUMN epoch",
        ):
            old.execute(step)
        if version == 1:
            old.execute("DROP TABLE share; ALTER TABLE record DROP COLUMN tokens")
        else:
            old.execute("CREATE VIRTUAL TABLE occurrence USING fts5vocab('lexical', 'instance')")
        old.pragma("user_version", version)
    assert b"oldsecrettext" in path.read_bytes()
