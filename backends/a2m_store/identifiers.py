"""Ids for records whose writer gave none (§3.2)."""

import secrets


def new_id(now: int) -> str:
    """An id never given before: time first, so that the index of ids grows at its end, then 64 random bits."""
    return f"{max(now, 0):012x}{secrets.token_hex(8)}"
