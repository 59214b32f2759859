"""`python -m a2m_router` is `a2m-router`."""

from a2m_router.daemon.cli import main

main()
