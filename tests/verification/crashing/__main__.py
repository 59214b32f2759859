"""`python -m tests.verification.crashing`: see `points`."""

import sys

from tests.verification.crashing.command import main

if __name__ == "__main__":
    sys.exit(main())
