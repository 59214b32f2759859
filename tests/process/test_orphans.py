"""A router ends the orphan processes of a killed one before it starts the tier's process anew."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import psutil
import pytest

from a2m_router.tiers.orphans import end_orphans, mark_of

pytestmark = pytest.mark.anyio

# seconds, and far more than anything here takes; a hang becomes a failure
PATIENCE = 60

# the first ends with its input; the second needs SIGTERM; the third ignores that
ENDS_BY_ITSELF = "import sys; print('up', flush=True); sys.stdin.read()"
MUST_BE_TOLD = "import signal; print('up', flush=True); signal.pause()"
MUST_BE_KILLED = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {MUST_BE_TOLD}"


@asynccontextmanager
async def running(code: str, mark: dict[str, str]) -> AsyncIterator[anyio.abc.Process]:
    """Run a process, and yield it when it is up; it is killed at the end."""
    process = await anyio.open_process(
        [sys.executable, "-c", code], env={**os.environ, **mark}, start_new_session=True, stderr=None
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.receive()).startswith(b"up")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("code", "status", "terminated"),
    # for a process that obeys the wait may be long; one that ignores SIGTERM is soon killed
    [(MUST_BE_TOLD, -signal.SIGTERM, PATIENCE), (MUST_BE_KILLED, -signal.SIGKILL, 0.5)],
    ids=["told", "killed"],
)
async def test_a_process_with_the_mark_is_ended(
    code: str,
    status: int,
    terminated: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("a2m_router.tiers.orphans._BY_ITSELF", 0.05)
    monkeypatch.setattr("a2m_router.tiers.orphans._TERMINATED", terminated)
    mark = mark_of(tmp_path / "router.db", "working")
    async with running(code, mark) as process:
        with anyio.fail_after(PATIENCE):
            await end_orphans(mark, "working")
            assert await process.wait() == status
    assert "ending orphan processes of an earlier router" in caplog.text
    assert f"(process {process.pid})" in caplog.text


async def test_a_process_that_ends_by_itself_is_left_to_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a2m_router.tiers.orphans._BY_ITSELF", PATIENCE)
    mark = mark_of(tmp_path / "router.db", "working")
    async with running(ENDS_BY_ITSELF, mark) as process, anyio.create_task_group() as tasks:

        async def close() -> None:
            assert process.stdin is not None
            await process.stdin.aclose()

        tasks.start_soon(close)
        with anyio.fail_after(PATIENCE):
            await end_orphans(mark, "working")
            assert await process.wait() == 0


async def test_what_it_has_started_is_ended_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a2m_router.tiers.orphans._BY_ITSELF", 0.05)
    mark = mark_of(tmp_path / "router.db", "working")
    # a process that has ended, and left a server behind, in that server's own session
    inner = f"import os; os.setsid(); {MUST_BE_TOLD}"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    async with running(outer, mark) as process:
        await process.wait()
        [left] = [p for p in psutil.process_iter() if _has(p, mark)]
        with anyio.fail_after(PATIENCE):
            await end_orphans(mark, "working")
        with suppress(psutil.NoSuchProcess):  # its new parent may have reaped it already
            assert left.status() == psutil.STATUS_ZOMBIE


async def test_other_tiers_and_other_federations_are_left_alone(tmp_path: Path) -> None:
    other_tier = mark_of(tmp_path / "router.db", "episodic")
    elsewhere = mark_of(tmp_path / "other" / "router.db", "working")
    async with running(ENDS_BY_ITSELF, other_tier) as one, running(ENDS_BY_ITSELF, elsewhere) as two:
        await end_orphans(mark_of(tmp_path / "router.db", "working"), "working")
        assert (one.returncode, two.returncode) == (None, None)


def _has(process: psutil.Process, mark: dict[str, str]) -> bool:
    try:
        return bool(mark.items() <= process.environ().items())
    except psutil.Error:
        return False
