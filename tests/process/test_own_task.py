"""Memories that are entered in one task and left in another: fixtures, lifespans, exit stacks that are handed on."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.abc
import psutil
import pytest
from starlette.applications import Starlette

from a2m_router.config.loading import ConfigError
from a2m_router.daemon.opening import open_federation
from a2m_router.protocol.client.connecting import connect, connect_command
from a2m_router.protocol.client.memory import Memory
from a2m_router.protocol.client.own_task import in_own_task
from a2m_router.storage.database import DatabaseError

pytestmark = pytest.mark.anyio

T = TypeVar("T")

STORE: Final = str(Path(sys.executable).with_name("a2m-store"))


def federation(folder: Path) -> Path:
    path = folder / "federation.toml"
    path.write_text('state = "router.db"\n[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "working.db"]\n')
    return path


WAYS: Final[dict[str, Callable[[Path], AbstractAsyncContextManager[Memory]]]] = {
    "federation": lambda folder: open_federation(federation(folder)),
    "command": lambda folder: connect_command([STORE, str(folder / "notes.db")]),
}


async def in_a_task(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Return the result of a function, called in a task that ends with it."""
    results: list[T] = []

    async def call() -> None:
        results.append(await function(*arguments))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
    return results[0]


def children() -> list[psutil.Process]:
    found: list[Any] = psutil.Process().children()
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_a_memory_is_entered_used_and_left_in_three_tasks(way: str, tmp_path: Path) -> None:
    opened = WAYS[way](tmp_path)
    memory = await in_a_task(opened.__aenter__)
    assert children()
    await in_a_task(memory.remember, "a turn")
    assert [record.content for record in (await in_a_task(memory.timeline)).records] == ["a turn"]
    assert not await in_a_task(opened.__aexit__, None, None, None)
    assert not children()
    async with WAYS[way](tmp_path) as again:  # all files and processes were released
        assert len((await again.timeline()).records) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_memory_is_left_while_the_task_that_entered_it_goes_on(way: str, tmp_path: Path) -> None:
    stack = AsyncExitStack()
    handed_on = anyio.Event()
    done = anyio.Event()

    async def enter() -> None:
        memory = await stack.enter_async_context(WAYS[way](tmp_path))
        with anyio.CancelScope():  # the task's own scopes are entered and left in between
            await memory.remember("a turn")
            handed_on.set()
            await done.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        await handed_on.wait()
        await stack.aclose()
        done.set()
    assert not children()


@pytest.mark.parametrize("way", WAYS)
async def test_the_lifespan_of_a_web_application_holds_a_memory(way: str, tmp_path: Path) -> None:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Memory]]:
        async with WAYS[way](tmp_path) as memory:
            yield {"memory": memory}

    living = Starlette(lifespan=lifespan).router.lifespan_context(Starlette())
    state = await in_a_task(living.__aenter__)
    assert state is not None
    assert await in_a_task(state["memory"].remember, "a turn")
    await in_a_task(living.__aexit__, None, None, None)
    assert not children()


@pytest.fixture(params=WAYS)
async def memory(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Memory]:
    async with WAYS[request.param](tmp_path) as memory:
        yield memory


async def test_a_fixture_holds_a_memory(memory: Memory) -> None:
    await memory.remember("a turn")
    assert [record.content for record in (await memory.timeline()).records] == ["a turn"]


async def test_what_keeps_it_from_being_entered_is_told_to_who_enters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await open_federation(tmp_path / "none.toml").__aenter__()
    path = federation(tmp_path)
    (tmp_path / "router.db").write_text("no database")
    with pytest.raises(DatabaseError, match="is not a database"):
        async with open_federation(path):
            pytest.fail("it is open")
    with pytest.raises(ValueError, match="expected a URL"):
        async with connect("nowhere"):
            pytest.fail("it is open")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, SystemExit])
async def test_what_the_block_raises_comes_out_of_it_as_it_is(
    way: str, tmp_path: Path, raised: type[BaseException]
) -> None:
    with pytest.raises(raised, match="mine") as caught:
        async with WAYS[way](tmp_path):
            raise raised("mine")
    assert caught.type is raised
    assert not children()


@pytest.mark.parametrize("way", WAYS)
async def test_a_block_that_is_cancelled_leaves_nothing_behind(way: str, tmp_path: Path) -> None:
    inside = anyio.Event()

    async def stay() -> None:
        async with WAYS[way](tmp_path):
            inside.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stay)
        await inside.wait()
        tasks.cancel_scope.cancel()
    assert not children()


# --- the task by itself


class Steps:
    """A manager with a scope and a task group inside, which records how far it came."""

    def __init__(self, entering: BaseException | None = None, leaving: BaseException | None = None) -> None:
        self.seen: list[str] = []
        self.waiting = anyio.Event()
        self.entering = entering
        self.leaving = leaving
        self.tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def slow(self) -> AsyncIterator[str]:
        self.waiting.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.seen.append("gave up")
        yield "never"

    @asynccontextmanager
    async def quick(self) -> AsyncIterator[str]:
        async with anyio.create_task_group() as self.tasks:
            if self.entering is not None:
                raise self.entering
            self.seen.append("entered")
            try:
                yield "value"
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.lowlevel.checkpoint()
                self.seen.append("left")
                if self.leaving is not None:
                    raise self.leaving
            self.tasks.cancel_scope.cancel()


async def test_who_is_cancelled_while_entering_waits_until_that_is_given_up() -> None:
    steps = Steps()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_own_task(steps.slow)().__aenter__)
        await steps.waiting.wait()
        tasks.cancel_scope.cancel()
    assert steps.seen == ["gave up"]


async def test_a_failure_on_the_way_out_is_told_to_who_leaves() -> None:
    steps = Steps(leaving=OSError("the disk failed"))
    opened = in_own_task(steps.quick)()
    assert await in_a_task(opened.__aenter__) == "value"
    with pytest.raises(BaseExceptionGroup) as told:
        await in_a_task(opened.__aexit__, None, None, None)
    assert told.group_contains(OSError, match="the disk failed")


async def test_a_failure_meanwhile_is_told_to_who_leaves() -> None:
    steps = Steps()
    opened = in_own_task(steps.quick)()
    await opened.__aenter__()

    async def fail() -> None:
        raise ValueError("broken")

    assert steps.tasks is not None
    steps.tasks.start_soon(fail)
    with pytest.raises(BaseExceptionGroup) as told:
        await opened.__aexit__(None, None, None)
    assert told.group_contains(ValueError, match="broken")
    assert steps.seen == ["entered", "left"]


async def test_variables_of_the_context_are_those_of_who_enters() -> None:
    from contextvars import ContextVar

    variable: ContextVar[str] = ContextVar("variable")
    variable.set("mine")

    @asynccontextmanager
    async def reading() -> AsyncIterator[str]:
        yield variable.get()

    async with in_own_task(reading)() as value:
        assert value == "mine"
