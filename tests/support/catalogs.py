"""Catalogs, and the few changes with which most tests begin."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claims, Name
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.records import Replacement
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.records import Draft
from a2m_router.ranking.policy import strength


def tier(name: str, **fields: Any) -> Tier:
    return Tier(**{"name": name, "kind": "semantic", "command": (name,), "cwd": Path("/"), **fields})


TIERS = (
    tier("working", kind="working", per_session=True, capacity=1, spill_to="episodic", half_life=300.0),
    tier(
        "episodic",
        kind="episodic",
        capacity=2,
        spill_to="semantic",
        promote_to="semantic",
        promote_after=2,
        half_life=86_400.0,
    ),
    tier("semantic"),
    tier("procedural", kind="procedural", shared=True, capacity=1, spill_to="semantic"),
)

NAMES = [each.name for each in TIERS]


def opened(path: Path | None = None, tiers: Sequence[Tier] = TIERS) -> Catalog:
    return Catalog(path, tiers, strength, threads=False)


def entry(id: str, home: str = "working", **fields: Any) -> Entry:
    return Entry(**{"id": id, "home": home, "created_at": 1000, "digest": b"first of " + id.encode(), **fields})


def rewritten(entry: Entry, **fields: Any) -> Entry:
    """Return the catalog entry of new content for a known record."""
    new = {"digest": b"again of " + entry.id.encode(), "revision": entry.revision + 1, **fields}
    return msgspec.structs.replace(entry, **new)


def write(catalog: Catalog, *entries: Entry) -> list[Entry]:
    """Write the entries; return them as the catalog then has them."""
    catalog.reserve(entries)
    catalog.commit_write(entries, [])
    found = catalog.records.find(each.id for each in entries)
    return [found[each.id] for each in entries]


def replace(catalog: Catalog, new: Entry, was: Entry, salience: float | None = None) -> bool:
    """Replace a record by `new`, as a pending write of its tier; return whether the record was still as `was`."""
    redo = {new.id: content_of(new)}
    return catalog.commit_write([], [Replacement(new, was.version, salience)], redo=redo) == []


def content_of(entry: Entry) -> Draft:
    """Return the draft that a tier is sent for a record, with the fields that a catalog reads."""
    return Draft(id=entry.id, content=entry.digest.decode(), key=entry.key, owner=entry.owner)


def move(catalog: Catalog, units: Sequence[Sequence[Entry]], target: str) -> list[Entry]:
    catalog.note_copies([each for unit in units for each in unit], target)
    return catalog.flip(units, target)


def strays_left(catalog: Catalog) -> int:
    """Return the number of strays in the catalog."""
    return sum(sum(catalog.strays.counts(tier).values()) for tier in catalog._tables.no)


def is_held(claims: Claims, name: Name) -> bool:
    """Return whether a claim on `name` is held."""
    claim = claims.take_if_free([name])
    if claim is not None:
        claim.release()
    return claim is None
