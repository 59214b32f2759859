"""An HTTP body out of its content codings (RFC 9110 §8.4). Neither end of ours asks for one: some servers, and what
stands before them, compress all the same.

A body unfolds to a thousand times its size, and in several codings to a million times: no more is ever unfolded than
what the caller can take.
"""

import gzip
import zlib
from io import BytesIO
from typing import Final

CODINGS: Final = ("gzip", "x-gzip", "deflate")  # what can be taken off

_MOST: Final = 4  # codings, one upon the other; nobody who means well uses two
_GZIP: Final = b"\x1f\x8b"  # the first bytes of each of its members (RFC 1952 §2.3.1)
_RAW: Final = -zlib.MAX_WBITS


def unpacked(body: bytes, codings: str, most: int) -> bytes | None:
    """The body without the codings of its Content-Encoding; None if it is longer than `most` bytes, in any of them.

    Raises ValueError, in a sentence, for a coding that is not in CODINGS, and for a body that is not in its coding or
    ends before that does.
    """
    named = [coding for each in codings.split(",") if (coding := each.strip().lower()) not in ("", "identity")]
    for coding in named:
        if coding not in CODINGS:
            raise ValueError(f"it is in the coding {coding[:40]!r}, which was not asked for")
    if len(named) > _MOST:
        raise ValueError(f"it is in {len(named)} codings, one upon the other")
    plain: bytes | None = body
    for coding in reversed(named):
        if not plain:  # too long; or an answer without a body, which stays without one
            break
        try:
            plain = _of_gzip(plain, most) if plain.startswith(_GZIP) else _of_deflate(plain, coding, most)
        except EOFError:
            raise ValueError(f"its {coding} ends in the middle") from None
        except (OSError, zlib.error):
            raise ValueError(f"it is said to be {coding}, and is not") from None
    return None if plain is None or len(plain) > most else plain


def _of_gzip(body: bytes, most: int) -> bytes | None:
    """Of all its members. Raises EOFError, OSError and zlib.error."""
    with gzip.GzipFile(fileobj=BytesIO(body)) as file:
        plain = file.read(most + 1)  # what is shorter was read to its end, and found to have one
    return plain if len(plain) <= most else None


def _of_deflate(body: bytes, coding: str, most: int) -> bytes | None:
    """In zlib's frame (RFC 1950), or in none, as some servers have it. Raises EOFError and zlib.error."""
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
