"""The policy: which records are weakest, and which must go. Pure: no I/O, no clock, time comes in as an argument.

Retention = salience · (1 + access_count) · 2^(-age / half_life). All records of a tier decay by the same factor, so
their order never changes as time passes: `strength` is retention's logarithm at a fixed moment, and can be indexed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

# What has no worth at all sorts below everything; a float's own least, so that it can be stored and compared.
WORTHLESS: Final = -1.7976931348623157e308


class Unit(msgspec.Struct, frozen=True):
    """What moves whole: the records of one group in one tier, or a single record without a group.

    `newest` is the greatest number of its records: one of these ids that has a greater one is another record, written
    since. `weight` is how many of its records count against the bucket that it was found in.
    """

    ids: tuple[str, ...]
    owner: str | None
    group: str | None
    newest: int
    strength: float
    weight: int


def strength(salience: float, access_count: int, touched: int, half_life: float | None) -> float:
    """log2 of a record's retention at the epoch: an order that does not age.

    Args:
        salience: 0 or more; 0 is worth nothing.
        access_count: times recalled.
        touched: when it was last recalled, or written; milliseconds since 1970.
        half_life: of its tier, in seconds; None where nothing decays.
    """
    if salience <= 0:
        return WORTHLESS
    earned = math.log2(salience) + math.log2(1 + access_count)
    return earned if half_life is None else earned + touched / 1000 / half_life


def evictions(units: Iterable[Unit], held: int, capacity: int) -> list[Unit]:
    """Which units leave a bucket that holds `held` records, weakest first, until it is within `capacity`.

    One unit always stays: a bucket that one group alone fills is over its capacity, since a group is never torn (§3.4).

    Args:
        units: the bucket's units, weakest first; read no further than needed.
        held: the records in the bucket.
        capacity: the records it may hold.
    """
    leaving: list[Unit] = []
    for unit in units:
        if held <= capacity or held == unit.weight:
            break
        leaving.append(unit)
        held -= unit.weight
    return leaving


def in_batches(units: Sequence[Unit], most: int) -> list[list[Unit]]:
    """The units in runs of at most `most` records each, in order; a unit larger than that is a run of its own."""
    runs: list[list[Unit]] = []
    size = 0
    for unit in units:
        if not runs or size + len(unit.ids) > most:
            runs.append([])
            size = 0
        runs[-1].append(unit)
        size += len(unit.ids)
    return runs
