"""Framing by line (§8.2): bytes in, lines out. No I/O.

Goals: linear time, however the stream is cut into chunks; never more than one line of `limit` bytes in memory.
"""

from typing import Final

DEFAULT_MAX_MESSAGE: Final = 64 * 2**20

# U+FEFF at the start of a text, as some editors and shells write it; it has no meaning here
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

# the kept beginning of a line that is too long: enough to read which call it answers
_BEGINNING: Final = 256


class LineSplitter:
    """Cuts a stream of bytes into its lines.

    Args:
        limit: the longest line, in bytes and without its newline. A longer one is returned as None as soon as it is
            known to be too long; the rest of it is skipped without being held.

    `beginnings` has the first bytes of each line that was too long, in order; the caller may remove them.
    """

    def __init__(self, limit: int = DEFAULT_MAX_MESSAGE) -> None:
        self.beginnings: list[bytes] = []
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """Return the lines that `chunk` completes, without newlines and blank lines; None for one that is too long."""
        lines: list[bytes | None] = []
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._hold(piece, lines)
            lines += self.end()
        self._hold(rest, lines)
        return lines

    def end(self) -> list[bytes | None]:
        """Return the line that is still open, at the end of a stream: its last line may lack a newline."""
        line = bytes(self._held)
        self._held.clear()
        self._skipping = False
        return [line] if line.removeprefix(BYTE_ORDER_MARK).strip() else []

    def _hold(self, piece: bytes, lines: list[bytes | None]) -> None:
        if self._skipping:
            return
        if len(self._held) + len(piece) > self._limit:
            lines.append(None)
            self.beginnings.append(bytes(self._held[:_BEGINNING] or piece[:_BEGINNING]))
            self._held.clear()
            self._skipping = True
        else:
            self._held += piece
