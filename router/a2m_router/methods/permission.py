"""What a caller may change, where the file says who may write into which tier (§6): asked before anything is changed.

A caller is refused what it names and may not change: by its id, its key, or the tier. What it only describes, by a
query or a condition, is another matter: there others' records are passed by, as they always are, and its own are
refused, since it would take them for forgotten.
"""

from collections.abc import Collection, Iterable

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope
from a2m_router.protocol.wire.errors import A2MError, Code


def refuse_unless_writable(scope: Scope, tier: str, where: str) -> None:
    """Raises SCOPE_DENIED, naming the parameter `where`, if the caller may not change what is in `tier`."""
    if scope.writes_to(tier):
        return
    names = ", ".join(map(repr, sorted(scope.writes or ()))) or "none"
    raise A2MError(
        Code.SCOPE_DENIED,
        f"{where}: you may not write into the tier {tier!r}; the tiers that you may write into: {names}",
        {"tier": tier},
    )


def refuse_named(scope: Scope, ids: Collection[str], catalog: Catalog) -> None:
    """Raises SCOPE_DENIED if one of these ids is of a record that the caller sees and may not change."""
    for entry in _unwritable(scope, ids, catalog):
        if catalog.queries.sees(scope, entry):
            refuse_unless_writable(scope, entry.home, f"ids: {entry.id!r}")


def passing_by(scope: Scope, ids: Collection[str], named: Collection[str], catalog: Catalog) -> list[str]:
    """Those of `ids` that a selector has found and the caller may change, or may not know to exist.

    Raises SCOPE_DENIED for those that are `named`, as `refuse_named` does, and for the caller's own.
    """
    refuse_named(scope, set(named).intersection(ids), catalog)
    passed = _unwritable(scope, ids, catalog)
    for entry in passed:
        if entry.owner is not None and scope.holds(entry.owner):
            refuse_unless_writable(scope, entry.home, f"what is meant holds {entry.id!r}")
    unwritable = {entry.id for entry in passed}
    return [id for id in ids if id not in unwritable]


def _unwritable(scope: Scope, ids: Iterable[str], catalog: Catalog) -> list[Entry]:
    if scope.writes is None:
        return []
    return [entry for entry in catalog.records.find(ids).values() if not scope.writes_to(entry.home)]
