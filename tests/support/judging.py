"""The conformance suite's verdict on a server, for tests that judge several."""

from pathlib import Path

from a2m_router.conformance.checking import Target
from a2m_router.conformance.client import Client
from a2m_router.conformance.running import Outcome, outcomes
from tests.support.paths import PROGRAMS


def judged(client: Client, other: Client | None = None) -> list[Outcome]:
    """Run every check of the suite against a server; return the outcomes."""
    target = Target(client, other)
    target.meet()
    return list(outcomes(target))


def store(folder: Path, kind: str = "episodic") -> list[str]:
    """Return the command line of a store whose file is in `folder`."""
    return [str(PROGRAMS / "a2m-store"), str(folder / f"{kind}.db"), "--kind", kind, "--durability", "normal"]
