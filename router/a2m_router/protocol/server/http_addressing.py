"""Checks which server a request is for: its target and `Host` (RFC 9112 §3.2 and §3.3, RFC 9110 §7.2). Pure.

A web page can make its own name resolve to an address of this machine (DNS rebinding), and then read the answers of
local servers. But it cannot change the `Host` that the browser sends. So a server that listens only on loopback
addresses accepts only requests whose `Host` is a loopback name.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
from typing import Final

import msgspec

from a2m_router.protocol.server.server import Refusal

# uri-host and port, RFC 3986 §3.2.2, without a user, which is not allowed in a request
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]]+)(?::[0-9]*)?")
_ABSOLUTE: Final = re.compile(rb"(?:http|https)://([^/?]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_CLOSE: Final[Mapping[str, str]] = {"Connection": "close"}


def is_loopback(host: str) -> bool:
    """Return whether a host (IPv6 without brackets) is certainly this machine: a loopback address or localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_meant(host: str, names: Collection[str]) -> bool:
    """Return whether a `Host` header, with or without a port, is a loopback name or one of `names` (lower case)."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].removeprefix("[").removesuffix("]").lower()
    return is_loopback(name) or name in names


class Addressed(msgspec.Struct, frozen=True):
    """A request's path, in origin form and without a query, and its headers, with names in lower case."""

    path: bytes
    headers: list[tuple[bytes, bytes]]


def addressed(
    path: bytes, headers: Sequence[tuple[bytes, bytes]], version: str, names: Collection[str] | None
) -> Addressed | Refusal:
    """Return a request's path and headers, or why it is rejected.

    A target in absolute form, as for a proxy, is accepted; its host replaces `Host` (RFC 9112 §3.2.2).

    Args:
        path: the target as received, without its query.
        headers: names in lower case.
        version: of HTTP: "1.0" or "1.1".
        names: accepted hosts, besides those of the loopback; None accepts any.
    """
    encoded = any(name == b"transfer-encoding" for name, _ in headers)
    if encoded and any(name == b"content-length" for name, _ in headers):
        # request smuggling: a proxy may have used the other header, and taken a part of the body for the next request
        return Refusal(400, "expected one of the headers Content-Length and Transfer-Encoding, got both", _CLOSE)
    if encoded and version == "1.0":
        return Refusal(400, "HTTP/1.0 has no Transfer-Encoding; expected Content-Length", _CLOSE)
    headers = list(headers)
    absolute = _ABSOLUTE.fullmatch(path)
    if absolute is not None:
        authority, path = absolute[1], absolute[2] or b"/"
        if _HOST.fullmatch(authority.decode("latin-1")) is None:
            return Refusal(400, "the target of the request must have a host, with or without a port", _CLOSE)
        headers = [(b"host", authority), *((name, value) for name, value in headers if name != b"host")]
    # HTTP/1.0 may omit it, as some health checks do; browsers always send it
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), None)
    if names is not None and host is not None and not is_meant(host, names):
        return _misdirected(host)
    return Addressed(path, headers)


def _misdirected(host: str) -> Refusal:
    shown = host if len(host) <= 80 else f"{host[:79]}…"
    return Refusal(
        421,
        f"Host: this server listens on this machine only, and got {shown!r}; expected localhost or an address such as "
        "127.0.0.1. A proxy in front must send one of these, or a name that the settings list (a2m-router: hosts in "
        "[serve])",
        _CLOSE,
    )
