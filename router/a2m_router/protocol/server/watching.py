"""memory/events, memory/events/subscribe and unsubscribe (§4.12 to §4.14), for any server that keeps an event log."""

from collections.abc import Callable, Mapping

import msgspec

from a2m_router.protocol.server.event_log import EventLog, Polled
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.events import Sight
from a2m_router.protocol.wire.method_params import Events, Subscribe, Unsubscribe


class Subscribed(msgspec.Struct):
    """The answer to subscribe and unsubscribe."""

    subscribed: bool


class EventsEntry(msgspec.Struct):
    """The entry of describe for events: whether this connection can get notifications."""

    push: bool


class Watching:
    """Serves an event log.

    Args:
        sight: returns the rights of a caller that names this owner; raises A2MError if it may not name it.
    """

    def __init__(self, log: EventLog, sight: Callable[[Caller, str | None], Sight]) -> None:
        self._log = log
        self._sight = sight

    def methods(self) -> Mapping[str, Method]:
        """The methods of the capability `events`."""
        return {
            "memory/events": Method(Events, self.events),
            "memory/events/subscribe": Method(Subscribe, self.subscribe),
            "memory/events/unsubscribe": Method(Unsubscribe, self.unsubscribe),
        }

    async def events(self, params: Events, caller: Caller) -> Polled:
        """§4.12"""
        if params.limit == 0:
            raise invalid_params("limit", "expected 1 or more; leave it out for no limit")
        return self._log.poll(self._sight(caller, params.owner), params.cursor, params.limit, _chosen(params.kinds))

    async def subscribe(self, params: Subscribe, caller: Caller) -> Subscribed:
        """§4.13; a new subscription replaces the old one. Raises CAPABILITY_NOT_SUPPORTED without a channel."""
        if caller.channel is None:
            raise A2MError(
                Code.CAPABILITY_NOT_SUPPORTED,
                "this connection carries no notifications; poll memory/events instead (§4.13)",
            )
        sight = self._sight(caller, params.owner)
        caller.channel.follow(lambda wake: self._log.follow(sight, _chosen(params.kinds), wake))
        return Subscribed(True)

    async def unsubscribe(self, params: Unsubscribe, caller: Caller) -> Subscribed:
        """§4.14; without a subscription or a channel, this does nothing."""
        if caller.channel is not None:
            caller.channel.follow(None)
        return Subscribed(False)


def _chosen(kinds: list[str] | None) -> frozenset[str] | None:
    return None if kinds is None else frozenset(kinds)
