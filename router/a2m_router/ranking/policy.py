"""The policy: which records are weakest, and which must leave their tier. Pure: no I/O, no clock; time is an argument.

Retention = salience · (1 + access_count) · 2^(-age / half_life). All records of a tier decay by the same factor, so
their order never changes as time passes: `strength` is retention's logarithm at a fixed moment, and can be indexed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

# The strength of records without any worth: the smallest finite float, so that it can be stored and compared.
WORTHLESS: Final = -1.7976931348623157e308


class Unit(msgspec.Struct, frozen=True):
    """Records that move together: one group in one tier, or a single record without a group.

    `newest` is the greatest sequence number of its records. If a record with one of these ids has a greater number, it
    was written later and is another record. `weight` is how many of its records count against the bucket where the unit
    was found.
    """

    ids: tuple[str, ...]
    owner: str | None
    group: str | None
    newest: int
    strength: float
    weight: int


def strength(salience: float, access_count: int, touched: int, half_life: float | None) -> float:
    """Return log2 of a record's retention at the epoch: an order that time does not change.

    Args:
        salience: 0 or more; 0 makes the record worthless.
        access_count: how often the record was recalled.
        touched: when the record was last recalled or written; milliseconds since 1970.
        half_life: of its tier, in seconds; None if the tier has no decay.
    """
    if salience <= 0:
        return WORTHLESS
    earned = math.log2(salience) + math.log2(1 + access_count)
    return earned if half_life is None else earned + touched / 1000 / half_life


def evictions(units: Iterable[Unit], held: int, capacity: int) -> list[Unit]:
    """Return the units that must leave a bucket so that it is within `capacity`, weakest first.

    One unit always stays, since a group is never split (§3.4): a group larger than the capacity keeps its bucket above
    it.

    Args:
        units: the bucket's units, weakest first; read only as far as needed.
        held: how many records are in the bucket.
        capacity: how many records it may hold.
    """
    leaving: list[Unit] = []
    for unit in units:
        if held <= capacity or held == unit.weight:
            break
        leaving.append(unit)
        held -= unit.weight
    return leaving


def in_batches(units: Sequence[Unit], most: int) -> list[list[Unit]]:
    """Return the units in order, in batches of at most `most` records; a larger unit is its own batch."""
    batches: list[list[Unit]] = []
    size = 0
    for unit in units:
        if not batches or size + len(unit.ids) > most:
            batches.append([])
            size = 0
        batches[-1].append(unit)
        size += len(unit.ids)
    return batches
