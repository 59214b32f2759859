"""The steps of a move between two servers that share no transaction, in their order.

Moves run by this table, and `tests/verification/explorer` explores it. The steps of a row run at once. A row begins
when the row before has ended. What dies in between, and what puts it right, is in docs/architecture.md.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from a2m_router.tiers.gather import gather


class Step(StrEnum):
    """One step of a move, by the name that the explorer knows."""

    CLEAR = "clear the way"
    NOTE = "note the copies to come"
    READ = "read the source"
    SYNC = "make it durable"
    COMPARE = "compare with the catalog"
    WRITE = "write the target, and read it back"
    COMMIT = "commit"


Table = Sequence[Sequence[Step]]
Steps = Mapping[Step, Callable[[], Awaitable[None]]]

MOVE: Final[Table] = (
    (Step.CLEAR,),
    (Step.NOTE,),
    (Step.READ, Step.SYNC),
    (Step.COMPARE,),
    (Step.WRITE,),
    (Step.COMMIT,),
)
"""A move. The commit is the flip: the records' home becomes the target. The guard of the change syncs it."""


async def run(table: Table, steps: Steps) -> None:
    """Carry out a table. Raises what a step raises, when all steps of its row have ended."""
    for row in table:
        await gather([steps[step] for step in row])
