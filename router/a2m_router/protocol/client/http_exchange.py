"""One POST and its answer, over any HTTP library: the interface that HTTP's client end uses.

- A message is sent once or not at all; an exchange never retries.
- `Posting.sent` is set before the message may have left. Exceptions cannot show that: the same one may mean that no
  server was there, or that the server closed the connection after it got the message.
- Failures are described in our words. A library's own text may quote the address, which may contain a key.
"""

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

# seconds that an idle connection is kept. Most servers close theirs after 5 s or more; a call sent at that moment fails
KEPT_ALIVE: Final = 4.0


class Posting:
    """A message to send. `sent` is set before any of it may have left, and stays set."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.sent = False


class Answer(msgspec.Struct, frozen=True):
    """A response with any status. A body of None was longer than the limit and was not read to its end."""

    status: int
    body: bytes | None
    coding: str = ""  # Content-Encoding; the body is still in it


class Broken(Exception):
    """No complete answer came. The text says why; it follows "cannot be reached: " or "the connection broke: "."""


class Exchange(Protocol):
    async def post(self, posting: Posting) -> Answer:
        """Return the answer to the message; a redirect is an answer, too. After a cancellation, nothing more of the
        message is sent, and its connection is not used again.

        Raises:
            Broken: no complete answer came.
        """


def reason_of(problem: BaseException, otherwise: str) -> str:
    """Return why an exchange failed: the reason of the system or TLS, if that is the cause, else `otherwise`."""
    # only built-in exceptions: the libraries' own may be subclasses of them without a useful text
    beneath = [cause for cause in causes(problem) if type(cause).__module__ in ("builtins", "socket", "ssl")]
    for kind, sentence in _SENTENCES:
        for cause in beneath:
            if isinstance(cause, kind) and (reason := sentence(cause)):
                return reason
    return otherwise


# the most specific first
_SENTENCES: Final[tuple[tuple[type[BaseException], Callable[[Any], str]], ...]] = (
    (
        ssl.SSLCertVerificationError,
        lambda problem: f"its certificate is not trusted: {problem.verify_message}; set the tier's ca_file to trust it",
    ),
    (
        ssl.SSLError,
        lambda problem: f"TLS failed: {str(problem.reason).lower().replace('_', ' ')}; does it serve https there?",
    ),
    (socket.gaierror, lambda problem: f"its host cannot be found: {problem.strerror}"),
    (UnicodeError, lambda problem: "its host is not a valid name"),
    (OSError, lambda problem: os.strerror(problem.errno) if problem.errno else ""),
)


def causes(problem: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception, its cause, the cause of that, and so on."""
    while problem is not None:
        yield problem
        if isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        else:
            problem = problem.__cause__ or problem.__context__  # the context also after `raise … from None`
