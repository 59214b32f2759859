"""Run `a2m-router` as `python -m a2m_router`."""

import sys

from a2m_router.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
