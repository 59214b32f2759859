"""A pipe for stderr that no process reads."""

import contextlib
import fcntl
import os
from typing import Final

# the capacity of a pipe of the smallest size
ROOM: Final = 4096


class Unread:
    """A pipe for stderr of the smallest size. `fill` fills it completely."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, ROOM)

    def fill(self) -> None:
        # a separate descriptor, since the program's own must block
        own = os.open(f"/proc/self/fd/{self.writing}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"." * ROOM)
        os.close(own)

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)
