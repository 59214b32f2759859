"""The steps of a move between two servers that share no transaction, in their order.

Moves follow this table, and `tests/verification/explorer` explores it. The steps of a row run concurrently. A row
begins when the previous row has ended. docs/architecture.md says what remains if a process dies in between, and what
repairs it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from a2m_router.tiers.gather import gather


class Step(StrEnum):
    """One step of a move, with the name that the explorer uses."""

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
"""The steps of a move. The commit is the flip: the records' home becomes the target. The change's guard syncs it."""


async def run(table: Table, steps: Steps) -> None:
    """Run all rows of a table. If a step raises, the exception is raised when all steps of its row have ended."""
    for row in table:
        await gather([steps[step] for step in row])
