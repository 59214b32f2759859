"""One POST and its answer, whatever library carries them: what HTTP's client end asks for, and what it is told.

- A message leaves once or not at all: nothing here sends anything a second time.
- `Posting.sent` says whether it may have left, and says so before it does. Exceptions do not: one and the same may mean
  that nobody was there, and that the server hung up with the message in its hands.
- What is told of a failure is in our words. A library's own may quote the address, which may hold a key.
"""

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

# seconds; a server may close an idle connection just as the next call goes out, and most wait for 5 s or more
KEPT_ALIVE: Final = 4.0


class Posting:
    """A message on its way. `sent` is set before any of it may have left, and stays set."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.sent = False


class Answer(msgspec.Struct, frozen=True):
    """What came back, whatever its status. A body of None was longer than the limit, and was not read on."""

    status: int
    body: bytes | None
    coding: str = ""  # Content-Encoding; the body is still in it


class Broken(Exception):
    """No whole answer came. The text says why, and goes on from "cannot be reached: " or "the connection broke: "."""


class Exchange(Protocol):
    async def post(self, posting: Posting) -> Answer:
        """The answer to the message, redirects too. When it is cancelled, nothing of the message leaves afterwards, and
        its connection carries nothing else.

        Raises Broken.
        """


def reason_of(problem: BaseException, otherwise: str) -> str:
    """Why an exchange failed: what the system or TLS said, if that is what lies beneath, else `otherwise`."""
    # the libraries' own exceptions may be subclasses of these, and have nothing to tell
    beneath = [cause for cause in causes(problem) if type(cause).__module__ in ("builtins", "socket", "ssl")]
    for kind, sentence in _SENTENCES:
        for cause in beneath:
            if isinstance(cause, kind) and (said := sentence(cause)):
                return said
    return otherwise


# of those that fit, the first tells the most
_SENTENCES: Final[tuple[tuple[type[BaseException], Callable[[Any], str]], ...]] = (
    (
        ssl.SSLCertVerificationError,
        lambda problem: f"its certificate is not trusted: {problem.verify_message}; a tier's ca_file can say whose is",
    ),
    (
        ssl.SSLError,
        lambda problem: f"TLS failed: {str(problem.reason).lower().replace('_', ' ')}; see that it serves https there",
    ),
    (socket.gaierror, lambda problem: f"its host cannot be found: {problem.strerror}"),
    (UnicodeError, lambda problem: "its host's name is none that can be looked up"),
    (OSError, lambda problem: os.strerror(problem.errno) if problem.errno else ""),
)


def causes(problem: BaseException | None) -> Iterator[BaseException]:
    """The exception, and what it was raised from or after, down to the first."""
    while problem is not None:
        yield problem
        if isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        else:
            problem = problem.__cause__ or problem.__context__  # also where the library would not have it shown
