"""Decodes the content codings of an HTTP body (RFC 9110 §8.4). Our client requests none, but some servers and proxies
compress anyway.

A body can expand to a thousand times its size, and with several codings to a million times. So decoding stops at the
caller's limit.
"""

import gzip
import zlib
from io import BytesIO
from typing import Final

CODINGS: Final = ("gzip", "x-gzip", "deflate")  # the supported codings

_MOST: Final = 4  # codings applied in turn, at most; honest servers use one
_GZIP: Final = b"\x1f\x8b"  # the first bytes of each gzip member (RFC 1952 §2.3.1)
_RAW: Final = -zlib.MAX_WBITS


def unpacked(body: bytes, codings: str, most: int) -> bytes | None:
    """Return the body without the codings of its Content-Encoding; None if it exceeds `most` bytes at any step.

    Raises:
        ValueError: a coding is not in CODINGS, or the body is not in its coding or incomplete. The message is a
            sentence.
    """
    named = [coding for each in codings.split(",") if (coding := each.strip().lower()) not in ("", "identity")]
    for coding in named:
        if coding not in CODINGS:
            raise ValueError(f"it has the coding {coding[:40]!r}, which was not requested")
    if len(named) > _MOST:
        raise ValueError(f"it has {len(named)} codings; expected at most {_MOST}")
    plain: bytes | None = body
    for coding in reversed(named):
        if not plain:  # too long, or an answer without a body
            break
        try:
            plain = _of_gzip(plain, most) if plain.startswith(_GZIP) else _of_deflate(plain, coding, most)
        except EOFError:
            raise ValueError(f"its {coding} data is incomplete") from None
        except (OSError, zlib.error):
            raise ValueError(f"its Content-Encoding is {coding}, but its data is not") from None
    return None if plain is None or len(plain) > most else plain


def _of_gzip(body: bytes, most: int) -> bytes | None:
    """Return the content of all members. Raises EOFError, OSError and zlib.error."""
    with gzip.GzipFile(fileobj=BytesIO(body)) as file:
        plain = file.read(most + 1)  # a shorter body is read to its end, so a missing end raises EOFError
    return plain if len(plain) <= most else None


def _of_deflate(body: bytes, coding: str, most: int) -> bytes | None:
    """Decode deflate in zlib's frame (RFC 1950), or raw, as some servers send it. Raises EOFError and zlib.error."""
    try:
        return _inflated(body, zlib.MAX_WBITS, most)
    except zlib.error:
        if coding != "deflate":
            raise
        return _inflated(body, _RAW, most)


def _inflated(body: bytes, window: int, most: int) -> bytes | None:
    unpacking = zlib.decompressobj(window)
    plain = unpacking.decompress(body, most + 1)
    if len(plain) > most:
        return None
    if not unpacking.eof:
        raise EOFError
    return plain
