"""Every fault of a2m-chaos before a tier of a real federation: the client's answers, the log, and the tier's records.

The tier in trouble is `semantic`: a2m-chaos in front of an a2m-store, both real processes, reached over stdio or HTTP.
The tier `working` is a store in this process. A fault is active while the file `trouble` exists, so that each story has
three parts: before, in trouble, and afterwards.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zlib import crc32

import anyio
import pytest

from a2m_chaos.faults import KINDS
from a2m_router.daemon.app import running_federation
from a2m_router.protocol.client.client import NoAnswer, Peer, connect_local
from a2m_router.protocol.client.http_client import HttpClient, connect_http
from a2m_router.protocol.client.http_exchange import Answer, Posting
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers import backoff
from a2m_router.tiers.link import Link
from a2m_router.tiers.link_factory import links_for
from a2m_store.server import serving
from a2m_store.store import Store
from tests.support.federated import Clock, Trial, held_by, settings_of

pytestmark = [pytest.mark.anyio]

PROGRAMS = Path(sys.executable).parent
# far more than anything here takes, and the deadline of every call; a hang becomes a failure
PATIENCE = 60.0
# the deadline, in seconds, of a call that is to miss it
SOON = 0.2
# between that deadline and the time when a call counts as resolved, far from both
LATE = "1s"
# seconds until a call whose answer did not come over HTTP counts as resolved
SETTLING = 1.6
MAX_MESSAGE = 100_000

FEDERATION = """
[policy]
pass = "explicit"
[limits]
max_message = {max_message}
max_content_length = 10000
[tiers.working]
kind = "working"
command = ["-"]
capacity = 2
spill_to = "semantic"
[tiers.semantic]
kind = "semantic"
timeout = "{patience}s"
{reached}
"""


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", autouse=True)
def _back_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backoff, "FIRST", 0.05)
        yield


class Log(logging.Handler):
    """A log handler that collects everything that is logged while it is attached."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{self.format(record)}\n"


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logging.getLogger("a2m_router").addHandler(handler)
    yield handler
    logging.getLogger("a2m_router").removeHandler(handler)


class World:
    """A federation with a tier that can be in trouble.

    Args:
        said: functions that return the log so far: the router's and, if that lacks it, a2m-chaos's.
    """

    def __init__(self, folder: Path, fed: Trial, *said: Callable[[], str]) -> None:
        self.fed = fed
        self._folder = folder
        self._said = said
        self._read = [0] * len(said)

    @property
    def log(self) -> str:
        """Return what was logged since this story began."""
        return "".join(said()[read:] for said, read in zip(self._said, self._read, strict=True))

    def begin(self) -> None:
        """Begin a new story."""
        self._read = [len(said()) for said in self._said]

    @contextmanager
    def trouble(self, fault: str = "", method: str = "", *, deadline: float = PATIENCE) -> Iterator[None]:
        """Activate a fault, by default the plan's only one, for the block, with this deadline for the tier's calls.

        A call that missed its deadline may not have reached its fault yet; `hears` waits for it.
        """
        switch = self._folder / switch_of(fault, method)
        switch.touch()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.fed.federation.links["semantic"], "_timeout", deadline)
                yield
        finally:
            switch.unlink()

    async def write(self, content: str, **fields: Any) -> A2MError | None:
        """Write a record to the tier in trouble; return the error that the client gets, or None."""
        try:
            await self.fed.remember(content, tier="semantic", id=content, **fields)
        except A2MError as error:
            return error
        return None

    async def readable(self, story: str = "") -> list[str]:
        """Return the contents of a story that the client can read."""
        return [each["content"] for each in await self.fed.timeline() if each["content"].startswith(story)]

    async def reachable(self) -> None:
        """Wait until the tier answers again."""
        with anyio.fail_after(PATIENCE):
            # the return of a server at an address that had died triggers no event
            while "degraded" in await self.fed.call("recall", query="anything"):  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def well(self) -> None:
        """Wait until the tier answers and has no pending writes."""
        await self.reachable()
        with anyio.fail_after(PATIENCE):
            await self.fed.settled()

    async def hears(self, words: str) -> None:
        """Wait until the log contains these words."""
        with anyio.fail_after(PATIENCE):
            while words not in self.log:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    def held(self, story: str = "") -> list[str]:
        """Return the contents of a story that the tier's files hold. Nothing may be writing to them."""
        with TemporaryDirectory() as copy:
            for path in self._folder.glob("semantic.db*"):
                shutil.copy(path, copy)
            store = Store(Path(copy, "semantic.db"), clock=Clock())
            try:
                return [each["content"] for each in held_by(store) if each["content"].startswith(story)]
            finally:
                store.close()


def planned(fault: str, method: str = "", *, alone: bool = True) -> str:
    """Return the plan of a fault that is active during trouble; of several, while its own switch exists."""
    only = f'method = "{method}"\n' if method else ""
    switch = switch_of() if alone else switch_of(fault, method)
    return f'[[fault]]\nwhile = "{switch}"\n{only}{fault}\n'


def switch_of(fault: str = "", method: str = "") -> str:
    return f"trouble-{crc32(f'{method} {fault}'.encode())}"


@asynccontextmanager
async def world(folder: Path, front: str, plan: str, log: Log) -> AsyncIterator[World]:
    (folder / "faults.toml").write_text(f'memory = ["semantic.db*"]\n{plan}\n')
    command = [str(PROGRAMS / "a2m-chaos"), "--plan", "faults.toml"]
    wrapped = ["--", str(PROGRAMS / "a2m-store"), "semantic.db"]
    at_an_address = [*command, "--http", "127.0.0.1:0", *wrapped]
    with running(folder, at_an_address, wanted=front == "http") as (process, said):
        url = "" if process is None else await address_of(process, said)
        reached = f'url = "{url}"' if front == "http" else f"command = {[*command, *wrapped]}"
        text = FEDERATION.format(max_message=MAX_MESSAGE, patience=PATIENCE, reached=reached)
        settings = settings_of(text, folder=folder)
        links = links_for(settings, os.environ)
        store = Store(folder / "working.db", clock=Clock(), name="working")
        links["working"] = Link("working", partial(served, store), timeout=PATIENCE)
        if url:
            links["semantic"] = Link("semantic", partial(posted, url), timeout=PATIENCE, transport="http")
        try:
            async with (
                running_federation(settings, links) as federation,
                connect_local(federation.answer, name="router") as client,
            ):
                fed = Trial(federation, client, {"working": store}, {}, Clock())
                yield World(folder, fed, said, lambda: log.text)
        finally:
            store.close()


@asynccontextmanager
async def served(store: Store) -> AsyncIterator[Peer]:
    async with serving(store, threads=False) as server, connect_local(server, name="working") as peer:
        yield peer


def posted(url: str) -> AbstractAsyncContextManager[Peer]:
    return connect_http(url, max_message=MAX_MESSAGE, settling=SETTLING)


@contextmanager
def running(
    folder: Path, command: list[str], *, wanted: bool
) -> Iterator[tuple[subprocess.Popen[bytes] | None, Callable[[], str]]]:
    """Start a separate server, if it is wanted; yield it, and a function that returns its output on stderr."""
    if not wanted:
        yield None, lambda: ""
        return
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stderr=stderr)
        try:
            yield process, (folder / "stderr").read_text
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0


async def address_of(process: subprocess.Popen[bytes], said: Callable[[], str]) -> str:
    """Wait until a server reports the address at which it listens; return it."""
    with anyio.fail_after(PATIENCE):
        while not (found := re.search(r"listening on (\S+)", said())):
            assert process.poll() is None, said()
            await anyio.sleep(0.02)
    return found[1]


class Shared:
    """Worlds whose plans have all faults of the stories: one for each binding, started when a test needs it."""

    def __init__(self, folder: Path, undo: AsyncExitStack, log: Log) -> None:
        self._folder = folder
        self._undo = undo
        self._log = log
        self._worlds: dict[str, World] = {}

    async def begin(self, front: str) -> World:
        """Return the world in which the tier is reached by this binding, with a new story begun."""
        if front not in self._worlds:
            folder = self._folder / front
            folder.mkdir()
            faults = [story.fault for story in STORIES if front in story.over.split()]
            faults += [move.fault for move in MOVES if move.front == front]
            plan = "".join(planned(each, "memory/remember", alone=False) for each in dict.fromkeys(faults))
            self._worlds[front] = await self._undo.enter_async_context(world(folder, front, plan, self._log))
        self._worlds[front].begin()
        return self._worlds[front]


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    handler = Log()
    logging.getLogger("a2m_router").addHandler(handler)
    async with AsyncExitStack() as undo:
        yield Shared(tmp_path_factory.mktemp("shared"), undo, handler)
    logging.getLogger("a2m_router").removeHandler(handler)


def do(fault: str) -> str:
    """Return the name of a fault in a plan."""
    name: str = re.findall('do = "([^"]+)', fault)[0]
    return name


def done(fault: str) -> str:
    """Return what a2m-chaos logs when it carries out a fault of a plan."""
    kind = KINDS[do(fault)]
    return f"fault={kind.name} {kind.sentence}"


def deadline_for(told: str) -> float:
    """Return the deadline of a call that ends with this reason."""
    return SOON if told == DEADLINE else PATIENCE


class Story(NamedTuple):
    """The expected outcome of a write to the tier in trouble."""

    fault: str
    told: str  # a part of the reason that the client gets; empty: the write succeeds
    said: str = ""  # a line of the router's log, besides those of a2m-chaos
    kept: bool = False  # the tier keeps the record, and the client can read it
    over: str = "stdio http"


DEADLINE = "no answer within"
STORIES = [
    Story('do = "delay"\nwait = "10ms"', "", kept=True),
    Story(f'do = "delay"\nwait = "{LATE}"', DEADLINE),
    Story('do = "hang"', DEADLINE),
    Story('do = "drop-answer"', DEADLINE),
    Story('do = "answer-late"\nwait = "10ms"', "", kept=True),
    Story(f'do = "answer-late"\nwait = "{LATE}"', DEADLINE),
    Story(f'do = "apply-late"\nwait = "{LATE}"', DEADLINE),
    Story(f'do = "apply-late"\nwait = "{LATE}"\nanswer = "error"', "it takes too long", over="stdio"),
    Story('do = "answer-twice"', "", kept=True, over="stdio"),
    Story('do = "wrong-id"', DEADLINE, "an answer received for an unknown call", over="stdio"),
    Story('do = "wrong-id"', "an answer to another call", over="http"),
    Story('do = "tear-line"\nwait = "10ms"', "", kept=True, over="stdio"),
    Story(f'do = "tear-line"\nwait = "{LATE}"', DEADLINE, over="stdio"),
    Story('do = "log-line"', "", "unreadable line received", kept=True, over="stdio"),
    Story('do = "garbage-line"', "", "unreadable line received", kept=True, over="stdio"),
    Story('do = "huge-line"\nsize = 200_000', "it sent a message of more than 100,000 bytes", over="stdio"),
    Story('do = "huge-answer"\nsize = 200_000', "an answer of more than 100,000 bytes"),
    Story('do = "exit-before-work"', "status 3", "tier=semantic down", over="stdio"),
    Story('do = "exit-after-work"', "status 3", "tier=semantic down", over="stdio"),
    Story('do = "exit-before-work"\nwait = "100ms"', "the connection broke", over="http"),
    Story('do = "exit-after-work"\nwait = "100ms"', "the connection broke", over="http"),
    Story('do = "exit-after-answer"', "", "tier=semantic down", kept=True, over="stdio"),
    Story('do = "refuse-writes"', "this server takes no writes at present"),
    Story('do = "disk-full"', "disk full"),
    Story('do = "http-500"', "HTTP 500", over="http"),
    Story('do = "http-500-after-work"', "HTTP 500", over="http"),
    Story('do = "http-429"', "HTTP 429", over="http"),
    Story('do = "reset"', "the connection broke", over="http"),
    Story('do = "reset-after-work"', "the connection broke", over="http"),
    Story('do = "half-body"', "the connection broke", over="http"),
]
TOLD = [(front, story) for story in STORIES for front in story.over.split()]


@pytest.mark.process
@pytest.mark.parametrize(("front", "story"), TOLD, ids=[f"{front}-{story.fault}" for front, story in TOLD])
async def test_a_write_into_a_tier_in_trouble(front: str, story: Story, shared: Shared) -> None:
    seen = await shared.begin(front)
    name = f"{story.fault}: "
    before, meanwhile, afterwards = (f"{name}{when}" for when in ("before", "in trouble", "afterwards"))
    assert await seen.write(before) is None
    with seen.trouble(story.fault, "memory/remember", deadline=deadline_for(story.told)):
        error = await seen.write(meanwhile)
        await seen.hears(done(story.fault))
    assert (error is None) == (not story.told), error
    if error is not None:
        assert error.code == -32603
        assert error.data is not None
        assert error.data["tier"] == "semantic"
        assert story.told in error.data["reason"]
    await seen.reachable()
    assert await seen.readable(name) == [before, *[meanwhile] * story.kept]
    assert await seen.write(afterwards) is None
    await seen.well()
    whole = [before, *[meanwhile] * story.kept, afterwards]
    assert await seen.readable(name) == whole
    assert seen.held(name) == whole
    assert story.said in seen.log


# --- moves from one tier to another


async def spilled(seen: World) -> dict[str, list[str]]:
    """Wait until the tier answers, run a pass, wait until the tier is idle, and return the contents of each tier."""
    await seen.reachable()
    await seen.fed.call("consolidate")
    await seen.well()
    return {tier: [r["content"] for r in await seen.fed.timeline(tier=tier)] for tier in ("working", "semantic")}


class Move(NamedTuple):
    """The expected outcome of a spill to the tier in trouble."""

    front: str
    fault: str
    said: str  # a line of the router's log
    moved: tuple[int, ...] = (0,)


ALTERED = "semantic does not keep a record as it was written"
MOVES = [
    Move("stdio", 'do = "hang"', DEADLINE),
    Move("http", 'do = "drop-answer"', DEADLINE),
    Move("stdio", 'do = "exit-before-work"', "status 3"),
    Move("stdio", 'do = "exit-after-work"', "status 3"),
    # the server may be back in time to be read; that depends on how often it has died before
    Move("stdio", 'do = "exit-after-answer"', "status 3", (0, 3)),
    Move("stdio", 'do = "lose-write"', ALTERED),
    Move("stdio", 'do = "alter-record"', ALTERED),
    Move("stdio", 'do = "alter-record"\nfield = "metadata"', ALTERED),
    Move("stdio", 'do = "disk-full"', "the disk is full"),
    Move("http", 'do = "half-body"', "its answer broke off"),
    Move("http", 'do = "http-500-after-work"', "HTTP 500"),
]


@pytest.mark.process
@pytest.mark.parametrize("move", MOVES, ids=[f"{move.front}-{move.fault}" for move in MOVES])
async def test_a_spill_into_a_tier_in_trouble(move: Move, shared: Shared) -> None:
    seen = await shared.begin(move.front)
    name = f"spilled, {move.fault}: "
    turns = [f"{name}{number}" for number in range(5)]
    ids = [(await seen.fed.remember(turn, metadata={"n": 1}))[0] for turn in turns]
    # on an open connection: a call that misses its deadline has then been sent
    await seen.reachable()
    with seen.trouble(move.fault, "memory/remember", deadline=deadline_for(move.said)):
        result = await seen.fed.call("consolidate")
        await seen.hears(done(move.fault))
    assert result["moved"] in move.moved
    assert move.said in seen.log
    assert ("not moved" in seen.log) == (result["moved"] == 0)
    await seen.reachable()
    assert await seen.readable(name) == turns
    tiers = await spilled(seen)
    assert (tiers["working"], tiers["semantic"][-3:]) == (turns[3:], turns[:3])
    assert {json.dumps(record["metadata"]) for record in await seen.fed.timeline(where={"id": ids})} == {'{"n": 1}'}
    assert seen.held(name) == turns[:3]
    # the next story starts without records
    await seen.fed.call("forget", ids=ids)
    await seen.well()
    assert seen.held(name) == []


@pytest.mark.process
async def test_a_spill_that_reads_back_another_record_is_not_done(tmp_path: Path, log: Log) -> None:
    turns = [f"turn {number}" for number in range(3)]
    async with world(tmp_path, "stdio", planned('do = "alter-record"', "memory/recall"), log) as seen:
        for turn in turns:
            await seen.fed.remember(turn)
        with seen.trouble():
            assert (await seen.fed.call("consolidate"))["moved"] == 0
            assert await seen.readable() == turns
        assert ALTERED in seen.log
        assert await spilled(seen) == {"working": turns[1:], "semantic": turns[:1]}
    assert seen.held() == turns[:1]


# --- tiers that lie


@pytest.mark.process
async def test_a_write_that_was_acknowledged_and_lost_is_missed_when_it_is_read(tmp_path: Path, log: Log) -> None:
    async with world(tmp_path, "stdio", planned('do = "lose-write"'), log) as seen:
        await seen.write("before")
        with seen.trouble():
            assert await seen.write("in trouble") is None
        assert await seen.readable() == ["before"]
        assert "tier=semantic record missing: it does not hold 'in trouble', which should live there" in seen.log
        # the client can write the record again
        assert await seen.write("in trouble") is None
        assert await seen.readable() == ["before", "in trouble"]
    assert seen.held() == ["before", "in trouble"]


@pytest.mark.process
async def test_a_write_that_was_not_durable_is_missed_after_the_crash(tmp_path: Path, log: Log) -> None:
    plan = planned('having = "not on disk"\ndo = "lose-at-crash"') + planned(
        'having = "last"\ndo = "exit-after-answer"'
    )
    async with world(tmp_path, "stdio", plan, log) as seen:
        await seen.write("before")
        with seen.trouble():
            assert await seen.write("not on disk") is None
            assert await seen.readable() == ["before", "not on disk"]
            assert await seen.write("last") is None
        await seen.well()
        await seen.hears("tier=semantic 2 records lost that should live there: not on disk, last")
        assert await seen.readable() == ["before"]
        assert "fault=lose-at-crash a write is acknowledged; when the server next dies" in seen.log
        assert "saved memory restored" in seen.log
        assert await seen.write("not on disk") is None
        assert await seen.readable() == ["before", "not on disk"]
    assert seen.held() == ["before", "not on disk"]


def bring_back(folder: Path) -> None:
    """Put the tier's files back that a2m-chaos had moved away."""
    for path in folder.glob("semantic.db*"):
        path.unlink()
    for path in (folder / "faults.chaos-moved-1").iterdir():
        path.rename(folder / path.name)


@pytest.mark.process
async def test_a_tier_that_restarts_empty_is_inactive_until_it_is_adopted(tmp_path: Path, log: Log) -> None:
    other = "another store is behind this tier than last time"
    async with world(tmp_path, "stdio", planned('do = "restart-empty"', "memory/remember"), log) as seen:
        await seen.write("before")
        with seen.trouble():
            error = await seen.write("in trouble")
        assert error is not None
        assert "status 3" in str(error)
        await seen.fed.federation.links["semantic"].wait_up()
        await seen.hears(other)
        result = await seen.fed.call("timeline")
        assert (result["records"], [each["tier"] for each in result["degraded"]]) == ([], ["semantic"])
        refused = await seen.write("afterwards")
        assert refused is not None
        assert other in str(refused)
    assert seen.held() == []
    bring_back(tmp_path)
    async with world(tmp_path, "stdio", planned('do = "restart-empty"', "memory/remember"), log) as seen:
        assert await seen.readable() == ["before"]
        assert await seen.write("afterwards") is None


@pytest.mark.process
async def test_what_a_tier_claims_to_have_forgotten_is_gone_in_the_end(tmp_path: Path, log: Log) -> None:
    async with world(tmp_path, "stdio", planned('do = "forget-less"'), log) as seen:
        for content in ("a", "b", "c"):
            await seen.write(content)
        with seen.trouble():
            assert await seen.fed.call("forget", ids=["b", "c"]) == {"forgotten": 2}
            assert await seen.readable() == ["a"]
            await seen.hears("its server says that it has forgotten records, and holds them still")
        await seen.well()
        assert await seen.readable() == ["a"]
    assert seen.held() == ["a"]


@pytest.mark.process
async def test_another_record_in_a_tiers_answer_is_taken_at_its_word(tmp_path: Path, log: Log) -> None:
    """The router passes the altered record on."""
    async with world(tmp_path, "stdio", planned('do = "alter-record"', "memory/recall"), log) as seen:
        await seen.write("pears")
        with seen.trouble():
            found = await seen.fed.call("recall", query="pears")
        assert [record["content"] for record in found["records"]] == ["pears [altered]"]
        assert "memory/recall" in seen.log
        assert await seen.readable() == ["pears"]
    assert seen.held() == ["pears"]


# --- reads


@pytest.mark.process
@pytest.mark.parametrize(
    ("front", "fault", "reason"),
    [
        ("stdio", 'do = "hang"', DEADLINE),
        ("stdio", 'do = "huge-answer"\nsize = 200_000', "an answer of more than 100,000 bytes"),
        ("http", 'do = "http-429"', "HTTP 429 Too Many Requests"),
        ("http", 'do = "reset"', "the connection broke"),
    ],
)
async def test_a_tier_in_trouble_is_named_and_the_others_answer(
    front: str, fault: str, reason: str, tmp_path: Path, log: Log
) -> None:
    async with world(tmp_path, front, planned(fault, "memory/recall"), log) as seen:
        await seen.fed.remember("pears at home")
        await seen.write("pears far away")
        with seen.trouble(deadline=deadline_for(reason)):
            result = await seen.fed.call("recall", query="pears")
            await seen.hears(done(fault))
        assert [record["content"] for record in result["records"]] == ["pears at home"]
        [degraded] = result["degraded"]
        assert degraded["tier"] == "semantic"
        assert reason in degraded["reason"]
        result = await seen.fed.call("recall", query="pears")
        assert {record["content"] for record in result["records"]} == {"pears at home", "pears far away"}
        assert "degraded" not in result
    assert seen.held() == ["pears far away"]


# --- writes over HTTP that land after their deadline


@pytest.mark.process
async def test_a_write_that_lands_after_it_was_abandoned_is_never_shown(tmp_path: Path, log: Log) -> None:
    plan = planned('do = "apply-late"\nwait = "3s"', "memory/remember")
    async with world(tmp_path, "http", plan, log) as seen:
        assert await seen.write("before") is None
        with seen.trouble(deadline=SOON):
            assert await seen.write("in trouble") is not None
            await seen.hears(done('do = "apply-late"'))
        await seen.well()
        await seen.hears("fault=apply-late carried out now")
        assert await seen.readable() == ["before"]
        assert (await seen.fed.call("recall", query="trouble"))["records"] == []
        assert await seen.write("afterwards") is None
        assert await seen.readable() == ["before", "afterwards"]
    assert seen.held() == ["before", "in trouble", "afterwards"]


@pytest.mark.process
async def test_a_refused_write_that_lands_late_is_not_back_after_a_restart(tmp_path: Path, log: Log) -> None:
    plan = planned('do = "apply-late"\nwait = "3s"', "memory/remember")
    async with world(tmp_path, "http", plan, log) as seen:
        assert await seen.write("before") is None
        with seen.trouble(deadline=SOON):
            assert await seen.write("in trouble") is not None
            await seen.hears(done('do = "apply-late"'))
        await seen.well()
        await seen.hears("fault=apply-late carried out now")
        await seen.fed.call("recall", query="trouble")
    async with world(tmp_path, "http", plan, log) as seen:
        await seen.well()
        assert await seen.readable() == ["before"]
        assert await seen.write("in trouble") is None


@pytest.mark.process
async def test_an_answer_that_comes_twice_is_not_taken_for_the_next_ones(tmp_path: Path, log: Log) -> None:
    plan = planned('do = "answer-twice"\nwait = "100ms"', "memory/remember")
    async with world(tmp_path, "http", plan, log) as seen:
        with seen.trouble():
            assert await seen.write("in trouble") is None
        await seen.hears("fault=answer-twice sent again")
        assert await seen.write("afterwards") is None
        assert await seen.readable() == ["in trouble", "afterwards"]
    assert seen.held() == ["in trouble", "afterwards"]


class AnsweringAnother:
    """An exchange in which every answer has another call's id, as on a connection that is out of step."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def post(self, posting: Posting) -> Answer:
        posting.sent = True
        return Answer(200, self._answer)


@pytest.mark.parametrize("outcome", ['"result":{}', '"error":{"code":-32603,"message":"full"}'])
async def test_an_answer_to_another_call_says_nothing_about_this_one(outcome: str) -> None:
    client = HttpClient(AnsweringAnother(f'{{"jsonrpc":"2.0","id":999,{outcome}}}'.encode()))
    with pytest.raises(NoAnswer) as unanswered:
        await client.call("memory/remember", {}, timeout=PATIENCE)
    assert not unanswered.value.settled.is_set()


def test_every_fault_has_its_story() -> None:
    told = {do(story.fault) for story in STORIES}
    assert told | {"lose-write", "lose-at-crash", "restart-empty", "forget-less", "alter-record"} == set(KINDS)
