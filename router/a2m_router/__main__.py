"""`python -m a2m_router` is `a2m-router`."""

import sys

from a2m_router.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
