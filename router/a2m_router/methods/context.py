"""What every family of methods works on, and whose eyes a call sees with (§6)."""

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
    """What every family of methods works on.

    Args:
        clock: the time, in milliseconds since 1970.
        emit: logs an event.
        on_change: called after a change, so that the policy looks at what it filled or made due.
    """

    settings: Settings
    catalog: Catalog
    gateway: TierGateway
    mounts: Mounts
    clock: Callable[[], int]
    emit: Callable[[Event], None]
    on_change: Callable[[], None]

    def refuse_if_read_only(self) -> None:
        """Raises READ_ONLY where all tiers are mounts."""
        refuse_if_read_only(self.mounts)

    def sight(self, scope: Scope) -> Sight:
        """What `scope` sees, as events and counts of places are told by it."""
        return Sight(scope.owner, frozenset(tier.name for tier in self.settings.tiers if tier.shared))


def scope_of(caller: Caller, owner: str | None) -> Scope:
    """Whose eyes a call sees with (§6): the owner it asserts where that is believed, else its principal's.

    Raises SCOPE_DENIED when a principal asserts another owner than itself.
    """
    if caller.asserts_owner:
        return Scope(owner, caller.writes)
    if owner is not None and caller.owner is not None and owner != caller.owner:
        raise A2MError(Code.SCOPE_DENIED, f"owner: you are {caller.owner!r}, not {owner!r}")
    return Scope(caller.owner, caller.writes)


def sees_all(caller: Caller) -> bool:
    """Whether a caller sees what belongs to any owner, and the words of those behind: it is no principal, or callers
    are not told apart."""
    return caller.asserts_owner or caller.owner is None


def tells_owners_apart(caller: Caller) -> bool:
    """Whether a call can be of one owner's, and not of another's."""
    return caller.asserts_owner or caller.owner is not None
