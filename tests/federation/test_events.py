"""Events as clients see them: what each reader may see, what is pushed and when, and whether the events account for all
changes (§4.12 to §4.14, rules 10 and 14).

A2M_EXAMPLES=50 runs fifty times as many examples.
"""

import gc
import json
import os
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.process.descriptors import DescriptorSink, DescriptorSource
from a2m_router.protocol.server.event_log import EventLog
from a2m_router.protocol.server.server import Answering, Caller, Dispatcher, Method
from a2m_router.protocol.server.stdio import serve_lines
from a2m_router.protocol.server.watching import Watching
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.events import Consolidated, Event, Forgotten, Place, Promoted, Sight, Written, named
from a2m_router.protocol.wire.method_params import Params
from a2m_store.server import serving
from a2m_store.store import Store
from tests.support import histories as h
from tests.support.clocks import Pace, jumping, simulated
from tests.support.crashes import forget_what_was_reserved, photograph
from tests.support.examples import examples
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Clock,
    Steered,
    Task,
    Trial,
    at_once,
    joined,
    method_of,
    settings_of,
    trial,
)
from tests.support.histories import POOL, SHARED, TIERS, restless

Object = dict[str, Any]


# --- what a reader may see of an event

owners = st.sampled_from([None, "a", "b"])
places = st.builds(Place, owners, st.sampled_from(["working", "procedural"]))


@examples(20)
@given(
    records=st.lists(places, max_size=12),
    by=owners,
    reader=owners,
    asked=st.booleans(),
    times=st.sampled_from([1, 1, 1, 400]),
)
def test_an_event_tells_each_reader_of_what_he_could_recall(
    records: list[Place], by: str | None, reader: str | None, asked: bool, times: int
) -> None:
    """The ids and the count of an event include only the records that the reader could recall."""
    sight = Sight(reader, frozenset(SHARED))
    placed = [(f"{number}", place) for number, place in enumerate(records * times)]
    visible = [id for id, (owner, tier) in placed if reader is None or owner in (None, reader) or tier in SHARED]
    # Neither the count nor a missing list of ids reveals how many other records there are.
    counted = {"count": len(visible)} | ({"ids": visible} if len(visible) <= 1000 else {})
    own = bool(visible) or reader is None or reader == by
    at = "2026-01-01T00:00:00.000Z"
    assert told(Forgotten(at=MOMENT, by=by, records=named(placed)), sight) == (
        {"kind": "forgotten", "at": at, **counted} if own else None
    )
    assert told(Promoted(at=MOMENT, by=by, tier="semantic", records=named(placed)), sight) == (
        {"kind": "promoted", "at": at, "tier": "semantic", **counted} if own else None
    )
    figures = {"moved": Counter(place for _, place in placed), "dropped": Counter[Place]()}
    assert told(Consolidated(at=MOMENT, by=by, asked=asked, figures=figures), sight) == (
        {"kind": "consolidated", "at": at, "moved": len(visible), "dropped": 0} if visible or (asked and own) else None
    )


MOMENT: Final = 1_767_225_600_000


def told(event: Event, reader: Sight) -> Mapping[str, Any] | None:
    return event.seen_by(reader)


# --- push


class Wire:
    """A connection at the level of lines. `send` sends the collected calls in one chunk; answers stay in order."""

    def __init__(self, source: Any, sink: "Reading") -> None:
        self._source = source
        self.sink = sink
        self._said: list[bytes] = []
        self._last_id = 0

    def say(self, method: str, **params: Any) -> int:
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": f"memory/{method}", "params": params}
        self._said.append(msgspec.json.encode(message) + b"\n")
        return self._last_id

    def send(self) -> None:
        """Send the calls that `say` has collected, in one chunk."""
        if self._said:
            self._source.send_nowait(b"".join(self._said))
            self._said.clear()

    async def ask(self, method: str, **params: Any) -> Any:
        """Return the answer to one call."""
        id = self.say(method, **params)
        self.send()
        while (answer := next((line for line in reversed(self.lines) if line.get("id") == id), None)) is None:
            await anyio.lowlevel.checkpoint()
        return answer["result"] if "result" in answer else answer["error"]

    def hang_up(self) -> None:
        self._source.close()

    @property
    def lines(self) -> list[Object]:
        return self.sink.lines

    @property
    def pushed(self) -> list[Object]:
        return [message["params"] for message in self.lines if "id" not in message]


class Reading(anyio.abc.ByteSendStream):
    """The client's end of the connection: it receives lines with a small delay while `reads` is set."""

    def __init__(self) -> None:
        self.lines: list[Object] = []
        self.sizes: list[int] = []
        self.reads = anyio.Event()
        self.reads.set()

    def stop(self) -> None:
        self.reads = anyio.Event()

    async def send(self, item: bytes) -> None:
        await self.reads.wait()
        await anyio.lowlevel.checkpoint()
        lines = item.splitlines()
        self.sizes.append(len(lines))
        self.lines += [json.loads(line) for line in lines]

    async def aclose(self) -> None:
        self.reads.set()


async def quiet(*wires: Wire) -> None:
    """Wait until no more lines arrive on these connections. All is in memory, so a number of loop turns is enough."""
    before = -1
    while before != (before := sum(len(wire.lines) for wire in wires)):
        await turns(50)


@asynccontextmanager
async def wired(answer: Answering, *, caller: Caller = LOCAL) -> AsyncIterator[Wire]:
    """An in-memory connection to a server. It is closed at the end."""
    sending, source = anyio.create_memory_object_stream[bytes](1000)
    sink = Reading()
    with sending, source:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(serve_lines, answer, source, sink, caller=caller))
            wire = Wire(sending, sink)
            yield wire
            wire.hang_up()
            sink.reads.set()


class Do(Params):
    """A call to Hesitant: wait some turns, log these events one by one, wait some more."""

    ids: list[str]
    owner: str | None = None
    before: int = 0
    between: int = 0
    after: int = 0


class Hesitant:
    """A server that has only events, and waits before and after each change."""

    def __init__(self, retained: int = 1000) -> None:
        self.log = EventLog(retained)
        self._clock = Clock()
        watching = Watching(self.log, lambda caller, owner: Sight(owner))
        table = {"memory/remember": Method(Do, self._write), "memory/forget": Method(Do, self._forget)}
        self.answer = Dispatcher({**table, **watching.methods()}, ["core", "events"])

    async def _write(self, params: Do, _: Caller) -> list[str]:
        await turns(params.before)
        for id in params.ids:
            self.log.append(Written(at=self._clock(), id=id, place=Place(params.owner)))
            await turns(params.between)
        await turns(params.after)
        return params.ids

    async def _forget(self, params: Do, _: Caller) -> int:
        await turns(params.before)
        gone = named([(id, Place(params.owner)) for id in params.ids])
        self.log.append(Forgotten(at=self._clock(), by=params.owner, records=gone))
        await turns(params.after)
        return len(params.ids)


async def turns(number: int) -> None:
    for _ in range(number):
        await anyio.lowlevel.checkpoint()


class Change(msgspec.Struct, frozen=True):
    method: str
    owner: str | None
    before: int
    between: int
    after: int
    records: int


class Watch(msgspec.Struct, frozen=True):
    """A subscribe, or an unsubscribe if `ends`."""

    owner: str | None = None
    kinds: list[str] | None = None
    ends: bool = False


changes = st.builds(
    Change,
    st.sampled_from(["remember", "remember", "forget"]),
    owners,
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(1, 3),
)
kinds = st.sampled_from([None, None, ["written"], ["forgotten", "written"], []])
watches = st.builds(Watch, owners, kinds, st.sampled_from([False, False, False, True]))
rounds = st.lists(
    st.lists(st.lists(st.one_of(changes, changes, watches), max_size=4), min_size=3, max_size=3), min_size=2, max_size=5
)


class Line(msgspec.Struct):
    """A connection, the calls that caused events, and the parameters of its subscriptions."""

    wire: Wire
    caused: dict[str, int] = msgspec.field(default_factory=dict)
    watches: dict[int, Watch] = msgspec.field(default_factory=dict)
    active: Watch | None = None

    def judge(self, start: int, events: Sequence[Object]) -> None:
        """Check the lines since `start` against the events of that time: each due event was pushed once, in the order
        of the log.
        """
        answered: set[int] = set()
        numbers = {event["at"]: number for number, event in enumerate(events)}
        runs: list[tuple[Watch | None, list[int]]] = [(self.active, [])]
        for line in self.wire.lines[start:]:
            if "id" in line:
                assert "result" in line, line
                answered.add(line["id"])
                if line["id"] in self.watches:
                    asked = self.watches[line["id"]]
                    assert line["result"] == {"subscribed": not asked.ends}
                    runs.append((None if asked.ends else asked, []))
                continue
            assert line["method"] == "memory/event"
            event = line["params"]
            # The pushed event is the one in the log, and the call that caused it is already answered.
            number = numbers[event["at"]]
            assert events[number] == event
            cause = self.caused.get(name_of(event))
            assert cause is None or cause in answered, "before its call's answer"
            runs[-1][1].append(number)
        pushed = [number for _, run in runs for number in run]
        assert pushed == sorted(set(pushed)), "in the order of the log, each once"
        for place, (watch, run) in enumerate(runs):
            due = [] if watch is None else [n for n, event in enumerate(events) if is_for(watch, event)]
            # There are no gaps. A subscription from before begins at the first event, one that goes on ends at the last
            # event.
            since = 0 if place == 0 else due.index(run[0]) if run else len(due)
            until = len(due) if place == len(runs) - 1 else since + len(run)
            assert run == due[since:until]
        self.active = runs[-1][0]


def name_of(event: Object) -> str:
    name: str = event["id"] if event["kind"] == "written" else event["ids"][0]
    return name


def owner_of(id: str) -> str | None:
    return {"n": None}.get(id[0], id[0])


def is_for(watch: Watch, event: Object) -> bool:
    kind = watch.kinds is None or event["kind"] in watch.kinds
    return kind and (watch.owner is None or owner_of(name_of(event)) in (None, watch.owner))


@examples(20)
@given(rounds=rounds)
def test_pushed_events_keep_their_place_among_the_answers(
    anyio_backend: str, rounds: list[list[list[Change | Watch]]]
) -> None:
    async def scenario() -> None:
        server = Hesitant()
        async with (
            wired(server.answer) as one,
            wired(server.answer) as two,
            wired(server.answer) as three,
        ):
            lines = [Line(one), Line(two), Line(three)]
            cursor = (await one.ask("events"))["cursor"]
            number = 0
            for things in rounds:
                await quiet(one, two, three)
                starts = [len(line.wire.lines) for line in lines]
                for line, mine in zip(lines, things, strict=True):
                    for thing in mine:
                        number += 1
                        say(line, thing, number)
                for line in lines:
                    line.wire.send()
                await quiet(one, two, three)
                polled = server.log.poll(Sight(), cursor, None, None)
                cursor = polled.cursor
                for line, start in zip(lines, starts, strict=True):
                    line.judge(start, [dict(event) for event in polled.events])
        assert not server.log._wakes

    anyio.run(scenario, backend=anyio_backend)


def say(line: Line, thing: Change | Watch, number: int) -> None:
    if isinstance(thing, Change):
        ids = [f"{thing.owner or 'n'}{number}.{n}" for n in range(thing.records)]
        hesitation = {"before": thing.before, "between": thing.between, "after": thing.after}
        id = line.wire.say(thing.method, ids=ids, owner=thing.owner, **hesitation)
        line.caused.update(dict.fromkeys(ids, id))
    elif thing.ends:
        line.watches[line.wire.say("events/unsubscribe")] = thing
    else:
        line.watches[line.wire.say("events/subscribe", owner=thing.owner, kinds=thing.kinds)] = thing


@pytest.mark.anyio
async def test_what_others_do_is_pushed_while_ones_own_call_goes_on() -> None:
    server = Hesitant()
    async with wired(server.answer) as one, wired(server.answer) as two:
        await one.ask("events/subscribe")
        one.say("remember", ids=["slow"], before=40)
        one.send()
        two.say("remember", ids=["quick"])
        two.send()
        while not one.pushed:
            await anyio.lowlevel.checkpoint()
        assert [line.get("id", line.get("params", {}).get("id")) for line in one.lines] == [1, "quick"]
        await quiet(one)
        assert [line.get("id", line.get("params", {}).get("id")) for line in one.lines] == [1, "quick", 2, "slow"]


@pytest.mark.anyio
async def test_nothing_is_pushed_before_or_after_a_subscription() -> None:
    """Nothing is pushed before the answer to subscribe or after the answer to unsubscribe."""
    server = Hesitant()
    answered = anyio.Event()

    async def late(message: bytes, caller: Caller) -> bytes | None:
        reply = await server.answer(message, caller)
        await answered.wait()
        return reply

    async with wired(late) as one, wired(server.answer) as two:
        one.say("events/subscribe")
        one.send()
        await quiet(one)
        await two.ask("remember", ids=["x"])
        await quiet(one)
        assert one.lines == []
        answered.set()
        await quiet(one)
        assert [line.get("id", line.get("params", {}).get("id")) for line in one.lines] == [1, "x"]
        answered = anyio.Event()
        one.say("events/unsubscribe")
        one.send()
        await quiet(one)
        await two.ask("remember", ids=["y"])
        answered.set()
        await quiet(one)
        assert one.lines[-1] == {"jsonrpc": "2.0", "id": 2, "result": {"subscribed": False}}


@pytest.mark.anyio
async def test_who_does_not_read_holds_up_nobody_and_finds_what_is_kept() -> None:
    server = Hesitant(retained=500)
    async with wired(server.answer) as sleeper, wired(server.answer) as busy:
        await sleeper.ask("events/subscribe")
        await busy.ask("events/subscribe")
        sleeper.sink.stop()
        for hundred in range(100):
            ids = [f"{hundred * 100 + number}" for number in range(100)]
            assert await busy.ask("remember", ids=ids) == ids
        await quiet(busy)
        everything = [f"{number}" for number in range(10_000)]
        assert [event["id"] for event in busy.pushed] == everything
        assert sleeper.pushed == []
        sleeper.sink.reads.set()
        await quiet(sleeper)
        woken = [int(event["id"]) for event in sleeper.pushed]
        # The client first gets the few events that were already taken for it, then all that the log retains.
        assert woken[-500:] == list(range(9_500, 10_000))
        assert woken[:-500] == list(range(len(woken) - 500))
        assert len(woken) <= 500 + 300
        assert max(sleeper.sink.sizes) <= 300


@pytest.mark.anyio
async def test_a_client_that_does_not_read_is_answered_in_order() -> None:
    """A client that does not read can send calls, and their answers keep their place among the pushed events."""
    server = Hesitant(retained=5)
    async with wired(server.answer) as sleeper, wired(server.answer) as busy:
        await sleeper.ask("events/subscribe")
        sleeper.sink.stop()
        for number in range(1_000):
            await busy.ask("remember", ids=[f"{number}"])
        last = sleeper.say("remember", ids=["mine"])
        sleeper.send()
        await wait_all_tasks_blocked()
        sleeper.sink.reads.set()
        await quiet(sleeper)
        answer = next(number for number, line in enumerate(sleeper.lines) if line.get("id") == last)
        assert [line["params"]["id"] for line in sleeper.lines[answer + 1 :]][-1] == "mine"
        assert "mine" not in [line["params"]["id"] for line in sleeper.lines[1:answer]]


@pytest.mark.anyio
async def test_a_subscription_ends_with_its_connection_however_that_ends() -> None:
    server = Hesitant()
    async with wired(server.answer) as wire:
        await wire.ask("events/subscribe")
        assert len(server.log._wakes) == 1
    assert not server.log._wakes
    broken = Breaking()
    sending, source = anyio.create_memory_object_stream[bytes](10)
    with sending, source, anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_lines, server.answer, source, broken)
            wire = Wire(sending, broken)
            await wire.ask("events/subscribe")
            broken.broken = True
            server.log.append(Written(at=MOMENT, id="x", place=Place(None)))
    assert not server.log._wakes


class Breaking(Reading):
    """A stream whose `send` fails once `broken` is set."""

    broken = False

    async def send(self, item: bytes) -> None:
        if self.broken:
            raise anyio.BrokenResourceError
        await super().send(item)


@pytest.mark.anyio
async def test_a_subscription_ends_with_its_connection_when_that_is_cancelled() -> None:
    server = Hesitant()
    with anyio.CancelScope() as scope:
        async with wired(server.answer) as wire:
            await wire.ask("events/subscribe")
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert not server.log._wakes


@pytest.mark.anyio
async def test_the_log_keeps_nothing_of_a_connection_that_has_ended() -> None:
    server = Hesitant()
    async with wired(server.answer) as wire:
        await wire.ask("remember", ids=["x"])
        sink = weakref.ref(wire.sink)
    del wire
    gc.collect()
    assert sink() is None


@pytest.mark.anyio
async def test_a_line_that_is_being_pushed_is_finished_at_the_end_of_input() -> None:
    server = Hesitant()
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    source, sink = DescriptorSource(reading), DescriptorSink(writing)
    sending, requests = anyio.create_memory_object_stream[bytes](10)
    came = b""

    async def serve() -> None:
        await serve_lines(server.answer, requests, sink)
        sink.close()

    with sending, requests:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            wire = Wire(sending, Reading())
            wire.say("events/subscribe")
            wire.send()
            came += await source.receive()
            for number in range(90):
                server.log.append(Written(at=MOMENT, id=f"{number}" * 1000, place=Place(None)))
            await wait_all_tasks_blocked()
            wire.hang_up()
            await wait_all_tasks_blocked()
            with anyio.fail_after(20):
                while chunk := await received(source):
                    came += chunk
    source.close()
    assert came.endswith(b"\n")
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in came.splitlines())


async def received(source: DescriptorSource) -> bytes:
    try:
        return await source.receive()
    except anyio.EndOfStream:
        return b""


@pytest.mark.anyio
async def test_a_connection_that_carries_no_notifications_is_told_so_and_polls() -> None:
    server = Hesitant()

    async def ask(method: str) -> Any:
        message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/events{method}", "params": {}}
        return json.loads(await server.answer(msgspec.json.encode(message), LOCAL) or b"")

    assert (await ask("/subscribe"))["error"]["code"] == Code.CAPABILITY_NOT_SUPPORTED
    assert (await ask("/unsubscribe"))["result"] == {"subscribed": False}
    assert (await ask(""))["result"]["events"] == []


@pytest.mark.anyio
async def test_declaring_events_causes_no_notification_and_neither_does_polling() -> None:
    server = Hesitant()
    async with wired(server.answer) as wire:
        assert await wire.ask("events/unsubscribe") == {"subscribed": False}
        cursor = (await wire.ask("events"))["cursor"]
        await wire.ask("remember", ids=["x"])
        await quiet(wire)
        assert [event["id"] for event in (await wire.ask("events", cursor=cursor))["events"]] == ["x"]
        assert (await wire.ask("events", limit=0))["code"] == Code.INVALID_PARAMS
        assert wire.pushed == []


# --- the federation: all events together account for all changes

CAPTIONS: Final = {"moved", "promoted", "dropped", "summarized"}
KEPT: Final = "[events]\nretained = 100000\n"


class Done(msgspec.Struct, frozen=True):
    """A call and its answer; the answer is None if the call failed."""

    method: str
    params: Object
    answer: Any


class Poller:
    """A client that polls events, each time with the cursor of the last answer."""

    def __init__(self, fed: Trial, owner: str | None, seed: int = 0) -> None:
        self.owner = owner
        self.events: list[Object] = []
        self._fed = fed
        self._chance = random.Random(seed)
        self._cursor: str | None = None

    async def poll(self, limit: int | None = None) -> bool:
        """Poll once. Return whether there are more events."""
        asked = {"owner": self.owner, "cursor": self._cursor, "limit": limit}
        given = {name: value for name, value in asked.items() if value is not None}
        polled = await self._fed.call("events", **given)
        assert "reset" not in polled
        assert limit is None or len(polled["events"]) <= limit
        assert not polled.get("more") or len(polled["events"]) == (limit or 1000)
        self._cursor = polled["cursor"]
        self.events += polled["events"]
        return bool(polled.get("more"))

    async def poll_on(self, done: anyio.Event) -> None:
        pace = Pace(looks=100, longest=0.05)
        while not done.is_set():
            for _ in range(self._chance.randrange(40)):
                await pace()
            await self.poll(self._chance.choice([None, 1, 2, 5]))


class Ledger:
    """Carries out operations of histories and records the calls with their answers. Each draft has its own content."""

    def __init__(self, fed: Trial) -> None:
        self.fed = fed
        self.done: list[Done] = []
        self.owners: dict[str, str | None] = dict(POOL)
        self.repeated: set[str] = set()  # sessions of drafts whose key occurred before in the same batch
        self._drafts = 0
        self._groups: list[tuple[str, str | None]] = []

    async def client(self, operations: Sequence[h.Operation]) -> None:
        for operation in operations:
            await self.carry_out(operation)

    async def carry_out(self, operation: h.Operation) -> None:
        match operation:
            case h.Write(records=drafts, owner=owner, session=session):
                sent = [self._sent(draft, owner) for draft in drafts]
                await self._write(sent, owner, session)
            case h.WriteGroup(records=drafts, owner=owner, tier=tier):
                self._groups.append((f"g{len(self._groups)}", owner))
                shared = {"group": self._groups[-1][0]} | ({"tier": tier} if tier else {})
                await self._write([self._sent(draft, owner) | shared for draft in drafts], owner, None)
            case h.Promote(which=which, tier=tier, owner=owner):
                await self._call("promote", ids=self._ids(which), tier=tier, owner=owner)
            case h.Forget(which=which, owner=owner, where=where, tier=tier, key_prefix=prefix, query=query):
                ids = None if which is None else self._ids(which)
                await self._call(
                    "forget", ids=ids, owner=owner, where=where or None, tier=tier, key_prefix=prefix, query=query
                )
            case h.Consolidate():
                await self._call("consolidate", owner=random.Random(len(self.done)).choice([None, "a", "b"]))
            case h.Close(session=session, owner=owner):
                await self._call("session/close", session=session, owner=owner)
            case _:
                raise AssertionError(operation)

    def _sent(self, draft: h.Draft, owner: str | None) -> Object:
        self._drafts += 1
        sent = {name: value for name, value in draft.fields.items() if name != "created_at"}
        # The session of a draft with an id or a key is unique, so it identifies the write.
        named = draft.id is not None or draft.key is not None
        sent["content"] = f"{sent.get('content', '')} {self._drafts}"
        sent |= {"session": f"n{self._drafts}"} if named else {}
        sent |= {} if draft.tier is None else {"tier": draft.tier}
        sent |= {} if draft.key is None else {"key": draft.key}
        if draft.id is not None and owner in (None, POOL[draft.id]):
            sent |= {"id": draft.id, "owner": POOL[draft.id]}
        groups = [group for group, whose in self._groups if whose == owner]
        if draft.late is not None and groups and not named:
            sent["group"] = groups[draft.late % len(groups)]
        return sent

    async def _write(self, sent: list[Object], owner: str | None, session: str | None) -> None:
        for number, record in enumerate(sent):
            if "key" in record and record["key"] in [each.get("key") for each in sent[:number]]:
                self.repeated.add(record["session"])
        answer = await self._call("remember", records=sent, owner=owner, session=session)
        for record, id in zip(sent, answer["ids"] if answer else (), strict=bool(answer)):
            assert self.owners.setdefault(id, record.get("owner", owner)) == record.get("owner", owner)

    def _ids(self, which: Sequence[int]) -> list[str]:
        known = list(self.owners)
        return [known[number % len(known)] for number in which]

    async def _call(self, method: str, **params: Any) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        try:
            answer = await self.fed.call(method, **given)
        except A2MError as error:
            if error.code != Code.INTERNAL_ERROR:
                raise
            answer = None
        self.done.append(Done(method, given, answer))
        return answer

    def answers(self, method: str) -> list[Done]:
        """Return the calls of the method that succeeded."""
        return [done for done in self.done if done.method == method and done.answer is not None]

    def answers_to(self, owner: str | None, *methods: str) -> list[Done]:
        """Return the successful calls of these methods with this owner."""
        return [done for method in methods for done in self.answers(method) if done.params.get("owner") == owner]


ledger_operations = st.one_of(
    h.writes, h.writes, h.writes, h.groups, h.promotes, h.forgets, h.forgets, h.moves, h.closes
)


async def run_ledger(history: h.History, weather: Any) -> None:
    """Run a history while a poller of each scope polls, then check the events that they received."""
    settings = settings_of(KEPT + FOUR_TIERS, policy="background" if history.background else "explicit")
    async with trial(settings, weather=weather) as fed:
        ledger = Ledger(fed)
        pollers = [Poller(fed, owner, history.seed + n) for n, owner in enumerate([None, None, "a", "b", "c"])]
        for poller in pollers:
            await poller.poll()
        done = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for poller in pollers[1:]:
                tasks.start_soon(poller.poll_on, done)
            await at_once(*(partial(ledger.client, operations) for operations in history.clients))
            weather.ends()
            await fed.settled()
            done.set()
        for poller in pollers:
            while await poller.poll():
                pass
        everything, *others = (poller.events for poller in pollers)
        # Small pages and one large page give the same events.
        assert others[0] == everything
        scoped = dict(zip("abc", others[1:], strict=True))
        for events in [everything, *others]:
            assert [event["at"] for event in events] == sorted({event["at"] for event in events})
        timeline = await fed.timeline()
        check_writes(ledger, everything)
        check_figures(ledger, everything, scoped, background=history.background)
        check_scopes(ledger, everything, scoped)
        assert replayed(everything, ledger.repeated) == {record["id"] for record in timeline}


def of(kind: str, events: Iterable[Object]) -> list[Object]:
    return [event for event in events if event["kind"] == kind]


def replayed(events: Iterable[Object], repeated: Collection[str]) -> set[str]:
    """Return the ids that exist according to the events.

    A key that occurs twice in one batch makes one record with one event, whose revision is greater than 0. `repeated`
    has the sessions of such drafts.
    """
    there: set[str] = set()
    for event in events:
        match event["kind"]:
            case "written":
                replaces = event["id"] in there or event.get("session") in repeated
                assert (event.get("revision", 0) > 0) == replaces, event
                there.add(event["id"])
            case "forgotten":
                assert there.issuperset(event["ids"]), event
                there.difference_update(event["ids"])
            case "promoted":
                assert set(event) == {"kind", "at", "tier", "count", "ids"}
    return there


def check_writes(ledger: Ledger, events: list[Object]) -> None:
    """Check that each record written has one event, with its tier, session, key and revision."""
    written = of("written", events)
    by_id: dict[str, list[Object]] = {}
    for event in written:
        by_id.setdefault(event["id"], []).append(event)
    plain: dict[str, Object] = {}
    keyed: dict[tuple[str | None, str], int] = {}
    sessions: dict[str, Object] = {}
    for done in ledger.answers("remember"):
        for record, id in zip(done.params["records"], done.answer["ids"], strict=True):
            whole = {"owner": done.params.get("owner"), "session": done.params.get("session"), **record}
            assert id in by_id, "what is answered has been told of"
            if "key" in record:
                keyed[whole["owner"], record["key"]] = keyed.get((whole["owner"], record["key"]), 0) + 1
            if "key" in record or "id" in record:
                sessions[record["session"]] = whole
            else:
                plain[id] = whole
    for id, whole in plain.items():
        [event] = by_id.pop(id)
        expected = {"tier": whole.get("tier", "working")} | ({"session": whole["session"]} if whole["session"] else {})
        assert event == {"kind": "written", "at": event["at"], "id": id, **expected}
    told = [event for events in by_id.values() for event in events]
    assert len({event["session"] for event in told}) == len(told), "once for each write"
    for event in told:
        # A failed write has no event: its session is not among those of the successful writes.
        whole = sessions[event["session"]]
        assert event.get("key") == whole.get("key")
        assert ("revision" in event) == ("key" in whole)
        assert event["tier"] == whole.get("tier", event["tier"] if event.get("revision") else "working")
        assert ledger.owners[event["id"]] == whole["owner"]
    last: dict[str, int] = {}
    lives: Counter[tuple[str | None, str]] = Counter()
    for event in events:
        if event["kind"] == "written" and "key" in event:
            assert event["revision"] > last.get(event["id"], -1), "revisions ascend"
            lives[ledger.owners[event["id"]], event["key"]] += event["revision"] - last.get(event["id"], -1)
            last[event["id"]] = event["revision"]
        for id in event.get("ids", ()) if event["kind"] == "forgotten" else ():
            last.pop(id, None)
    # A replacement that a concurrent forget overtakes may have only the event of the forget.
    forgets = bool(ledger.answers("forget"))
    assert set(lives) == set(keyed)
    assert all(lives[each] == number or (forgets and lives[each] < number) for each, number in keyed.items())


def check_figures(
    ledger: Ledger, events: list[Object], scoped: Mapping[str, list[Object]], *, background: bool
) -> None:
    """Check that each call has one event with the figures of its answer, and that a pass without changes has none
    unless a call asked for it.
    """
    forgotten = of("forgotten", events)
    assert all(event["count"] == len(event["ids"]) for event in forgotten)
    assert Counter(event["count"] for event in forgotten) == Counter(
        done.answer["forgotten"] for done in ledger.answers("forget")
    )
    assert Counter((event["tier"], event["count"]) for event in of("promoted", events)) == Counter(
        (done.params["tier"], done.answer["promoted"]) for done in ledger.answers("promote")
    )
    closes = ledger.answers("session/close")
    assert Counter(event["session"] for event in of("session_closed", events)) == Counter(
        done.answer["closed"] for done in closes
    )
    for owner, seen in ((None, events), *scoped.items()):
        answers = Counter(figures_of(done.answer) for done in ledger.answers_to(owner, "consolidate", "session/close"))
        told = Counter(map(figures_of, of("consolidated", seen)))
        assert answers <= told
    asked = ledger.answers("consolidate") + closes
    consolidated = of("consolidated", events)
    # An event without changes comes only from a call, whose answer has the same figures.
    idle_answers = sum(not any(figures_of(done.answer)) for done in asked)
    assert sum(not any(figures_of(event)) for event in consolidated) <= idle_answers
    failed = any(done.answer is None for done in ledger.done)
    assert background or failed or len(consolidated) == len(asked)


def figures_of(object: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(object[caption] for caption in sorted(CAPTIONS))


def check_scopes(ledger: Ledger, events: list[Object], scoped: Mapping[str, list[Object]]) -> None:
    """Check that a scoped reader sees of each event only the records that it could have recalled."""
    shown = {owner: {event["at"]: event for event in seen} for owner, seen in scoped.items()}
    for owner in scoped:
        assert set(shown[owner]) <= {event["at"] for event in events}
        for kind, number in (("forgotten", "forgotten"), ("promoted", "promoted")):
            method = "forget" if kind == "forgotten" else "promote"
            empty = sum(event["count"] == 0 for event in of(kind, scoped[owner]))
            assert empty == sum(done.answer[number] == 0 for done in ledger.answers_to(owner, method))
    been_shared: set[str] = set()
    for event in events:
        tier = event.get("tier")
        been_shared.update(
            ([event["id"]] if event["kind"] == "written" else event.get("ids", ())) if tier in SHARED else ()
        )
        views = {owner: seen.get(event["at"]) for owner, seen in shown.items()}
        for owner, view in views.items():
            match event["kind"]:
                case "written":
                    may = ledger.owners[event["id"]] in (None, owner) or tier in SHARED
                    assert view == (event if may else None)
                case "session_closed":
                    closers = {d.params.get("owner") for d in ledger.answers("session/close")}
                    assert view is None or (view == event and closers & {None, owner})
                case "promoted" | "forgotten" if view is not None:
                    assert view["count"] == len(view["ids"])
                    own = [id for id in event["ids"] if ledger.owners[id] in (None, owner)]
                    open_to_all = [id for id in view["ids"] if ledger.owners[id] not in (None, owner)]
                    assert set(view["ids"]) == {*own, *open_to_all}
                    assert been_shared.issuperset(open_to_all)
                    assert event["kind"] == "forgotten" or not open_to_all or tier in SHARED
                case "promoted" | "forgotten":
                    assert not any(ledger.owners[id] in (None, owner) for id in event["ids"])
        # Owner c owns nothing and sees what a and b both see; a and b together see everything.
        for caption in (*CAPTIONS, "count"):
            if caption in event:
                a, b, c = ((views[owner] or {caption: 0})[caption] for owner in "abc")
                assert a + b - c == event[caption]


class Restless:
    """Tiers that delay calls, and refuse some until `ends` is called."""

    def __init__(self, seed: int, odds: float = 0.0) -> None:
        self._weather = restless(seed)
        self._chance = random.Random(seed)
        self._odds = odds

    def ends(self) -> None:
        self._odds = 0.0

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        method = method_of(message).removeprefix("memory/")
        if method in ("remember", "recall", "forget") and self._chance.random() < self._odds:
            refusing = Steered()
            refusing.refuse(tier, method)
            return await refusing(tier, message, go_on)
        return await self._weather(tier, message, go_on)


# The next test runs on trio.
@pytest.mark.rule(n=10)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(10)
@given(history=h.histories(ledger_operations, first=h.writes | h.groups, most=8))
def test_the_events_account_for_all_that_has_happened(anyio_backend: str, history: h.History) -> None:
    anyio.run(run_ledger, history, Restless(history.seed), backend=anyio_backend)


@examples(8)
@given(
    history=h.histories(ledger_operations, first=h.writes | h.groups, most=8), odds=st.sampled_from([0.02, 0.1, 0.3])
)
def test_no_event_tells_of_what_a_tier_has_refused(history: h.History, odds: float) -> None:
    weather = Restless(history.seed, odds)
    anyio.run(run_ledger, history, weather, backend="trio", backend_options=jumping())


@simulated
async def test_who_polls_on_and_on_lets_time_pass() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        poller = Poller(fed, None)
        await poller.poll()
        await fed.remember("one", key="k")
        steer.refuse("working", "remember")
        await fed.remember("two", key="k")
        await wait_all_tasks_blocked()
        steer.allow("working", "remember")
        done = anyio.Event()
        tasks.start_soon(poller.poll_on, done)
        await fed.settled()  # the pending write is retried only after a while
        done.set()
    assert [event["kind"] for event in poller.events] == ["written", "written"]


async def events_since(fed: Trial, cursor: str, **params: Any) -> list[Object]:
    polled = await fed.call("events", cursor=cursor, **params)
    assert "reset" not in polled
    events: list[Object] = polled["events"]
    return events


async def now(fed: Trial) -> str:
    cursor: str = (await fed.call("events"))["cursor"]
    return cursor


CALM: Final = settings_of(policy="explicit")


@pytest.mark.anyio
async def test_a_replacement_is_an_event_before_its_tier_has_it() -> None:
    """A replacement has its event before the tier has it, and before the event of a forget that follows."""
    steer = Steered()
    async with trial(CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        cursor = await now(fed)
        [id] = await fed.remember("one", key="k")
        writing = steer.hold("working", "remember")
        replace = Task(tasks, lambda: fed.remember("two", key="k"))
        await writing.reached.wait()
        assert await fed.call("forget", ids=[id]) == {"forgotten": 1}
        writing.release()
        assert await replace.ended() == [id]
        assert await fed.timeline() == []
        assert [event["kind"] for event in await events_since(fed, cursor)] == [
            *("written", "written", "forgotten"),
        ]


@pytest.mark.anyio
async def test_a_record_is_told_of_when_it_is_true_and_not_before() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        cursor = await now(fed)
        written = steer.hold("working", "remember", after=True)
        write = Task(tasks, lambda: fed.remember("one"))
        await written.reached.wait()
        assert await events_since(fed, cursor) == []
        written.release()
        ids = await write.ended()
        assert [event["id"] for event in await events_since(fed, cursor)] == ids


@pytest.mark.anyio
async def test_a_call_that_failed_and_changed_nothing_is_no_event() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        ids = await fed.remember("one", "two", session="s", key="k")
        cursor = await now(fed)
        for tier in TIERS:
            steer.refuse(tier, "remember")
            steer.refuse(tier, "recall")
        for call in (
            partial(fed.remember, "three"),
            partial(fed.call, "promote", ids=ids, tier="semantic"),
            partial(fed.call, "forget", query="one"),
        ):
            with pytest.raises(A2MError):
                await call()
        assert await events_since(fed, cursor) == []


@pytest.mark.anyio
async def test_a_close_that_failed_is_no_event() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        await fed.remember("one", session="s")
        cursor = await now(fed)
        steer.refuse("episodic", "remember")
        with pytest.raises(A2MError):
            await fed.call("session/close", session="s")
        assert await events_since(fed, cursor) == []


@pytest.mark.anyio
async def test_a_pass_tells_how_many_records_came_to_live_elsewhere() -> None:
    async with trial(CALM) as fed:
        await fed.remember(*"abc", session="s", owner="a")
        await fed.remember(*"def", session="s", owner="b")
        cursor = await now(fed)
        answer = await fed.call("session/close", session="s", owner="a")
        for owner, moved in ((None, 3), ("a", 3)):
            [event] = of("consolidated", await events_since(fed, cursor, owner=owner))
            assert figures_of(event) == figures_of(answer)
            assert (event["moved"], event["promoted"]) == (moved, 0)
        assert of("consolidated", await events_since(fed, cursor, owner="b")) == []
        earned = [record["id"] for record in await fed.timeline(tier="episodic")][:1]
        for _ in range(3):
            await fed.call("recall", where={"id": earned})
        await fed.remember(*"ghi", session="s", owner="b")
        cursor = await now(fed)
        answer = await fed.call("consolidate")
        [event] = await events_since(fed, cursor)
        assert figures_of(event) == figures_of(answer)
        assert (event["moved"], event["promoted"]) == (2, 1)
        assert [view["promoted"] for view in await events_since(fed, cursor, owner="a")] == [1]
        assert [view["moved"] for view in await events_since(fed, cursor, owner="b")] == [2]


@pytest.mark.anyio
async def test_what_belongs_to_nobody_of_those_who_read_is_not_named_to_them() -> None:
    async with trial(CALM) as fed:
        cursor = await now(fed)
        [secret] = await fed.remember("secret", session="a's affair", owner="a", key="k")
        await fed.call("promote", ids=[secret], tier="semantic", owner="a")
        await fed.call("consolidate", owner="a")
        await fed.call("session/close", session="a's affair", owner="a")
        await fed.call("forget", ids=[secret], owner="a")
        assert await events_since(fed, cursor, owner="b") == []
        kinds = ["written", "promoted", "consolidated", "consolidated", "session_closed", "forgotten"]
        assert [event["kind"] for event in await events_since(fed, cursor, owner="a")] == kinds
        assert [event["kind"] for event in await events_since(fed, cursor)] == kinds


@pytest.mark.anyio
async def test_closing_for_all_names_no_conversation_of_another() -> None:
    """A close for all owners shows no reader the session of another owner."""
    async with trial(CALM) as fed:
        cursor = await now(fed)
        await fed.remember("secret", session="a's affair", owner="a")
        await fed.call("session/close", session="a's affair")
        assert of("session_closed", await events_since(fed, cursor, owner="b")) == []
        assert len(of("session_closed", await events_since(fed, cursor))) == 1


@pytest.mark.anyio
async def test_a_principal_polls_and_is_pushed_to_in_its_own_scope() -> None:
    async with trial(CALM) as fed:
        caller = Caller(asserts_owner=False, owner="a")
        async with wired(fed.federation.answer, caller=caller) as wire:
            cursor = (await wire.ask("events"))["cursor"]
            assert (await wire.ask("events", cursor=cursor, owner="b"))["code"] == Code.SCOPE_DENIED
            assert (await wire.ask("events/subscribe", owner="b"))["code"] == Code.SCOPE_DENIED
            assert await wire.ask("events/subscribe") == {"subscribed": True}
            for owner in ("a", "b", None):
                await fed.remember("one", owner=owner, session=f"{owner}'s")
            await quiet(wire)
            assert [event["session"] for event in wire.pushed] == ["a's", "None's"]
            assert (await wire.ask("events", cursor=cursor))["events"] == wire.pushed


@pytest.mark.anyio
async def test_the_federation_keeps_as_many_events_as_its_file_says() -> None:
    async with trial(settings_of("[events]\nretained = 3\n" + FOUR_TIERS, policy="explicit")) as fed:
        cursor = await now(fed)
        ids = await fed.remember(*"abc")
        assert [event["id"] for event in await events_since(fed, cursor)] == ids
        ids += await fed.remember("d")
        polled = await fed.call("events", cursor=cursor)
        assert (polled["reset"], [event["id"] for event in polled["events"]]) == (True, ids[1:])


@pytest.mark.anyio
async def test_a_cursor_of_the_router_that_was_there_before_is_reset(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        cursor = await now(fed)
        await fed.remember("one")
    async with trial(CALM, folder=tmp_path) as fed:
        polled = await fed.call("events", cursor=cursor)
        assert (polled["reset"], polled["events"]) == (True, [])
        ids = await fed.remember("two")
        assert [event["id"] for event in await events_since(fed, polled["cursor"])] == ids
        polled = await fed.call("events", cursor=cursor)
        assert (polled["reset"], [event["id"] for event in polled["events"]]) == (True, ids)


@pytest.mark.anyio
async def test_a_write_found_without_its_reservation_is_an_event(tmp_path: Path) -> None:
    """A power cut removed the reservation of a write that its tier has. The router finds the record: it is an event."""
    folder, steer = tmp_path / "before", Steered()
    folder.mkdir()
    async with trial(CALM, weather=steer, folder=folder) as fed, anyio.create_task_group() as tasks:
        written = steer.hold("semantic", "remember", after=True)
        write = Task(tasks, lambda: fed.remember("one", tier="semantic"))
        await written.reached.wait()
        left = photograph(folder, tmp_path / "after")
        written.release()
        await write.ended()
    forget_what_was_reserved(left)
    down = {"semantic"}
    async with trial(CALM, folder=left, down=down) as fed:
        cursor = await now(fed)
        down.clear()
        await joined(fed, "semantic")
        there = {record["id"] for record in await fed.timeline()}
        assert len(there) == 1
        polled = await fed.call("events", cursor=cursor)
        assert polled.get("reset") or replayed(polled["events"], ()) == there


@pytest.mark.anyio
async def test_the_federation_pushes_to_whoever_subscribed_and_after_the_answer() -> None:
    async with trial() as fed:
        answer = fed.federation.answer
        async with wired(answer) as one, wired(answer) as two:
            assert (await one.ask("describe"))["events"] == {"push": True}
            cursor = await now(fed)
            await one.ask("events/subscribe")
            await two.ask("events/subscribe", kinds=["forgotten"], owner="a")
            kept = [one.say("remember", records=[{"content": f"{n}", "session": "s", "owner": "a"}]) for n in range(9)]
            one.send()
            await two.ask("remember", records=[{"content": "b", "owner": "b"}])
            await fed.settled()
            await one.ask("forget", where={"session": "s"})
            await two.ask("forget", where={"owner": "b"})
            await quiet(one, two)
            events = await events_since(fed, cursor)
            assert one.pushed == events
            assert {"written", "consolidated", "forgotten"} == {event["kind"] for event in events}
            assert [event["count"] for event in two.pushed] == [9]
            ids = {line["id"]: line["result"]["ids"] for line in one.lines if line.get("id") in kept}
            order = [line.get("id") or line["params"].get("id") for line in one.lines]
            assert all(order.index(call) < order.index(id) for call, [id] in ids.items())


# --- one store


class Asked(msgspec.Struct, frozen=True):
    """A call to the store: drafts, each with an id, a key or neither; or a forget; or a close of a session."""

    owner: str | None
    drafts: list[Object] = []
    forget: Object = {}
    close: str | None = None


addresses = st.sampled_from([{}, {}, {"id": "x"}, {"id": "y"}, {"id": "b's"}, {"key": "k"}, {"key": "k/a"}])
store_calls = st.one_of(
    st.builds(Asked, owners, st.lists(addresses, min_size=1, max_size=3)),
    st.builds(Asked, owners, st.lists(addresses, min_size=1, max_size=3)),
    st.builds(
        Asked,
        owners,
        forget=st.sampled_from([{"ids": ["x", "y"]}, {"ids": ["b's"]}, {"key_prefix": "k"}, {"where": {"m": 1}}, {}]),
    ),
    st.builds(Asked, owners, close=st.sampled_from(["s", "t"])),
)


@examples(15)
@given(batches=st.lists(st.lists(store_calls, min_size=1, max_size=5), min_size=1, max_size=4))
def test_the_events_of_a_store_account_for_all_that_it_did(anyio_backend: str, batches: list[list[Asked]]) -> None:
    async def scenario() -> None:
        store = Store(None, clock=Clock())
        done: list[Done] = []
        async with serving(store, threads=False) as server:

            async def ask(method: str, **params: Any) -> Any:
                message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
                answer = json.loads(await server(msgspec.json.encode(message), LOCAL) or b"")
                done.append(Done(method, params, answer.get("result")))
                return answer.get("result")

            cursor = (await ask("events"))["cursor"]
            await ask("remember", records=[{"id": "b's", "content": "", "session": "n0"}], owner="b")
            number = 0
            for batch in batches:
                calls = []
                for asked in batch:
                    number += 10
                    calls.append(store_call(ask, asked, number))
                await at_once(*calls)
            everything = (await ask("events", cursor=cursor))["events"]
            check_store(done, everything)
            there = {record["id"] for record in (await ask("timeline"))["records"]}
            assert replayed(everything, ()) == there
            # A record's owner is that of the write with its session.
            owner = {
                record["session"]: call.params.get("owner")
                for call in done
                if call.method == "remember"
                for record in call.params["records"]
            }
            for reader in "ab":
                seen = (await ask("events", cursor=cursor, owner=reader))["events"]
                assert of("written", seen) == [
                    event for event in of("written", everything) if owner[event["session"]] in (None, reader)
                ]
                assert [event for event in of("forgotten", seen) if event["count"]] == forgotten_of(
                    reader, everything, owner
                )
        store.close()

    anyio.run(scenario, backend=anyio_backend)


def forgotten_of(reader: str, events: Iterable[Object], owner: Mapping[str, str | None]) -> list[Object]:
    """Return the forget events as a reader must see them: with the records that it could recall."""
    whose: dict[str, str | None] = {}
    told = []
    for event in events:
        if event["kind"] == "written":
            whose[event["id"]] = owner[event["session"]]
        elif event["kind"] == "forgotten":
            ids = [id for id in event["ids"] if whose[id] in (None, reader)]
            told += [{**event, "count": len(ids), "ids": ids}] if ids else []
    return told


def store_call(ask: Callable[..., Awaitable[Any]], asked: Asked, number: int) -> Callable[[], Awaitable[Any]]:
    owner = {} if asked.owner is None else {"owner": asked.owner}
    if asked.drafts:
        records = [
            {"content": f"{number + n}", "session": f"n{number + n}", "metadata": {"m": n}, **draft}
            for n, draft in enumerate(asked.drafts)
        ]
        return partial(ask, "remember", records=records, **owner)
    if asked.close is not None:
        return partial(ask, "session/close", session=asked.close, **owner)
    return partial(ask, "forget", **asked.forget, **owner)


def check_store(done: Sequence[Done], events: list[Object]) -> None:
    """Check that each new record, each forget and each close has one event, and that failed calls have none."""
    answered = [call for call in done if call.answer is not None]
    told = [event["session"] for event in of("written", events)]
    assert len(set(told)) == len(told)
    drafts = [record for call in answered if call.method == "remember" for record in call.params["records"]]
    assert {draft["session"] for draft in drafts if "id" not in draft} <= set(told)
    assert set(told) <= {draft["session"] for draft in drafts}
    keys = {draft["session"]: draft.get("key") for draft in drafts}
    assert [event.get("key") for event in of("written", events)] == [keys[session] for session in told]
    forgotten = Counter(call.answer["forgotten"] for call in answered if call.method == "forget")
    assert Counter(event["count"] for event in of("forgotten", events)) == forgotten
    closed = Counter(call.params["session"] for call in answered if call.method == "session/close")
    assert Counter(event["session"] for event in of("session_closed", events)) == closed
    assert [figures_of(event) for event in of("consolidated", events)] == [(0, 0, 0, 0)] * closed.total()


@pytest.mark.anyio
async def test_a_batch_of_which_one_call_is_undone_tells_the_others_once() -> None:
    store = Store(None, clock=Clock())
    async with serving(store, threads=False) as server, wired(server) as wire:
        await wire.ask("remember", records=[{"id": "b's", "content": "b"}], owner="b")
        await wire.ask("events/subscribe")
        cursor = (await wire.ask("events"))["cursor"]
        first = wire.say("remember", records=[{"id": "one", "content": "1"}])
        wrong = wire.say("remember", records=[{"id": "two", "content": "2"}, {"id": "b's", "content": "x"}], owner="a")
        last = wire.say("remember", records=[{"id": "three", "content": "3"}])
        wire.send()
        await quiet(wire)
        assert next(line["error"]["code"] for line in wire.lines if line.get("id") == wrong) == Code.SCOPE_DENIED
        assert [event["id"] for event in wire.pushed] == ["one", "three"]
        order = [line.get("id") or line["params"]["id"] for line in wire.lines]
        assert order.index(first) < order.index("one")
        assert order.index(last) < order.index("three")
        assert (await wire.ask("events", cursor=cursor))["events"] == wire.pushed
    store.close()
