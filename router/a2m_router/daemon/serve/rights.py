"""The records of a federation that a principal may change, by `write` and `admin` in the file (§6).

- If no principal has `write`, every principal may write into every tier.
- If at least one has it, each principal may change the records that its own `write` names: those in shared tiers by the
  tier's name, and with "private" its own records in all other tiers. A principal without `write` has the right
  "private"; an admin without `write` may change everything.
- Moves by the policy need no rights. They follow `may_publish`.
"""

from collections.abc import Iterator, Sequence

from a2m_router.config.settings import PRIVATE, Principal, Tier
from a2m_router.protocol.server.server import Caller


def writable(principal: Principal, principals: Sequence[Principal], tiers: Sequence[Tier]) -> frozenset[str] | None:
    """Return the names of the tiers whose records a principal may change; None for all tiers."""
    if all(other.write is None for other in principals) or (principal.admin and principal.write is None):
        return None
    names = (PRIVATE,) if principal.write is None else principal.write
    private = [tier.name for tier in tiers if not tier.shared and PRIVATE in names]
    return frozenset([*private, *(name for name in names if name != PRIVATE)])


def caller(principal: Principal, principals: Sequence[Principal], tiers: Sequence[Tier]) -> Caller:
    """Return the caller for a principal. An admin may name any owner, like a local caller."""
    owner = None if principal.admin else principal.owner
    return Caller(principal.admin, owner, writes=writable(principal, principals, tiers))


def write_rights(principals: Sequence[Principal], tiers: Sequence[Tier]) -> Iterator[str]:
    """Yield one sentence for each principal: which tiers it may write into."""
    for principal in principals:
        who = f"{principal.owner!r} (admin)" if principal.admin else repr(principal.owner)
        yield f"principal {who} may write: {_where(writable(principal, principals, tiers), principal, tiers)}"


def warning(principals: Sequence[Principal], tiers: Sequence[Tier]) -> str | None:
    """Return a warning if every principal may write into shared tiers because none has `write`; else None."""
    shared = _shared(tiers)
    if not principals or not shared or any(principal.write is not None for principal in principals):
        return None
    return (
        f"every principal may write into the shared tiers ({', '.join(shared)}), which all principals read; to "
        'restrict this, give principals `write`, such as write = ["private", "' + shared[0] + '"]'
    )


def _where(names: frozenset[str] | None, principal: Principal, tiers: Sequence[Tier]) -> str:
    private = [tier.name for tier in tiers if not tier.shared and (names is None or tier.name in names)]
    shared = [name for name in _shared(tiers) if names is None or name in names]
    own = "every owner's records" if principal.admin else "its own records"
    places = [f"{own} in {', '.join(private)}"] if private else []
    places += [f"the shared {', '.join(shared)}"] if shared else []
    return " and ".join(places) or "nothing"


def _shared(tiers: Sequence[Tier]) -> list[str]:
    return [tier.name for tier in tiers if tier.shared and not tier.mount]
