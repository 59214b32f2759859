"""Cursors that tell their holder nothing: a position, hidden and sealed with a key that nobody but the server has.

How far a log or a table has come says how much others do in it; so a position is not handed out as a number.
"""

import base64
import secrets
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 32


class CursorSeal:
    """Closes positions into cursors of one length, and opens those that it has closed itself.

    No two cursors are alike, so that not even a change tells something.

    Args:
        key: `KEY_BYTES` secret bytes. Cursors open wherever the key is known; without one they end with this seal.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = fresh_key() if key is None else key

    def close(self, position: int) -> str:
        """A cursor for a position, which is 0 or more and less than 2**63."""
        nonce = secrets.token_bytes(8)
        hidden = nonce + self._masked(nonce, position).to_bytes(8)
        return _text(hidden + self._tag(hidden))

    def open(self, cursor: str) -> int | None:
        """The position, or None for what this seal has not closed."""
        try:
            sealed = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        except ValueError:
            return None
        hidden, tag = sealed[:16], sealed[16:]
        # the same bytes can be written in several ways, of which one is ours
        if _text(sealed) != cursor or len(hidden) != 16 or not secrets.compare_digest(tag, self._tag(hidden)):
            return None
        return self._masked(hidden[:8], int.from_bytes(hidden[8:]))

    def _masked(self, nonce: bytes, position: int) -> int:
        return position ^ int.from_bytes(blake2b(nonce, key=self._key, digest_size=8, person=b"mask").digest())

    def _tag(self, hidden: bytes) -> bytes:
        return blake2b(hidden, key=self._key, digest_size=8, person=b"tag").digest()


def fresh_key() -> bytes:
    """A key that nobody has."""
    return secrets.token_bytes(KEY_BYTES)


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).decode()
