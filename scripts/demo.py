"""Replays a conversation through the router, as an agent would write it, and checks the result.

    scripts/demo                        the conversation beside this file
    scripts/demo --file FILE            another one
    scripts/demo --http URL             through a running router, which forgets the conversation afterwards
    scripts/demo --http URL --token T   through one with principals; the environment variable A2M_TOKEN sets T, too

It writes every turn to its session. When no record moves any more, every record must be there exactly once, in its
place, with every field as it was written, and every bucket within its capacity. Then it asks the file's questions.
Since recalls can promote records, it checks everything again.

A file is a JSON object with `turns`, each with `id`, `session`, `at` ("7:12 pm on 4 March, 2025"), `speaker`, `text`
and optionally `image`, a caption; and optionally `questions`, each with `question`, `evidence` (ids of turns) and
`answer`.
"""

import argparse
import json
import os
import sys
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import anyio
import msgspec
from msgspec import Raw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from a2m_router.config.loading import ConfigError, load
from a2m_router.config.settings import Settings
from a2m_router.process.drawing import terminal_width, wrapped
from a2m_router.protocol.client.child import CannotStart, connect_process, executable
from a2m_router.protocol.client.client import Peer, Unanswered
from a2m_router.protocol.client.http_client import connect_http
from a2m_router.protocol.server.shutdown import until_signalled
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.method_params import (
    Consolidate,
    Describe,
    Forget,
    Params,
    Recall,
    Remember,
    SessionList,
    Timeline,
)
from a2m_router.protocol.wire.records import Draft, Record
from a2m_router.protocol.wire.timestamps import render

_HERE: Final = Path(__file__).resolve().parent
_CALL_SECONDS: Final = 60.0
_PATIENCE_SECONDS: Final = 30.0  # for a tier that is down
_SETTLING_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.5
_WRITERS: Final = 16  # sessions that are written at the same time
_SHOWN: Final = 3  # answers printed for a question
_LIMIT: Final = 10  # answers requested
_WIDTH: Final = 76  # characters printed of an answer
_MOST_FAULTS: Final = 20
_SHORTEST_BAR: Final = 5  # cells

T = TypeVar("T")


class Trouble(Exception):
    """The demonstration failed; the message is one sentence that says why."""


# --- the conversation


class Turn(msgspec.Struct):
    id: str
    session: str
    at: str
    speaker: str
    text: str
    image: str | None = None

    @property
    def content(self) -> str:
        return f"{self.text} [shares a photo: {self.image}]" if self.image else self.text


class Question(msgspec.Struct):
    question: str
    evidence: list[str] = []
    answer: str | float | None = None


class Conversation(msgspec.Struct):
    turns: list[Turn]
    questions: list[Question] = []


def read_conversation(path: Path) -> Conversation:
    """Return the conversation in a file, with its turns in order of time. Raises Trouble."""
    try:
        conversation = msgspec.json.decode(path.read_bytes(), type=Conversation)
        dated = [(_moment(turn), turn) for turn in conversation.turns]
    except OSError as problem:
        raise Trouble(f"{path} cannot be read: {problem.strerror}") from None
    except msgspec.ValidationError as problem:
        raise Trouble(f"{path} is not a conversation: {problem}") from None
    except msgspec.DecodeError as problem:
        raise Trouble(f"{path} is not JSON: {problem}") from None
    except ValueError as problem:
        raise Trouble(f"{path} is not a conversation: {problem}") from None
    twice = [id for id, times in Counter(turn.id for turn in conversation.turns).items() if times > 1]
    if not dated or twice:
        what = f"two turns have the id {twice[0]!r}" if twice else "it has no turns"
        raise Trouble(f"{path} is not a conversation: {what}")
    dated.sort(key=lambda each: each[0])
    return Conversation([turn for _, turn in dated], conversation.questions)


def _moment(turn: Turn) -> int:
    """Return the time of a turn, as UTC, in milliseconds since 1970."""
    try:
        return int(datetime.strptime(turn.at, "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC).timestamp()) * 1000
    except ValueError:
        raise ValueError(f'turn {turn.id!r}: at: expected "7:12 pm on 4 March, 2025", got {turn.at!r}') from None


class Replay:
    """The records to write, in order, with new ids and sessions. `turn_of` maps their ids to the file's turns.

    Args:
        owned: the router has principals, so it gives the records, written without an owner, the caller's.
    """

    def __init__(self, conversation: Conversation, *, owned: bool = False) -> None:
        self.owned = owned
        mark = os.urandom(4).hex()
        speakers = list(dict.fromkeys(turn.speaker for turn in conversation.turns))
        self.drafts: list[Draft] = []
        self.turn_of: dict[str, Turn] = {}
        last = 0
        for turn in conversation.turns:
            last = max(_moment(turn), last + 1)  # turns of one session share a time, but must keep their order
            draft = Draft(
                id=f"demo-{mark}/{turn.id}",
                content=turn.content,
                created_at=render(last),
                role=("user", "assistant")[speakers.index(turn.speaker) % 2],
                metadata=_metadata(turn),
                session=f"demo-{mark}/{turn.session}",
            )
            self.drafts.append(draft)
            self.turn_of[str(draft.id)] = turn
        self.sessions: dict[str, list[Draft]] = {}
        for draft in self.drafts:
            self.sessions.setdefault(str(draft.session), []).append(draft)

    @property
    def only(self) -> dict[str, Raw]:
        """The `where` that selects only this replay."""
        return {"session": Raw(msgspec.json.encode(list(self.sessions)))}


def _metadata(turn: Turn) -> Raw:
    # with spaces and non-ASCII characters: the router must keep any bytes
    return Raw(json.dumps({"speaker": turn.speaker, "turn": turn.id, "at": turn.at}, ensure_ascii=False).encode())


# --- the router


class Tier(msgspec.Struct):
    name: str
    count: int
    status: str = "up"
    reason: str | None = None
    capacity: int | None = None
    per_session: bool = False
    mount: bool = False


class Described(msgspec.Struct):
    name: str
    capabilities: list[str]
    tiers: list[Tier] = []


class Consolidated(msgspec.Struct):
    moved: int
    promoted: int


class Degraded(msgspec.Struct):
    tier: str
    reason: str


class Records(msgspec.Struct):
    records: list[Record]
    degraded: list[Degraded] = []


class Session(msgspec.Struct):
    session: str
    tiers: dict[str, int] = {}


class Sessions(msgspec.Struct):
    sessions: list[Session]


class Written(msgspec.Struct):
    ids: list[str]


class Forgotten(msgspec.Struct):
    forgotten: int


class Router:
    """The router with the calls of this demonstration. Every failure raises Trouble."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._mounts: frozenset[str] = frozenset()

    async def call(self, method: str, params: Params, answer: type[T]) -> T:
        """Return the answer; retry a call for a while if its error has `retry_after`."""
        until = time.monotonic() + _PATIENCE_SECONDS
        try:
            while True:
                try:
                    raw = await self._peer.call(method, params, timeout=_CALL_SECONDS)
                except A2MError as error:
                    retry_after = (error.data or {}).get("retry_after")
                    if retry_after is None or time.monotonic() > until:
                        raise Trouble(f"{method} failed with {error.code}: {error.message}") from None
                    await anyio.sleep(max(retry_after, 0.1))
                else:
                    return msgspec.json.decode(raw, type=answer)
        except Unanswered as problem:
            raise Trouble(f"the router did not answer {method}: {problem.reason}") from None
        except msgspec.MsgspecError as problem:
            raise Trouble(f"the answer to {method} cannot be read: {problem}") from None

    async def read(self, method: str, params: Params) -> list[Record]:
        answer = await self.call(method, params, Records)
        for missing in (each for each in answer.degraded if each.tier not in self._mounts):
            raise Trouble(f"the answer to {method} is without the tier {missing.tier!r}: {missing.reason}")
        return answer.records

    async def tiers(self) -> dict[str, Tier]:
        """Return all tiers except mounts, which hold no part of a conversation, and may be down."""
        described = await self.call("memory/describe", Describe(), Described)
        lacking = {"tiers", "sessions"}.difference(described.capabilities)
        if lacking:
            raise Trouble(f"{described.name!r} does not declare {' and '.join(sorted(lacking))}; is it a router?")
        self._mounts = frozenset(tier.name for tier in described.tiers if tier.mount)
        return {tier.name: tier for tier in described.tiers if not tier.mount}


@asynccontextmanager
async def own_router(config: Path) -> AsyncIterator[Peer]:
    """Start a router on `config`, on its standard streams. Raises CannotStart."""
    command = [executable("a2m-router", config.parent), "--config", str(config), "--log-level", "warning"]
    async with connect_process(command, name="a2m-router", on_stderr=_to_stderr, cwd=config.parent) as peer:
        yield peer


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def put_in(folder: Path, federation: Path) -> Path:
    """Copy a federation's file to `folder`, so that all of its memories are there, too. Raises Trouble.

    Mounts are left out: the conversation is never written to one, and their servers may not be available.
    """
    copy = folder.resolve() / "federation.toml"
    try:
        copy.write_bytes(without_mounts(federation.read_bytes()))
        settings = load(copy, os.environ)
    except OSError as problem:
        raise Trouble(f"{federation} cannot be read: {problem.strerror}") from None
    except ConfigError as problem:
        raise Trouble(f"{federation} cannot be used: {'; '.join(str(problem).splitlines())}") from None
    for why in _leads_outside(settings, copy.parent):
        raise Trouble(
            f"{federation} cannot be used for a trial: {why}; start a router with it and give its address with --http"
        )
    return copy


def without_mounts(federation: bytes) -> bytes:
    """Return a federation's file without its mounts; unchanged if it has none, or is not valid TOML."""
    try:
        content = tomllib.loads(federation.decode())
        tiers = content["tiers"]
        content["tiers"] = {name: tier for name, tier in tiers.items() if tier.get("mount") is not True}
    except (ValueError, KeyError, AttributeError):  # `load` reports the mistakes of the file
        return federation
    if len(content["tiers"]) == len(tiers):
        return federation
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in content.items()).encode()


def _toml(value: Any) -> str:
    """Return a value as TOML, on one line; tables inline."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case bool():
            return "true" if value else "false"
        case str():
            # not JSON's escapes for surrogates, which TOML lacks; but DEL, which JSON does not escape, must be escaped
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return str(value)


def _leads_outside(settings: Settings, folder: Path) -> Iterable[str]:
    """Yield why a trial would use real memories, or not answer on its standard streams."""
    if settings.serve.http is not None:
        yield "its router serves HTTP"
    if not settings.state.resolve().is_relative_to(folder):
        yield "its state is outside of its folder"
    for tier in settings.tiers:
        if tier.command is None:
            yield f"tiers.{tier.name} is reached by a url"
        elif not all((tier.cwd / word).resolve().is_relative_to(folder) for word in tier.command[1:]):
            yield f"tiers.{tier.name} is outside of its folder"


# --- what is shown


class Shown:
    """The progress of the writing, and the tiers that records have reached: a bar on a terminal, else lines."""

    def __init__(self, turns: int, before: Mapping[str, Tier]) -> None:
        console = Console()
        self._turns = turns
        self._before = {name: tier.count for name, tier in before.items()}
        self._terminal = console.is_terminal
        self._steps = 50 if self._terminal else 10
        self._line = ""
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
        numbers = MofNCompleteColumn(table_column=Column(no_wrap=True))
        columns = (TextColumn("writing"), bar, numbers, TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=console, disable=not self._terminal, expand=True)
        self._task = self.bar.add_task("", total=turns)
        # besides the word, the numbers and the shortest bar
        self._room = console.width - len(f"writing {turns}/{turns}") - _SHORTEST_BAR - 3

    def is_due(self, written: int) -> bool:
        return written == self._turns or written % max(self._turns // self._steps, 1) == 0

    def show(self, written: int, tiers: Mapping[str, Tier]) -> None:
        counts = {name: tier.count - self._before.get(name, 0) for name, tier in tiers.items()}
        held = _listed(counts)
        if self._terminal:
            while len(held) > self._room and counts:  # the last tiers change least
                counts.popitem()
                held = f"{_listed(counts)}, …" if counts else ""
            self.bar.update(self._task, completed=written, description=held)
            return
        line = f"{written:>6} of {self._turns} turns written: {held}"
        if line != self._line:
            print(line, flush=True)
        self._line = line


def print_line(line: str = "", indent: int = 4) -> None:
    """Print a line; on a terminal, wrapped, with the lines after the first indented."""
    print(wrapped(line, terminal_width(), indent) if sys.stdout.isatty() else line, flush=True)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing yet"


# --- writing


async def write(router: Router, replay: Replay, shown: Shown) -> None:
    """Write every turn with its own call: those of a session in order, several sessions at once."""
    written = 0
    writers = anyio.CapacityLimiter(_WRITERS)

    async def write_session(drafts: Sequence[Draft]) -> None:
        nonlocal written
        async with writers:
            for draft in drafts:
                # an interrupt waits for a write in progress, so that it can be forgotten
                with anyio.CancelScope(shield=True):
                    answer = await router.call("memory/remember", Remember(records=[draft]), Written)
                if answer.ids != [draft.id]:
                    raise Trouble(f"memory/remember returned {answer.ids} for the id {draft.id!r}")
                written += 1
                if shown.is_due(written):
                    tiers = await router.tiers()
                    shown.show(written, tiers)  # `written` may have grown during the call

    async with anyio.create_task_group() as tasks:
        for drafts in replay.sessions.values():
            tasks.start_soon(write_session, drafts)


async def settle(router: Router, shown: Callable[[Mapping[str, Tier]], None]) -> None:
    """Wait until every tier is up and a pass finds nothing to move. Raise Trouble if that takes too long."""
    tiers: Mapping[str, Tier] = {}
    with anyio.move_on_after(_SETTLING_SECONDS):
        while True:
            tiers = await router.tiers()
            moving = await router.call("memory/consolidate", Consolidate(), Consolidated)
            down = any(tier.status != "up" for tier in tiers.values())
            tiers = await router.tiers()
            shown(tiers)
            if down:
                await anyio.sleep(_POLL_SECONDS)
            elif not moving.moved and not moving.promoted:
                return
    down_ones = [f"{tier.name} is {tier.status} ({tier.reason})" for tier in tiers.values() if tier.status != "up"]
    raise Trouble(f"after {_SETTLING_SECONDS:g} s {' and '.join(down_ones) or 'records are still being moved'}")


# --- checking


class Checked(msgspec.Struct):
    """The result of a check: how many records each tier holds, and all faults."""

    homes: Counter[str]
    faults: list[str]


async def check(router: Router, replay: Replay) -> Checked:
    """Read all records back, in total, by session and by tier, and compare them with those written."""
    tiers = await router.tiers()
    records = await router.read("memory/timeline", Timeline(where=replay.only))
    homes = Counter(str(record.tier) for record in records)
    faults = _same_ids("the timeline", [str(draft.id) for draft in replay.drafts], [record.id for record in records])
    for session, drafts in replay.sessions.items():
        found = await router.read("memory/timeline", Timeline(where={"session": Raw(msgspec.json.encode(session))}))
        faults += _same_ids(f"the timeline of {session}", [str(draft.id) for draft in drafts], [r.id for r in found])
    for name in tiers:
        found = await router.read("memory/timeline", Timeline(tier=name, where=replay.only))
        here = [record.id for record in records if record.tier == name]
        faults += _same_ids(f"the timeline of the tier {name}", here, [record.id for record in found])
    faults += _differences(replay, records)
    owners = {record.owner for record in records}
    if len(owners) > 1 or (not replay.owned and owners - {None}):
        faults.append(f"the records' owners are {', '.join(sorted(map(repr, owners)))}")
    faults += await _overfull(router, replay, tiers, records)
    return Checked(homes, faults)


def _same_ids(where: str, expected: Sequence[str], found: Sequence[str]) -> list[str]:
    if expected == found:
        return []
    times = Counter(found)
    wanted = frozenset(expected)
    faults = [f"{where}: {id} is missing" for id in expected if not times[id]]
    faults += [f"{where}: {id} is there {count} times" for id, count in times.items() if count > 1]
    faults += [f"{where}: {id} does not belong there" for id in times if id not in wanted]
    return faults or [f"{where}: the order is wrong"]


def _differences(replay: Replay, records: Sequence[Record]) -> list[str]:
    written = {draft.id: draft for draft in replay.drafts}
    return [
        f"{record.id}: {field} was written as {was!r} and is {now!r}"
        for record in records
        if record.id in written
        for field, was, now in _fields(written[record.id], record)
        if was != now
    ]


def _fields(draft: Draft, record: Record) -> Iterable[tuple[str, Any, Any]]:
    """Yield each field that no move and no recall may change: its name, its written value, its current one."""
    for field in draft.__struct_fields__:
        if field == "metadata":
            yield field, _bytes(draft.metadata), _bytes(record.metadata)
        elif field not in ("tier", "salience", "owner"):
            yield field, getattr(draft, field), getattr(record, field)
    yield "salience", 1.0, record.salience


def _bytes(metadata: Raw | msgspec.UnsetType) -> bytes | None:
    return None if metadata is msgspec.UNSET else bytes(metadata)


async def _overfull(router: Router, replay: Replay, tiers: Mapping[str, Tier], records: Sequence[Record]) -> list[str]:
    """Return buckets over their capacity, and sessions whose session/list differs from the timeline."""
    faults = []
    listed = await router.call("memory/session/list", SessionList(), Sessions)
    counted = {each.session: Counter(each.tiers) for each in listed.sessions if each.session in replay.sessions}
    for session in replay.sessions:
        expected = Counter(str(record.tier) for record in records if record.session == session)
        counts = counted.get(session, Counter())
        if counts != expected:
            faults.append(f"session/list counts {dict(counts)} in {session}, the timeline {dict(expected)}")
        faults += [
            f"{session} has {counts[tier.name]} records in {tier.name}, whose capacity is {tier.capacity}"
            for tier in tiers.values()
            if tier.per_session and tier.capacity and counts[tier.name] > tier.capacity
        ]
    faults += [
        f"{tier.name} has {tier.count} records, and its capacity is {tier.capacity}"
        for tier in tiers.values()
        if tier.capacity and not tier.per_session and tier.count > tier.capacity
    ]
    return faults


def report(title: str, checked: Checked, replay: Replay) -> None:
    """Print the result of a check. Raise Trouble if there are faults."""
    if checked.faults:
        for fault in checked.faults[:_MOST_FAULTS]:
            print_line(f"MISMATCH {fault}")
        if len(checked.faults) > _MOST_FAULTS:
            print_line(f"MISMATCH and {len(checked.faults) - _MOST_FAULTS} more")
        raise Trouble(f"{title}: {len(checked.faults)} things are not as they were written")
    print_line(
        f"{title}: all {len(replay.drafts)} turns are there exactly once, in order, in all and in each of "
        f"{len(replay.sessions)} sessions; every field is as it was written; no bucket is over its capacity"
    )


# --- asking


class Found(msgspec.Struct):
    """For one question: the number of evidence turns, of those among the first ten, and among the first three."""

    of: int
    in_ten: int
    in_three: int


async def ask(router: Router, replay: Replay, questions: Sequence[Question]) -> list[Found]:
    """Ask the questions, print the best answers to each, and return the results of those that have evidence."""
    outcome = []
    for number, each in enumerate(questions, 1):
        records = await router.read("memory/recall", Recall(query=each.question, limit=_LIMIT, where=replay.only))
        answer = "" if each.answer is None else f"  (in the file: {each.answer})"
        print_line()
        print_line(f"{number}. {each.question}{answer}")
        for record in records[:_SHOWN]:
            turn = replay.turn_of[record.id]
            mark = "*" if turn.id in each.evidence else " "
            print_line(
                f"  {mark} {record.tier:<10} {turn.id:<7} {turn.speaker}: {_shortened(record.content)}", indent=8
            )
        if each.evidence:
            found = [replay.turn_of[record.id].id for record in records]
            evidence = set(each.evidence)
            outcome.append(
                Found(len(evidence), len(evidence.intersection(found)), len(evidence.intersection(found[:_SHOWN])))
            )
            print_line(f"    evidence {', '.join(each.evidence)}: {_placed(outcome[-1])}")
    return outcome


def _placed(found: Found) -> str:
    if found.in_three:
        return f"among the first {_SHOWN}"
    return f"among the first {_LIMIT}" if found.in_ten else f"not among the first {_LIMIT}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


# --- the whole


async def replay_through(router: Router, replay: Replay, questions: Sequence[Question]) -> None:
    """Write, check, ask, check again, and print a summary. Raise Trouble for any fault."""
    turns = len(replay.drafts)
    before = await router.tiers()
    shown = Shown(turns, before)
    with shown.bar:
        began = time.perf_counter()
        await write(router, replay, shown)
        writing = time.perf_counter() - began
        await settle(router, lambda tiers: shown.show(turns, tiers))
    checked = await check(router, replay)
    report("checked", checked, replay)
    found = []
    if questions:
        found = await ask(router, replay, questions)
        print_line()
        await settle(router, lambda tiers: None)
        checked = await check(router, replay)
        report("checked after the questions", checked, replay)
    print_line(f"turns      {turns} in {len(replay.sessions)} sessions")
    took = time.perf_counter() - began
    print_line(f"time       {took:.1f} s; writing {writing:.1f} s, {turns / writing:.0f} writes a second")
    print_line(f"tiers      {_listed({name: checked.homes[name] for name in before})}")
    if found:
        share = sum(each.in_ten / each.of for each in found) / len(found)
        three, ten = (sum(map(bool, hits)) for hits in zip(*((f.in_three, f.in_ten) for f in found), strict=True))
        print_line(
            f"evidence   share among the first {_LIMIT}: {share:.3f} (mean over {len(found)} questions); "
            f"at least one turn of it among the first {_LIMIT} for {ten}, among the first {_SHOWN} for {three}"
        )


async def through_own(config: Path, replay: Replay, questions: Sequence[Question]) -> None:
    async with own_router(config) as peer:
        await replay_through(Router(peer), replay, questions)


async def through_running(url: str, token: str | None, replay: Replay, questions: Sequence[Question]) -> None:
    """Replay through a running router that other clients may use, and remove the records afterwards."""
    async with connect_http(url, headers={"Authorization": f"Bearer {token}"} if token else None) as peer:
        router = Router(peer)
        await router.tiers()
        try:
            await replay_through(router, replay, questions)
        finally:
            with anyio.CancelScope(shield=True):
                await _forget(router, replay)


async def _forget(router: Router, replay: Replay) -> None:
    try:
        gone = await router.call("memory/forget", Forget(ids=[str(draft.id) for draft in replay.drafts]), Forgotten)
    except Trouble as problem:
        raise Trouble(f"the written records could not be forgotten again: {problem}") from None
    print_line(f"forgotten  {gone.forgotten} records, all that was written to this router")


async def _interruptible(run: Callable[..., Any], *arguments: Any) -> bool:
    """Run `run`; return whether it finished. False: Ctrl-C or SIGTERM interrupted it, and it has cleaned up."""
    scope = anyio.CancelScope()
    async with until_signalled(scope.cancel):
        with scope:
            await run(*arguments)
    return not scope.cancelled_caught


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0 if there was no fault, 1 if there was one, 130 if it was interrupted."""
    options = _options(arguments)
    code = 0
    try:
        conversation = read_conversation(options.file)
        replay = Replay(conversation, owned=options.token is not None)
        questions = conversation.questions[: options.questions]
        if options.http is not None:
            finished = anyio.run(_interruptible, through_running, options.http, options.token, replay, questions)
        else:
            with TemporaryDirectory(prefix="a2m-demo-") as folder:
                config = put_in(Path(folder), options.federation)
                finished = anyio.run(_interruptible, through_own, config, replay, questions)
        if not finished:
            print("demo: interrupted; nothing is left behind", file=sys.stderr)
            code = 130
    except* (Trouble, CannotStart) as problems:
        print(f"demo: {_sentence(problems)}", file=sys.stderr)
        code = 1
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.token is not None and options.http is None:
        parser.error("--token is for a running router; give its address with --http")
    if options.http is not None and options.token is None:
        options.token = os.environ.get("A2M_TOKEN") or None
    if options.token is not None and not (options.token.isascii() and options.token.isprintable()):
        parser.error("the token has characters that cannot be sent: expected printable ASCII")  # it is not quoted
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Replays a conversation through a new federation, in a temporary folder that is removed "
        "afterwards, and checks that every turn is there once, in order, unchanged. Then asks the file's questions.",
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=_HERE / "demo-conversation.json",
        metavar="F",
        help="the conversation (default: the supplied one)",
    )
    parser.add_argument("--http", type=_url, metavar="URL", help="a running router to use instead of a new one")
    parser.add_argument(
        "--token",
        metavar="T",
        help="with --http: the token of one of the router's principals (default: A2M_TOKEN, which other users of this "
        "machine cannot see)",
    )
    parser.add_argument("--questions", type=_count, metavar="N", help="ask only the first N questions")
    parser.add_argument(
        "--federation",
        type=Path,
        default=_HERE.parent / "federation.toml",
        metavar="FILE",
        help="the settings of the new federation, used without mounts (default: the supplied ones)",
    )
    return parser


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected an address such as http://127.0.0.1:8778/, got {text!r}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return int(text)


def _sentence(problem: BaseException) -> str:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return str(problem)


if __name__ == "__main__":
    sys.exit(main())
