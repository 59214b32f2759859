"""The permission checks (§2.1, §6), made before any change. A mount takes no changes; and federation.toml may say
which callers may write into which tier.

A call is rejected if it names a record (by id or key) or a tier that the caller may not change. A call may also select
records by a query or a condition. Then records of others that the caller may not change are skipped, as usual. Its own
ones cause a rejection: if the call skipped them, its caller would take them for forgotten.
"""

from collections.abc import Collection, Iterable, Sequence

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings, Tier
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params, unknown_tier
from a2m_router.tiers.mounts import Mounts


def refuse_if_read_only(mounts: Mounts) -> None:
    """Raise READ_ONLY if all tiers are mounts: the federation then rejects every write (§2.1)."""
    if not mounts.managed:
        raise A2MError(Code.READ_ONLY, "this federation consists of mounts only; it takes no writes")


def destination(name: str | None, settings: Settings, mounts: Mounts, where: str) -> Tier:
    """Return the tier of a write, by name or by default.

    Raises:
        A2MError: UNKNOWN_TIER; INVALID_PARAMS for a mount; READ_ONLY if all tiers are mounts.
    """
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
    """Reject a change of a mount's records.

    The federation itself may have a record with such an id, written before the mount was added; that one is accepted.

    Raises:
        A2MError: INVALID_PARAMS names the first of `ids` that belongs to a mount; READ_ONLY if all tiers are mounts.
    """
    refuse_if_read_only(mounts)
    for place, id in enumerate(ids):
        mount = mounts.of(id)
        if mount is None or catalog.queries.knows_of(scope, id):
            continue
        # a managed tier that is not scanned may hold a record with this id, and a forget has to reach it
        if all(catalog.tiers.is_scanned(tier.name) for tier in mounts.managed):
            problem = f"{id!r} is a record of {mount.name!r}, which is mounted read-only; nothing was changed"
            raise invalid_params(f"ids[{place}]", problem)


def refuse_unless_writable(scope: Scope, tier: str, where: str) -> None:
    """Raise SCOPE_DENIED, naming the parameter `where`, if the caller may not change records in `tier`."""
    if scope.writes_to(tier):
        return
    names = ", ".join(map(repr, sorted(scope.writes or ()))) or "none"
    raise A2MError(
        Code.SCOPE_DENIED,
        f"{where}: you may not write into the tier {tier!r}; the tiers that you may write into: {names}",
        {"tier": tier},
    )


def refuse_named(scope: Scope, ids: Collection[str], catalog: Catalog) -> None:
    """Raise SCOPE_DENIED if the caller may read, but not change, the record of one of these ids."""
    for entry in _unwritable(scope, ids, catalog):
        if catalog.queries.sees(scope, entry):
            refuse_unless_writable(scope, entry.home, f"ids: {entry.id!r}")


def passing_by(scope: Scope, ids: Collection[str], named: Collection[str], catalog: Catalog) -> list[str]:
    """Return the ids that a selector has found, without those of records that the caller may not change.

    Raises:
        A2MError: SCOPE_DENIED, if such a record is among the `named` ids and the caller may read it (`refuse_named`),
            or if it is the caller's own.
    """
    refuse_named(scope, set(named).intersection(ids), catalog)
    skipped = _unwritable(scope, ids, catalog)
    for entry in skipped:
        if entry.owner is not None and scope.holds(entry.owner):
            refuse_unless_writable(scope, entry.home, f"the call would change {entry.id!r}")
    unwritable = {entry.id for entry in skipped}
    return [id for id in ids if id not in unwritable]


def _unwritable(scope: Scope, ids: Iterable[str], catalog: Catalog) -> list[Entry]:
    if scope.writes is None:
        return []
    return [entry for entry in catalog.records.find(ids).values() if not scope.writes_to(entry.home)]
