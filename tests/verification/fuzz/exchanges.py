"""Generated exchanges over HTTP: complete, refused, odd and cut-off requests, and several in one piece."""

import random
from typing import Final

import msgspec

from tests.verification.fuzz.generating import MAX_MESSAGE, MUTATIONS, Messages, pieces_of
from tests.verification.fuzz.owing import Owed, owed
from tests.verification.fuzz.serving import TOKEN


class Exchange(msgspec.Struct, frozen=True):
    """Bytes for a connection, and the expected answers.

    With `owed`, these answers must come in order, with `status`. Without, the client closes its end, and the status of
    every answer must be in STATUSES.
    """

    wire: bytes
    owed: tuple[Owed | None, ...] = ()
    status: int | None = None
    rude: bool = False  # closed with a reset, and without reading


HEAD: Final = (
    "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer " + TOKEN + "\r\n"
)


class Exchanges:
    """An endless stream of exchanges that follows from a source of chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._source = Messages(chance)

    def next(self) -> tuple[Exchange, int]:
        """Return the next exchange, and the number of its messages."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.5:
            message = self._source.next()
            return Exchange(posted(message), (owed(message),)), 1
        if kind < 0.6:
            several = [self._source.next() for _ in range(chance.randint(2, 5))]
            several = [message for message in several if len(message) <= MAX_MESSAGE] or [b"{}"]
            return Exchange(b"".join(map(posted, several)), tuple(map(owed, several))), len(several)
        message = self._source.next()
        if kind < 0.7:
            return Exchange(self._chunked(message), (owed(message),)), 1
        if kind < 0.8:
            return self._refused(message), 1
        if kind < 0.87:
            whole = posted(message)
            return Exchange(whole[: chance.randrange(len(whole))], rude=chance.random() < 0.5), 1
        if kind < 0.9:
            return Exchange(chance.choice((chance.randbytes(50), message, message + b"\r\n\r\n"))), 1
        head, _, body = posted(message[:2_000]).partition(b"\r\n\r\n")
        return Exchange(self._odd_head(head) + b"\r\n\r\n" + body), 1

    def _chunked(self, message: bytes) -> bytes:
        pieces = [piece for piece in pieces_of(message, self._chance) if piece]
        extension = self._chance.choice((b"", b"", b";a=b", b';a="b"'))
        chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
        return f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"

    def _refused(self, message: bytes) -> Exchange:
        """Return a complete request that the server must refuse for its head."""
        message = message[:2_000]
        length = f"Content-Length: {len(message)}\r\n"
        head, status = self._chance.choice(
            (
                (HEAD.replace("application/json", "text/plain"), 415),
                (HEAD.replace("Content-Type", "X-Content-Type"), 415),
                (HEAD.replace(TOKEN, "x" + TOKEN), 401),
                (HEAD.replace("Bearer", "Basic"), 401),
                (HEAD.replace("Authorization", "X"), 401),
                (HEAD + "A2M-Protocol-Version: a2m/9\r\n", 400),
                (HEAD + "Origin: https://evil.example\r\n", 403),
                (HEAD.replace("POST / ", "POST /nothing "), 404),
                (HEAD.replace("POST / ", "PUT / "), 405),
                (HEAD.replace("POST / ", "POST /healthz "), 405),
                (HEAD + "X: " + "y" * 40_000 + "\r\n", 431),
                (HEAD.replace("Host: localhost\r\n", ""), 400),
                (HEAD.replace("Host: localhost", "Host: evil.example"), 421),
                (HEAD.replace("POST / ", "POST http://evil.example/ "), 421),
                (HEAD.replace("POST / ", "POST http://localhost/nothing "), 404),
                (HEAD + "Transfer-Encoding: chunked\r\n", 400),
                (HEAD.replace("HTTP/1.1", "HTTP/9"), 400),
                (HEAD + f"Content-Length: {len(message) + 1}\r\n", 400),
            )
        )
        return Exchange((head + length + "\r\n").encode() + message, (None,), status)

    def _odd_head(self, head: bytes) -> bytes:
        chance = self._chance
        kind = chance.random()
        if kind < 0.4:
            return chance.choice(MUTATIONS)(chance, head, head[::-1])
        if kind < 0.7:
            method = chance.choice(
                (b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"DELETE", b"PATCH", b"CONNECT", b"P\x00ST", b"PRI")
            )
            path = chance.choice(
                (
                    *(
                        b"/",
                        b"/healthz",
                        b"/readyz",
                        b"/.well-known/a2m-server.json",
                        b"*",
                        b"//",
                        b"http://x/",
                        b"http://localhost/",
                        b"http://",
                    ),
                    *(b"/%00", b"/\xff"),
                )
            )
            return head.replace(b"POST /", method + b" " + path, 1)
        odd = (
            *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity"),
            *(
                b"Content-Length: -1",
                b"Content-Length: 1e3",
                b"Content-Length: 99999999999999999999",
                b"Content-Length: 5, 5",
            ),
            *(
                b"Expect: 100-continue",
                b"Expect: everything",
                b"Connection: close, upgrade",
                b"Upgrade: h2c",
                b"Upgrade: websocket",
            ),
            *(b"Origin: https://app.example", b"Origin: null", b"Host: b", b"Content-Type: text/html", b"X: \x00"),
            *(b": x", b"no colon"),
            *(
                b"X:" + b"a" * 32_000,
                b"A2M-Protocol-Version: \xff",
                b" folded",
                b"Content-Encoding: gzip",
                b"Authorization: Bearer \xff",
            ),
        )
        place = head.find(b"\r\n") + 2
        return head[:place] + chance.choice(odd) + b"\r\n" + head[place:]


def posted(message: bytes) -> bytes:
    return f"{HEAD}Content-Length: {len(message)}\r\n\r\n".encode() + message
