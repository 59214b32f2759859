"""Links for the tiers of a federation file, by what each of them says it is reached by."""

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from router.a2m.child import connect_process
from router.a2m.client import Peer
from router.config import Settings, Tier
from router.tiers.link import Link
from router.tiers.profile import CannotServe


def links_for(settings: Settings, environ: Mapping[str, str]) -> dict[str, Link]:
    """One link for each tier, by its name, not started yet. Raises CannotServe for what cannot be reached so far."""
    links = {}
    for tier in settings.tiers:
        if tier.command is None or tier.mount:
            what = "mounts" if tier.mount else "tiers reached over HTTP"
            raise CannotServe(f"tiers.{tier.name}: this version serves no {what} yet; give it a command, and no mount")
        links[tier.name] = Link(
            tier.name, partial(_child, tier, settings, environ), timeout=tier.timeout, transport="stdio"
        )
    return links


def _child(tier: Tier, settings: Settings, environ: Mapping[str, str]) -> AbstractAsyncContextManager[Peer]:
    assert tier.command is not None
    program, *arguments = tier.command
    return connect_process(
        [executable(program, tier.cwd), *arguments],
        env=settings.child_environment(tier, environ),
        cwd=tier.cwd,
        on_stderr=lambda line: logging.getLogger("router.tiers").warning("%s: %s", tier.name, line),
        name=tier.name,
        max_message=settings.limits.max_message,
    )


def executable(program: str, cwd: Path) -> str:
    """Where a command's program is: one without a slash is looked for beside this interpreter's programs first, so that
    a router from a virtual environment starts the stores that were installed with it; then on PATH."""
    if os.sep in program:
        return str(cwd / program)
    beside = Path(sys.executable).parent / program
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(program) or program
