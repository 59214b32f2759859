"""Recorded runs of the real router, checked against the explorer's model: every run must be a path of the model.

Each run has the router, its links, its catalog and two stores. One call is held at a step while the other event of the
test's name happens.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.active_reads import ActiveReads
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.records import Records
from a2m_router.placement import moves
from a2m_router.placement.delivering import Delivering
from a2m_router.placement.reconciler import Reconciler
from a2m_router.placement.steps import MOVE
from a2m_router.placement.steps import Step as MoveStep
from a2m_router.tiers.gateway import TierGateway
from tests.support.catalogs import strays_left
from tests.support.clocks import simulated
from tests.support.crashes import photograph, write_one
from tests.support.federated import CALM, Foreign, Steered, Task, Trial, contents, disconnect, held_by, plant, trial
from tests.verification.explorer.accounts import A, B
from tests.verification.explorer.recording import TWO_TIERS, Followed, Left, Recorder
from tests.verification.explorer.recording import record as recording
from tests.verification.explorer.states import Scenario

pytestmark = pytest.mark.anyio

Act = Callable[[Trial], Awaitable[None]]
Step = tuple[str, str, bool]

# Seconds; longer than a call to a tier may take. A hang becomes a failure.
PATIENCE = 90.0


def name_of(step: Step) -> str:
    tier, method, after = step
    return f"{'after' if after else 'before'} {method} in {tier}"


# Every call of a move, held before it reaches the tier and after it is done.
CALLS = [
    *(("source", "recall", False), ("source", "recall", True)),
    *(("target", "remember", False), ("target", "remember", True)),
    *(("target", "recall", False), ("target", "recall", True)),
]
SWEEPING = [("source", "forget", False), ("source", "forget", True)]
WRITING = [("source", "remember", False), ("source", "remember", True)]
REPLACING = [*WRITING, ("source", "recall", False), ("source", "recall", True)]


def record(content: str, **fields: Any) -> dict[str, Any]:
    return {"id": content[0], "content": content, "group": "g", "tier": "source", **fields}


async def move(fed: Trial) -> None:
    await fed.call("promote", ids=["a"], tier="target")


async def forget_a(fed: Trial) -> None:
    await fed.call("forget", ids=["a"])


async def forget_b(fed: Trial) -> None:
    await fed.call("forget", ids=["b"])


async def replace_a(fed: Trial) -> None:
    await fed.call("remember", records=[{"content": "a2", "key": "k", "group": "g"}])


async def replace_a_and_move(fed: Trial) -> None:
    await replace_a(fed)
    await move(fed)


async def replace_a_again(fed: Trial) -> None:
    await fed.call("remember", records=[{"content": "a3", "key": "k", "group": "g"}])


async def replace_a_and_write_c(fed: Trial) -> None:
    await fed.call("remember", records=[{"content": "a2", "key": "k", "group": "g"}, record("c1")])


async def late(fed: Trial) -> None:
    await fed.call("remember", records=[record("c1")])


async def read(fed: Trial) -> None:
    await fed.call("recall", query="a1 b1")


async def at_rest(fed: Trial) -> None:
    """Wait until no work is left. It takes no claims, which the reconciler could run into."""
    catalog = fed.federation.catalog
    with anyio.fail_after(PATIENCE):
        await fed.federation.reconciler.idle()
        # No event reports that the last claim was released, the last stray deleted and the last pending write done.
        while strays_left(catalog) or catalog.pending.is_open() or catalog.claims._waiting:  # noqa: ASYNC110
            await anyio.sleep(0.01)


class Run:
    """A recorded router with two records and a call that is held at a step.

    It raises Left at the end if the run has left the model.
    """

    def __init__(self, patch: pytest.MonkeyPatch, scenario: Scenario, folder: Path | None = None) -> None:
        self.steer = Steered()
        self.down: set[str] = set()
        self.recorder = Recorder(Followed(scenario), self.steer)
        self.folder = folder
        recording(self.recorder, patch.setattr)

    async def __call__(
        self,
        act: Act,
        step: Step,
        *,
        meets: Act | None = None,
        while_held: Callable[[Trial, Task], Awaitable[None]] | None = None,
    ) -> None:
        async with (
            trial(TWO_TIERS, weather=self.recorder, down=self.down, folder=self.folder) as fed,
            anyio.create_task_group() as tasks,
        ):
            await fed.call("remember", records=[record("a1", key="k"), record("b1")])
            await at_rest(fed)
            self.recorder.fed = fed
            with anyio.fail_after(PATIENCE), self.recorder.listening():
                tier, method, after = step
                hold = self.steer.hold(tier, method, after=after)
                task = Task(tasks, lambda: act(fed))
                await hold.reached.wait()
                other = None if meets is None else Task(tasks, lambda: meets(fed))
                await wait_all_tasks_blocked()
                if while_held is not None:
                    await while_held(fed, task)
                hold.release()
                await task.settled()
                if other is not None:
                    await other.settled()
                await at_rest(fed)
        self.ends()

    async def crashes(self, act: Act, step: Step, folder: Path) -> None:
        """Crash the router at the step, and start the next one with the files of that moment."""
        self.folder = folder / "before"
        self.folder.mkdir()

        async def dies(fed: Trial, task: Task) -> None:
            photograph(folder / "before", folder / "after")
            self.recorder.dies()

        await self(act, step, while_held=dies)
        self.recorder.starts_again()
        with self.recorder.listening():
            async with trial(TWO_TIERS, weather=self.recorder, folder=folder / "after") as fed:
                self.recorder.fed = fed
                await at_rest(fed)
        self.ends(at_rest=True)

    def ends(self, *, at_rest: bool = False) -> None:
        if self.recorder.wrong is not None:
            raise self.recorder.wrong
        if at_rest or self.recorder.fed is not None:
            assert self.recorder.followed.rests()


MEETINGS: dict[str, tuple[Scenario, Act | None]] = {
    "nothing": (Scenario(name="a move"), None),
    "a forget": (Scenario(name="a move, a forget", forgets=B), forget_b),
    "a replacement": (Scenario(name="a move, a replacement", replaces=1), replace_a),
    "a batch": (Scenario(name="a move, a batch", replaces=1, batch=True), replace_a_and_write_c),
    "a late member": (Scenario(name="a move, a late member", late=True), late),
    "a read": (Scenario(name="a move, a read", reads=1), read),
}


@pytest.mark.parametrize("step", [*CALLS, *SWEEPING], ids=name_of)
@pytest.mark.parametrize("meeting", MEETINGS)
async def test_a_move_and_what_it_meets_are_a_path_of_the_model(
    monkeypatch: pytest.MonkeyPatch, meeting: str, step: Step
) -> None:
    scenario, meets = MEETINGS[meeting]
    await Run(monkeypatch, scenario)(move, step, meets=meets)


WHILE_CATCHING_UP: dict[str, tuple[Scenario, Act]] = {
    "a move": (Scenario(name="a replacement, a move", replaces=1), move),
    "a forget": (Scenario(name="a replacement, a forget", moves=(), replaces=1, forgets=A), forget_a),
    "a late member": (Scenario(name="a replacement, a late member", moves=(), replaces=1, late=True), late),
    "a read": (Scenario(name="a replacement, a read", moves=(), replaces=1, reads=1), read),
    "another replacement": (Scenario(name="two replacements", moves=(), replaces=2), replace_a_again),
}


@pytest.mark.parametrize("step", REPLACING, ids=name_of)
@pytest.mark.parametrize("meeting", WHILE_CATCHING_UP)
async def test_a_tier_that_catches_up_and_what_it_meets_are_a_path_of_the_model(
    monkeypatch: pytest.MonkeyPatch, meeting: str, step: Step
) -> None:
    scenario, meets = WHILE_CATCHING_UP[meeting]
    await Run(monkeypatch, scenario)(replace_a, step, meets=meets)


async def test_a_replacement_during_a_read_is_a_path_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(name="a read, a replacement", moves=(), reads=1, replaces=1)
    await Run(monkeypatch, scenario)(read, ("source", "recall", True), meets=replace_a)


async def test_a_move_during_a_read_is_a_path_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(name="a read, a move", reads=1)
    await Run(monkeypatch, scenario)(read, ("source", "recall", True), meets=move)


# Every call that changes something: its scenario, and the steps at which it can be held.
CHANGING: dict[str, tuple[Scenario, Act, list[Step]]] = {
    "a move": (Scenario(name="a move"), move, [*CALLS, *SWEEPING]),
    "a late write": (Scenario(name="a late write", moves=(), late=True), late, WRITING),
    "a replacement": (Scenario(name="a replacement", moves=(), replaces=1), replace_a, REPLACING),
    "a batch": (Scenario(name="a batch", moves=(), replaces=1, batch=True), replace_a_and_write_c, REPLACING),
    "a forget": (Scenario(name="a forget", moves=(), forgets=B), forget_b, SWEEPING),
}
STOPPED = [(change, step) for change, (_, _, steps) in CHANGING.items() for step in steps]


def stopped(change_and_step: tuple[str, Step]) -> str:
    change, step = change_and_step
    return f"{change}, {name_of(step)}"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("at", STOPPED, ids=stopped)
async def test_what_a_crash_leaves_is_put_right_as_in_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: tuple[str, Step]
) -> None:
    change, step = at
    scenario, act, _ = CHANGING[change]
    await Run(monkeypatch, msgspec.structs.replace(scenario, crashes=1)).crashes(act, step, tmp_path)


@simulated
@pytest.mark.parametrize("at", STOPPED, ids=stopped)
async def test_a_call_that_lands_late_is_met_as_in_the_model(
    monkeypatch: pytest.MonkeyPatch, at: tuple[str, Step]
) -> None:
    change, step = at
    scenario, act, _ = CHANGING[change]

    async def given_up(fed: Trial, task: Task) -> None:
        await task.settled()
        # After a timeout the reconciler skips the records on which the call in doubt still has a claim.
        await fed.federation.reconciler.idle()

    await Run(monkeypatch, msgspec.structs.replace(scenario, timeouts=1))(act, step, while_held=given_up)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("at", STOPPED, ids=stopped)
async def test_an_outage_is_met_as_in_the_model(monkeypatch: pytest.MonkeyPatch, at: tuple[str, Step]) -> None:
    change, step = at
    scenario, act, _ = CHANGING[change]
    run = Run(monkeypatch, msgspec.structs.replace(scenario, outages=1))

    async def lost(fed: Trial, task: Task) -> None:
        disconnect(fed, step[0])
        await wait_all_tasks_blocked()

    await run(act, step, while_held=lost)


# --- a router with a defect leaves the model


async def nothing(*_: Any) -> dict[str, Any]:
    """Replace a step: do nothing and return an empty dict."""
    return {}


async def seen_unread(self: Reconciler, entries: Any, tier: str) -> tuple[dict[str, Any], None]:
    return {entry.id: None for entry in entries}, None


_commit_write = Catalog.commit_write


def without_redo(self: Catalog, new: Any, replacements: Any, vectors: Any, redo: Any) -> Any:
    return _commit_write(self, new, replacements, vectors)


_write = Delivering.write


async def as_all_of_the_batch(self: Delivering, written: Any, *, are_all: bool) -> Any:
    return await _write(self, written, are_all=True)


def before_it_is_told(self: Catalog, new: Any, replacements: Any, vectors: Any, redo: Any) -> Any:
    lost = _commit_write(self, new, replacements, vectors, redo)
    self.end_pending(self.records.find(redo).values(), vectors)
    return lost


OTHERWISE: dict[str, tuple[Any, str, Any, Scenario, Act, Act | None, Step]] = {
    "copies that are not noted": (
        *(Catalog, "note_copies", lambda *_: None),
        *(Scenario(name="a move"), move, None, ("target", "remember", True)),
    ),
    "notes that are not durable": (
        *(moves, "MOVE", [[step for step in row if step != MoveStep.SYNC] for row in MOVE]),
        *(Scenario(name="a move"), move, None, ("target", "remember", True)),
    ),
    "a reconciler that does not wait for readers": (
        *(ActiveReads, "grace", nothing),
        *(Scenario(name="a read, a move", reads=1), read, move, ("source", "recall", True)),
    ),
    "a flip of what has changed": (
        *(Records, "unchanged", lambda _, unit: [entry for entry in unit if entry.id == "a"]),
        *(Scenario(name="a move, a forget", forgets=B), move, forget_b, ("target", "remember", True)),
    ),
    "copies that are not read back": (
        *(TierGateway, "unkept", nothing),
        *(Scenario(name="a move"), move, None, ("target", "remember", True)),
    ),
    "a replacement that no tier has to catch up with": (
        *(Catalog, "commit_write", without_redo),
        *(Scenario(name="a replacement, a move", replaces=1), replace_a_and_move, None, ("source", "recall", False)),
    ),
    "a catalog that lets go before the tier is told": (
        *(Catalog, "commit_write", before_it_is_told),
        *(Scenario(name="a replacement, a move", replaces=1), replace_a_and_move, None, ("source", "recall", False)),
    ),
    "a replacement that is not read back": (
        *(TierGateway, "unkept", nothing),
        *(Scenario(name="a replacement", moves=(), replaces=1), replace_a, None, ("source", "remember", True)),
    ),
    "a catalog that lets go while somebody reads": (
        *(ActiveReads, "grace", nothing),
        *(Scenario(name="a read, a replacement", moves=(), reads=1, replaces=1), read),
        *(replace_a, ("source", "recall", True)),
    ),
    "a batch that may become half true after a power cut": (
        *(Delivering, "write", as_all_of_the_batch),
        *(Scenario(name="a batch", moves=(), replaces=1, batch=True), replace_a_and_write_c),
        *(None, ("source", "remember", False)),
    ),
    "a reconciler that does not read records at home": (
        *(Reconciler, "_seen_at_home", seen_unread),
        *(Scenario(name="a move"), move, None, ("source", "forget", True)),
    ),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("otherwise", OTHERWISE)
async def test_a_router_that_does_otherwise_leaves_the_model(monkeypatch: pytest.MonkeyPatch, otherwise: str) -> None:
    owner, name, instead, scenario, act, meets, step = OTHERWISE[otherwise]
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(Left):
        await Run(monkeypatch, scenario)(act, step, meets=meets)


# --- defects that the explorer found, as a client sees them


async def test_a_tier_gets_a_pending_write_once_no_earlier_call_can_land() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        await write_one(fed)
        reconciler = fed.federation.reconciler
        # As after a crash: a call in progress may be an earlier replacement of the same record.
        reconciler.hold("working", 3600.0)
        steer.seen.clear()
        await fed.remember("two", key="k")
        await wait_all_tasks_blocked()
        assert contents(await fed.timeline()) == {"two": "working"}
        assert not any(b"two" in message for _, message in steer.seen)
        reconciler.hold("working", 0.0)
        await fed.settled()
        assert [record["content"] for record in held_by(fed.stores["working"])] == ["two"]


async def test_a_tier_that_catches_up_during_a_scan_has_lost_no_record(tmp_path: Path) -> None:
    """A scan during a pending write may miss the record once. The catalog keeps the record."""
    servers = {"working": Foreign()}
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer, folder=tmp_path) as fed:
        await write_one(fed)
        steer.refuse("working", "forget")
        await fed.remember("two", key="k")
        plant(fed, "working", id="z", content="of which nothing is accounted for")
    steer = Steered()
    seen_gone = steer.hold("working", "recall", after=True, having=b'"x"')
    not_found = steer.hold("working", "recall", after=True, having=b'"x"')

    async def catch_up_while_it_is_scanned() -> None:
        await seen_gone.reached.wait()
        await not_found.reached.wait()
        seen_gone.release()
        await wait_all_tasks_blocked()
        not_found.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(catch_up_while_it_is_scanned)
        async with trial(CALM, servers=servers, weather=steer, folder=tmp_path) as fed:
            await fed.settled()
            assert (await fed.call("fetch", key="k"))["record"]["content"] == "two"
