"""Where the repository and its programs are."""

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SERVERS: Final = ROOT / "tests/servers"
PROGRAMS: Final = Path(sys.executable).parent
"""The folder of the installed commands: `a2m-router`, `a2m`, `a2m-store` and the others."""
