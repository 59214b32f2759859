"""What may be changed, and by whom (§2.1, §6): asked before anything is changed. A mount takes no changes; and the file
may say who may write into which tier.

A caller is refused what it names and may not change: by its id, its key, or the tier. What it only describes, by a
query or a condition, is another matter: there others' records are passed by, as they always are, and its own are
refused, since it would take them for forgotten.
"""

from collections.abc import Collection, Iterable, Sequence

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings, Tier
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params, unknown_tier
from a2m_router.tiers.mounts import Mounts


def refuse_if_read_only(mounts: Mounts) -> None:
    """Raises READ_ONLY where all tiers are mounts: then it is the answer to every write (§2.1)."""
    if not mounts.managed:
        raise A2MError(Code.READ_ONLY, "this federation consists of mounts only; it takes no writes")


def destination(name: str | None, settings: Settings, mounts: Mounts, where: str) -> Tier:
    """The tier a write is aimed at, by name or by default. Raises UNKNOWN_TIER, INVALID_PARAMS for a mount, and
    READ_ONLY where there is nothing else."""
    refuse_if_read_only(mounts)
    if name is None:
        return next((tier for tier in mounts.managed if tier.kind == "working"), mounts.managed[0])
    for tier in settings.tiers:
        if tier.name == name:
            if tier in mounts:
                raise invalid_params(where, f"{name!r} is mounted read-only; write to another tier")
            return tier
    raise unknown_tier(name, [tier.name for tier in settings.tiers])


def refuse_mounted(ids: Sequence[str], mounts: Mounts, catalog: Catalog, scope: Scope) -> None:
    """Raises INVALID_PARAMS naming the first of `ids` that is one of a mount's, where something is to be changed; a
    record of the federation's own may have such an id, from before there was the mount. READ_ONLY where there are only
    mounts."""
    refuse_if_read_only(mounts)
    for place, id in enumerate(ids):
        mount = mounts.of(id)
        if mount is None or catalog.queries.knows_of(scope, id):
            continue
        # what nobody has looked through yet may hold it, and a forget is to reach it there
        if all(catalog.tiers.is_scanned(tier.name) for tier in mounts.managed):
            problem = f"{id!r} is a record of {mount.name!r}, which is mounted read-only; nothing was changed"
            raise invalid_params(f"ids[{place}]", problem)


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
