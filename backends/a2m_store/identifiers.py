"""Ids for records that were written without one (§3.2)."""

import secrets


def new_id(now: int) -> str:
    """Return a new unique id: the time, so that the index of ids grows at its end, then 64 random bits."""
    return f"{max(now, 0):012x}{secrets.token_hex(8)}"
