"""Rewriting of SQLite's write-ahead log, so that a successful sync proves its content durable again.

When a sync fails, the system may drop the unwritten data and still return it to readers; the next sync then succeeds
without that data. Only data written again after the failure is covered by a later sync. Rewriting a log with its own
content is safe: a power cut at any moment leaves it no worse than before.

SQLite's file format describes the log under "The Write-Ahead Log": a header of 32 bytes, then frames of a header of 24
bytes and a page. Each frame has a checksum over everything before it.
"""

import errno
import os
import struct
import sys
from array import array
from typing import Final

_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_MAGIC: Final = (0x377F0682, 0x377F0683)  # with the second, checksums use big-endian words
_PIECE: Final = 1 << 20


def write_anew(log: int, frames: int) -> None:
    """Rewrite the header and the first `frames` frames of a log in place. No other writer may be active meanwhile.

    Args:
        log: a descriptor to read and write.

    Raises:
        OSError: the disk failed, or some of the frames are lost; in the second case nothing is written.
    """
    header = os.pread(log, _HEADER, 0)
    if frames == 0 and len(header) < _HEADER:
        return
    whole = _Checksums(header)
    at = _HEADER
    for _ in range(frames):
        frame = os.pread(log, whole.frame_size, at)
        if not whole.continues_with(frame):
            raise OSError(errno.EIO, "the disk has lost commits that it had not confirmed")
        at += whole.frame_size
    _copy_onto_itself(log, at)


def write_all_anew(log: int) -> None:
    """Rewrite a whole log that no process has open; SQLite finds its valid part at the next opening."""
    _copy_onto_itself(log, os.fstat(log).st_size)


def _copy_onto_itself(log: int, size: int) -> None:
    for at in range(0, size, _PIECE):
        piece = os.pread(log, min(_PIECE, size - at), at)
        if os.pwrite(log, piece, at) != len(piece):
            raise OSError(errno.EIO, "the disk wrote only a part of the data")


class _Checksums:
    """The running checksum of one log, starting with its header."""

    def __init__(self, header: bytes) -> None:
        if len(header) < _HEADER:
            raise OSError(errno.EIO, "the log has lost its header")
        magic, _, page, _ = struct.unpack(">4I", header[:16])
        if magic not in _MAGIC:
            raise OSError(errno.EIO, "the log has lost its header")
        self.frame_size = _FRAME_HEADER + (65_536 if page == 1 else page)
        self._salt = header[16:24]
        self._swapped = (magic == _MAGIC[1]) == (sys.byteorder == "little")
        self._sums = self._added((0, 0), header[:24])
        if self._sums != struct.unpack(">2I", header[24:32]):
            raise OSError(errno.EIO, "the log has lost its header")

    def continues_with(self, frame: bytes) -> bool:
        """Return whether this is a valid next frame."""
        if len(frame) < self.frame_size or frame[8:16] != self._salt:
            return False
        self._sums = self._added(self._added(self._sums, frame[:8]), frame[_FRAME_HEADER:])
        return self._sums == struct.unpack(">2I", frame[16:24])

    def _added(self, sums: tuple[int, int], data: bytes) -> tuple[int, int]:
        words = array("I", data)
        if self._swapped:
            words.byteswap()
        first, second = sums
        pairs = iter(words)
        for one, other in zip(pairs, pairs, strict=True):
            first = (first + one + second) & 0xFFFFFFFF
            second = (second + other + first) & 0xFFFFFFFF
        return first, second
