"""The HTTP front door's rules: which origins may call, and who a caller is (§6, §8.3.1)."""

from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Final, Protocol, TypeVar

from a2m_router.protocol.server.server import Caller, Refusal


class Principal(Protocol):
    """Who may call: whoever shows the token with this SHA-256, in lower-case hex, acts as `owner`."""

    @property
    def owner(self) -> str: ...
    @property
    def token_sha256(self) -> str: ...


_Principal = TypeVar("_Principal", bound=Principal)

_CHALLENGE: Final = 'Bearer realm="a2m"'
# in the words of RFC 6750, §3
_NO_TOKEN: Final = Refusal(
    401,
    "no token: expected the header Authorization: Bearer, with the token of a principal",
    {"WWW-Authenticate": _CHALLENGE},
)
_OTHER_SCHEME: Final = Refusal(
    401,
    "Authorization: expected the scheme Bearer and the token of a principal, got something else",
    {"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_request"'},
)
_WRONG_TOKEN: Final = Refusal(
    401,
    "wrong token: the one in the header Authorization is that of no principal",
    {"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_token"'},
)


def as_owner(principal: Principal) -> Caller:
    """A principal who may do what its owner may."""
    return Caller(asserts_owner=False, owner=principal.owner)


def admission(
    origins: Collection[str],
    principals: Collection[_Principal],
    caller: Callable[[_Principal], Caller] = as_owner,
) -> Callable[[Mapping[str, str]], Caller | Refusal]:
    """The rules as a function of a request's headers.

    Args:
        origins: lower-case origins of browsers' pages that may call. A request without an Origin is no browser's.
        principals: if there are none, callers are not told apart; else each must show its token.
        caller: who asks when a principal does.
    """
    allowed = frozenset(origins)
    known = tuple((principal.token_sha256, caller(principal)) for principal in principals)

    def admit(headers: Mapping[str, str]) -> Caller | Refusal:
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in allowed:
            return Refusal(403, f"pages of {origin} may not call this server; its settings list the origins that may")
        if not known:
            return Caller(asserts_owner=False)
        return _shown(headers.get("authorization", ""), known)

    return admit


def _shown(authorization: str, known: tuple[tuple[str, Caller], ...]) -> Caller | Refusal:
    """Who shows this; nothing of it is in a refusal, since it may be a token however it is written."""
    # only blanks are not the token's; without an argument, strip would take the last byte of many a UTF-8 character
    scheme, _, token = authorization.strip(" \t").partition(" ")
    token = token.strip(" \t")
    if not scheme or (scheme.lower() == "bearer" and not token):
        return _NO_TOKEN
    if scheme.lower() != "bearer":
        return _OTHER_SCHEME
    digest = sha256(token.encode("latin-1", "replace")).hexdigest()
    found: Caller | Refusal = _WRONG_TOKEN
    # all of them, whichever fits: how long it takes must tell nothing
    for token_sha256, caller in known:
        if compare_digest(digest, token_sha256):
            found = caller
    return found
