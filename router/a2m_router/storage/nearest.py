"""An index of vectors in an SQLite file: the table `nearest`, whose rows are numbered by what they belong to.

It holds 32-bit floats and finds candidates; `a2m_router.protocol.wire.vectors` says what it holds of a vector, and how
near two are.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import apsw

# how many nearest vectors the index gives at most
MAX_NEAREST: Final = 4096

# the comparisons it can be made for
METRICS: Final = ("cosine", "l2")


def load(connection: apsw.Connection) -> None:
    """Teaches a connection to read and write such tables; once, before anything else."""
    connection.enable_load_extension(True)
    connection.load_extension(_extension())
    connection.enable_load_extension(False)


@cache
def _extension() -> str:
    """Where sqlite-vec is. Its package is found and not imported: it would import numpy, where that is installed, and a
    store would take twice as long to start for what it never uses."""
    package = find_spec("sqlite_vec")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).with_name("vec0"))


def create(connection: apsw.Connection, dimensions: int, metric: str) -> None:
    """`nearest`, empty, for vectors of one width (§3.7); one that was there is dropped."""
    connection.execute("DROP TABLE IF EXISTS nearest")
    connection.execute(
        f"CREATE VIRTUAL TABLE nearest USING vec0(vector float[{dimensions:d}] distance_metric={metric})"
    )
