"""The services that every family of methods uses, and the scope of a call (§6)."""

from collections.abc import Callable

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings
from a2m_router.placement.permission import refuse_if_read_only
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.events import Event, Sight
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.mounts import Mounts


class Context(msgspec.Struct, frozen=True):
    """The services that every family of methods uses.

    Args:
        clock: returns the time, in milliseconds since 1970.
        emit: appends an event to the event log.
        on_change: called after a change, so that a pass can handle what is full or due now.
    """

    settings: Settings
    catalog: Catalog
    gateway: TierGateway
    mounts: Mounts
    clock: Callable[[], int]
    emit: Callable[[Event], None]
    on_change: Callable[[], None]

    def refuse_if_read_only(self) -> None:
        """Raise READ_ONLY if all tiers are mounts."""
        refuse_if_read_only(self.mounts)

    def sight(self, scope: Scope) -> Sight:
        """Return which events and counts `scope` may see."""
        return Sight(scope.owner, frozenset(tier.name for tier in self.settings.tiers if tier.shared))


def scope_of(caller: Caller, owner: str | None) -> Scope:
    """Return the scope of a call (§6): the owner that it asserts, if the caller may assert one; else its principal's.

    Raises:
        A2MError: SCOPE_DENIED, a principal asserts another owner than itself.
    """
    if caller.asserts_owner:
        return Scope(owner, caller.writes)
    if owner is not None and caller.owner is not None and owner != caller.owner:
        raise A2MError(Code.SCOPE_DENIED, f"owner: you are {caller.owner!r}, not {owner!r}")
    return Scope(caller.owner, caller.writes)


def sees_all(caller: Caller) -> bool:
    """Return whether a caller may see the records of all owners, and the error texts of tiers.

    It may if it is no principal, or if the binding does not distinguish callers.
    """
    return caller.asserts_owner or caller.owner is None


def tells_owners_apart(caller: Caller) -> bool:
    """Return whether a call can belong to one owner and not to another."""
    return caller.asserts_owner or caller.owner is not None
