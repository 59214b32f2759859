"""Which of a federation's records a principal may change, as the file's `write` and `admin` say (§6).

- As long as no principal has `write`, every one may write into every tier.
- As soon as one has it, each may change what its own `write` names: shared tiers, and with "private" what it owns in
  the tiers that are not shared. Who has none may change what it owns there; an admin, everything.
- The policy's own moves are not asked about: those follow `may_publish`.
"""

from collections.abc import Iterator, Sequence

from a2m_router.config.settings import PRIVATE, Principal, Tier
from a2m_router.protocol.server.server import Caller


def writable(principal: Principal, principals: Sequence[Principal], tiers: Sequence[Tier]) -> frozenset[str] | None:
    """The tiers whose records a principal may change, by their names; None: any."""
    if all(other.write is None for other in principals) or (principal.admin and principal.write is None):
        return None
    names = (PRIVATE,) if principal.write is None else principal.write
    private = [tier.name for tier in tiers if not tier.shared and PRIVATE in names]
    return frozenset([*private, *(name for name in names if name != PRIVATE)])


def caller(principal: Principal, principals: Sequence[Principal], tiers: Sequence[Tier]) -> Caller:
    """Who asks when a principal does. An admin is believed whichever owner it names, as a local caller is."""
    owner = None if principal.admin else principal.owner
    return Caller(principal.admin, owner, writes=writable(principal, principals, tiers))


def told(principals: Sequence[Principal], tiers: Sequence[Tier]) -> Iterator[str]:
    """Who may write where, one sentence a principal."""
    for principal in principals:
        who = f"{principal.owner!r}, an admin," if principal.admin else repr(principal.owner)
        yield f"principal {who} may write: {_where(writable(principal, principals, tiers), principal, tiers)}"


def warning(principals: Sequence[Principal], tiers: Sequence[Tier]) -> str | None:
    """What is to be said of a file in which no principal has `write`; None where that opens nothing to anybody."""
    shared = _shared(tiers)
    if not principals or not shared or any(principal.write is not None for principal in principals):
        return None
    return (
        f"every principal may write into the shared tiers ({', '.join(shared)}), for all to read; to say who may, give "
        'principals `write`, such as write = ["private", "' + shared[0] + '"]'
    )


def _where(names: frozenset[str] | None, principal: Principal, tiers: Sequence[Tier]) -> str:
    private = [tier.name for tier in tiers if not tier.shared and (names is None or tier.name in names)]
    shared = [name for name in _shared(tiers) if names is None or name in names]
    own = "every owner's records" if principal.admin else "what it owns"
    places = [f"{own} in {', '.join(private)}"] if private else []
    places += [f"the shared {', '.join(shared)}"] if shared else []
    return " and ".join(places) or "nothing"


def _shared(tiers: Sequence[Tier]) -> list[str]:
    return [tier.name for tier in tiers if tier.shared and not tier.mount]
