"""An index of vectors in an SQLite file: the table `nearest`, whose rows are numbered by what they belong to.

It holds 32-bit floats and finds candidates; `router.a2m.vectors` says what it holds of a vector, and how near two are.
"""

from typing import Final

import apsw
import sqlite_vec

# how many nearest vectors the index gives at most
MAX_NEAREST: Final = 4096

# the comparisons it can be made for
METRICS: Final = ("cosine", "l2")


def load(connection: apsw.Connection) -> None:
    """Teaches a connection to read and write such tables; once, before anything else."""
    connection.enable_load_extension(True)
    connection.load_extension(sqlite_vec.loadable_path())
    connection.enable_load_extension(False)


def create(connection: apsw.Connection, dimensions: int, metric: str) -> None:
    """`nearest`, empty, for vectors of one width (§3.7); one that was there is dropped."""
    connection.execute("DROP TABLE IF EXISTS nearest")
    connection.execute(
        f"CREATE VIRTUAL TABLE nearest USING vec0(vector float[{dimensions:d}] distance_metric={metric})"
    )
