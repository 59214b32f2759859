"""An index of vectors in an SQLite file: the table `nearest`; a row has the number of the record it belongs to.

The index holds 32-bit floats and finds candidates. `a2m_router.protocol.wire.vectors` prepares vectors for it and
computes exact similarities.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import apsw

# how many nearest vectors the index returns at most
MAX_NEAREST: Final = 4096

# the metrics that it supports
METRICS: Final = ("cosine", "l2")


def load(connection: apsw.Connection) -> None:
    """Load the extension for such tables into a connection; call this once, before any other use."""
    connection.enable_load_extension(True)
    connection.load_extension(_extension())
    connection.enable_load_extension(False)


@cache
def _extension() -> str:
    """Return the path of sqlite-vec.

    The package is located without an import: it would import numpy, if installed, and double the start time of a store.
    """
    package = find_spec("sqlite_vec")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).with_name("vec0"))


def create(connection: apsw.Connection, dimensions: int, metric: str) -> None:
    """Create an empty `nearest` for vectors of one width (§3.7); drop an existing one."""
    connection.execute("DROP TABLE IF EXISTS nearest")
    connection.execute(
        f"CREATE VIRTUAL TABLE nearest USING vec0(vector float[{dimensions:d}] distance_metric={metric})"
    )
