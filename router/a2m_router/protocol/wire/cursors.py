"""Opaque cursors: a position, encrypted and authenticated with a key that only the server has.

A plain position in a log or a table would reveal how much other clients write.
"""

import base64
import secrets
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 32


class CursorSeal:
    """Turns positions into cursors of one length, and its own cursors back into positions.

    No two cursors are equal, even for one position: so a client cannot see whether the position has changed.

    Args:
        key: `KEY_BYTES` secret bytes. Every seal with the key opens the cursors; by default only this one does.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = fresh_key() if key is None else key

    def close(self, position: int) -> str:
        """Return a cursor for a position, which is 0 or more and less than 2**63."""
        nonce = secrets.token_bytes(8)
        hidden = nonce + self._masked(nonce, position).to_bytes(8)
        return _text(hidden + self._tag(hidden))

    def open(self, cursor: str) -> int | None:
        """Return the position of a cursor; None if it was not made with this key."""
        try:
            sealed = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        except ValueError:
            return None
        hidden, tag = sealed[:16], sealed[16:]
        # base64 has several spellings for the same bytes; accept only the one that `close` writes
        if _text(sealed) != cursor or len(hidden) != 16 or not secrets.compare_digest(tag, self._tag(hidden)):
            return None
        return self._masked(hidden[:8], int.from_bytes(hidden[8:]))

    def _masked(self, nonce: bytes, position: int) -> int:
        return position ^ int.from_bytes(blake2b(nonce, key=self._key, digest_size=8, person=b"mask").digest())

    def _tag(self, hidden: bytes) -> bytes:
        return blake2b(hidden, key=self._key, digest_size=8, person=b"tag").digest()


def fresh_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(KEY_BYTES)


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).decode()
