"""The HTTP front door's rules: which origins may call, and who a caller is (§6, §8.3.1)."""

from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Protocol

from router.a2m.server import Caller, Refusal


class Principal(Protocol):
    """Who may call: whoever shows the token with this SHA-256, in lower-case hex, acts as `owner`."""

    @property
    def owner(self) -> str: ...
    @property
    def token_sha256(self) -> str: ...


def admission(
    origins: Collection[str], principals: Collection[Principal]
) -> Callable[[Mapping[str, str]], Caller | Refusal]:
    """The rules as a function of a request's headers.

    Args:
        origins: lower-case origins of browsers' pages that may call. A request without an Origin is no browser's.
        principals: if there are none, callers are not told apart; else each must show its token.
    """
    allowed = frozenset(origins)
    known = tuple(principals)

    def admit(headers: Mapping[str, str]) -> Caller | Refusal:
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in allowed:
            return Refusal(403, f"pages of {origin} may not call this server; its settings list the origins that may")
        if not known:
            return Caller(asserts_owner=False)
        owner = _owner(headers.get("authorization", ""), known)
        if owner is None:
            challenge = {"WWW-Authenticate": 'Bearer realm="a2m"'}
            return Refusal(401, "expected the header Authorization: Bearer, with the token of a principal", challenge)
        return Caller(asserts_owner=False, owner=owner)

    return admit


def _owner(authorization: str, principals: tuple[Principal, ...]) -> str | None:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer":
        return None
    # only blanks are not the token's; without an argument, strip would take the last byte of many a UTF-8 character
    shown = sha256(token.strip(" \t").encode("latin-1", "replace")).hexdigest()
    owner: str | None = None
    # all of them, whichever fits: how long it takes must tell nothing
    for principal in principals:
        if compare_digest(shown, principal.token_sha256):
            owner = principal.owner
    return owner
