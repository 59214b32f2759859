"""Whom a request is for: its target and its `Host` (RFC 9112 §3.2 and §3.3, RFC 9110 §7.2). Pure.

A page in a browser can have its own name looked up as an address of this machine (DNS rebinding), and then read what
answers there as if it were its own; but it cannot change the `Host` that the browser sends. So a server that listens
on loopback addresses alone answers only requests that name one.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
from typing import Final

import msgspec

from a2m_router.protocol.server.server import Refusal

# uri-host and port, RFC 3986 §3.2.2, without a user, which no request may have
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]]+)(?::[0-9]*)?")
_ABSOLUTE: Final = re.compile(rb"(?:http|https)://([^/?]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_CLOSE: Final[Mapping[str, str]] = {"Connection": "close"}


def is_loopback(host: str) -> bool:
    """Whether a host (IPv6 without brackets) is this machine's own and no other's: any other name may mean any
    address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_meant(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` header, with a port or without, names this machine's loopback or one of `names`, in lower
    case."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].removeprefix("[").removesuffix("]").lower()
    return is_loopback(name) or name in names


class Addressed(msgspec.Struct, frozen=True):
    """What a request asks for, in origin form and without a query, and its headers, names in lower case."""

    path: bytes
    headers: list[tuple[bytes, bytes]]


def addressed(
    path: bytes, headers: Sequence[tuple[bytes, bytes]], version: str, names: Collection[str] | None
) -> Addressed | Refusal:
    """What a request asks for, or why it is refused whatever that is.

    A target in absolute form, as to a proxy, is accepted; what it names counts in place of `Host` (RFC 9112 §3.2.2).

    Args:
        path: the target as it came, without its query.
        headers: names in lower case.
        version: of HTTP: "1.0" or "1.1".
        names: which a request may be for, beside those of the loopback; None: any.
    """
    encoded = any(name == b"transfer-encoding" for name, _ in headers)
    if encoded and any(name == b"content-length" for name, _ in headers):
        # whoever is on the way may have read the one, and taken for the next request what is in this one's body
        return Refusal(400, "expected one of the headers Content-Length and Transfer-Encoding, got both", _CLOSE)
    if encoded and version == "1.0":
        return Refusal(400, "HTTP/1.0 has no Transfer-Encoding; expected Content-Length", _CLOSE)
    headers = list(headers)
    absolute = _ABSOLUTE.fullmatch(path)
    if absolute is not None:
        authority, path = absolute[1], absolute[2] or b"/"
        if _HOST.fullmatch(authority.decode("latin-1")) is None:
            return Refusal(400, "the target of the request holds no host, or more than a host and a port", _CLOSE)
        headers = [(b"host", authority), *((name, value) for name, value in headers if name != b"host")]
    # HTTP/1.0 may leave it out, as those do who look whether a server is alive; no browser does
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), None)
    if names is not None and host is not None and not is_meant(host, names):
        return _misdirected(host)
    return Addressed(path, headers)


def _misdirected(host: str) -> Refusal:
    shown = host if len(host) <= 80 else f"{host[:79]}…"
    return Refusal(
        421,
        f"Host: this server listens on this machine only, and is not called {shown!r}; expected localhost or an "
        "address such as 127.0.0.1. A proxy in front has to say one of these, or a name that the settings list (of "
        "a2m-router: hosts in [serve])",
        _CLOSE,
    )
