"""SQLite's write-ahead log as a file: written anew, so that a sync that succeeds proves something again.

When a sync fails, the system may have dropped what it should have written and still show it to whoever reads, and the
next sync then succeeds without it. Only what is written once more after that can be trusted to a sync. Written over
itself, a log is never worse than it was, whenever the power ends.

How a log is laid out stands in SQLite's file format, "The Write-Ahead Log": a header of 32 bytes, then frames of a
header of 24 bytes and a page; each frame carries a checksum over all that is before it.
"""

import errno
import os
import struct
import sys
from array import array
from typing import Final

_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_MAGIC: Final = (0x377F0682, 0x377F0683)  # the second says that checksums take words in big-endian order
_PIECE: Final = 1 << 20


def write_anew(log: int, frames: int) -> None:
    """Write the first `frames` frames of a log over themselves, and what is before them. Nobody else writes meanwhile.

    Args:
        log: a descriptor to read and write.

    Raises OSError, also where the frames are not all there any more: then they are lost, and nothing is written.
    """
    header = os.pread(log, _HEADER, 0)
    if frames == 0 and len(header) < _HEADER:
        return
    whole = _Checksums(header)
    at = _HEADER
    for _ in range(frames):
        frame = os.pread(log, whole.frame_size, at)
        if not whole.continues_with(frame):
            raise OSError(errno.EIO, "the disk has lost what was committed since it last confirmed a write")
        at += whole.frame_size
    _copy_onto_itself(log, at)


def write_all_anew(log: int) -> None:
    """Write a log over itself that nobody has open; whoever opens it next finds out how far it holds together."""
    _copy_onto_itself(log, os.fstat(log).st_size)


def _copy_onto_itself(log: int, size: int) -> None:
    for at in range(0, size, _PIECE):
        piece = os.pread(log, min(_PIECE, size - at), at)
        if os.pwrite(log, piece, at) != len(piece):
            raise OSError(errno.EIO, "the disk took a part of a write only")


class _Checksums:
    """The running checksum of one log, from its header on."""

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
        """Whether this is the frame that was written next."""
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
