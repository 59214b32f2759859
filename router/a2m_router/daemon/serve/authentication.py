"""Authentication over HTTP: which origins may call, and which principal a caller is (§6, §8.3.1)."""

from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Final, Protocol, TypeVar

from a2m_router.protocol.server.server import Caller, Refusal


class Principal(Protocol):
    """A principal: a caller with the token that has this SHA-256, in lower-case hex, acts as `owner`."""

    @property
    def owner(self) -> str: ...
    @property
    def token_sha256(self) -> str: ...


_Principal = TypeVar("_Principal", bound=Principal)

_CHALLENGE: Final = 'Bearer realm="a2m"'
# the headers follow RFC 6750, §3
_NO_TOKEN: Final = Refusal(
    401,
    "no token: expected the header Authorization: Bearer with the token of a principal",
    {"WWW-Authenticate": _CHALLENGE},
)
_OTHER_SCHEME: Final = Refusal(
    401,
    "Authorization: expected the scheme Bearer and the token of a principal, got something else",
    {"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_request"'},
)
_WRONG_TOKEN: Final = Refusal(
    401,
    "wrong token: no principal has the token of the header Authorization",
    {"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_token"'},
)


def as_owner(principal: Principal) -> Caller:
    """Return the caller for a principal with the rights of its owner."""
    return Caller(asserts_owner=False, owner=principal.owner)


def admission(
    origins: Collection[str],
    principals: Collection[_Principal],
    caller: Callable[[_Principal], Caller] = as_owner,
) -> Callable[[Mapping[str, str]], Caller | Refusal]:
    """Return a function that decides from the headers of a request who the caller is, or why it is rejected.

    Args:
        origins: lower-case origins of the web pages that may call. A request without an Origin does not come from a
            browser, and is allowed.
        principals: if there are any, each caller must send the token of one; else all callers have the same rights.
        caller: returns the caller for a principal.
    """
    allowed = frozenset(origins)
    known = tuple((principal.token_sha256, caller(principal)) for principal in principals)

    def admit(headers: Mapping[str, str]) -> Caller | Refusal:
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in allowed:
            return Refusal(403, f"pages of {origin} may not call this server; to allow it, add it to serve.origins")
        if not known:
            return Caller(asserts_owner=False)
        return _authenticate(headers.get("authorization", ""), known)

    return admit


def _authenticate(authorization: str, known: tuple[tuple[str, Caller], ...]) -> Caller | Refusal:
    """Return the caller with this Authorization header. No refusal quotes it: even a malformed one may hold a token."""
    # strip only blanks: without an argument, strip would also remove the last byte of some UTF-8 characters
    scheme, _, token = authorization.strip(" \t").partition(" ")
    token = token.strip(" \t")
    if not scheme or (scheme.lower() == "bearer" and not token):
        return _NO_TOKEN
    if scheme.lower() != "bearer":
        return _OTHER_SCHEME
    digest = sha256(token.encode("latin-1", "replace")).hexdigest()
    found: Caller | Refusal = _WRONG_TOKEN
    # compare with all principals, also after a match: the time taken must not reveal which one matched
    for token_sha256, caller in known:
        if compare_digest(digest, token_sha256):
            found = caller
    return found
