"""A round: load, deaths at seeded moments, the end of the federation, and the verdict."""

import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import msgspec

from a2m_router.protocol.wire.records import Record
from tests.verification.kill.account import Wrong
from tests.verification.kill.clients import Client
from tests.verification.kill.processes import TIERS, Processes

CLIENTS: Final = 4
STEPS: Final = 60  # of each client
DEATHS: Final = 3
# the most seconds between the call that a death waits for and the death; a call takes about that long
_LATEST: Final = 0.03
# the share of rounds in which a file is put back at the end
_PUT_BACK: Final = 0.4
# the router gives up a call to a tier after a second
_LONGEST_HANG: Final = 1.6


class Round(msgspec.Struct):
    """The result of a round. `wrong` is the finding, None if there is none."""

    seed: int
    wrong: str | None = None
    seconds: float = 0.0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    deaths: Counter[str] = msgspec.field(default_factory=Counter)
    records: int = 0
    longest_orphan: float = 0.0


class Death(msgspec.Struct, frozen=True):
    """A fault that begins `delay` seconds after the start of call number `call`."""

    call: int
    delay: float
    what: str
    victims: tuple[str, ...]
    seconds: float = 0.0


def deaths_of(chance: random.Random) -> list[Death]:
    """Draw the faults of a round."""
    deaths = []
    for call in sorted(chance.sample(range(5, CLIENTS * STEPS * 3 // 4), DEATHS)):
        delay = chance.uniform(0, _LATEST)
        what = chance.choices(("router", "store", "several", "hang", "restart"), (35, 25, 20, 15, 5))[0]
        tier = chance.choice(TIERS)
        if what == "several":
            victims = ["router", *chance.sample(TIERS, chance.randint(1, len(TIERS)))]
            chance.shuffle(victims)
            deaths.append(Death(call, delay, what, tuple(victims)))
        elif what == "hang":
            deaths.append(Death(call, delay, what, (tier,), chance.uniform(0.1, _LONGEST_HANG)))
        else:
            deaths.append(Death(call, delay, what, (tier,) if what == "store" else ("router",)))
    return deaths


def run_round(seed: int, folder: Path, *, before: Sequence[str] = ()) -> Round:
    """Play one round on files in an existing folder.

    Args:
        before: is put before the command of each store, for tests that cause a fault.
    """
    result = Round(seed)
    began = time.monotonic()
    with (folder / "history").open("w") as history:

        def tell(what: str) -> None:
            history.write(f"{time.monotonic() - began:8.3f} {what}\n")

        try:
            anyio.run(_round, result, folder, tell, before)
        except* Wrong as problems:
            result.wrong = " | ".join(_sentences(problems))
            tell(f"WRONG: {result.wrong}")
    result.seconds = time.monotonic() - began
    return result


async def _round(result: Round, folder: Path, tell: Callable[[str], None], before: Sequence[str]) -> None:
    chance = random.Random(f"kill {result.seed}")
    owners = [f"c{number}" for number in range(CLIENTS)]
    http = chance.random() < 0.3
    remote = chance.choice(TIERS) if chance.random() < 0.25 else None
    processes = Processes(folder, owners, http=http, remote=remote, tell=tell, before=before)
    deaths = deaths_of(chance)
    last = chance.choice((("router",), ("router", "episodic"), ()))
    tell(f"door: {'HTTP' if http else 'pipes'}; a server of its own: {remote}; then {last or 'SIGTERM'}; {deaths}")
    moments = [anyio.Event() for _ in deaths]
    calls = 0

    def count_call() -> None:
        nonlocal calls
        calls += 1
        for death, moment in zip(deaths, moments, strict=True):
            if calls >= death.call:
                moment.set()

    clients = [
        Client(owner, processes, random.Random(f"kill {result.seed} {owner}"), count_call, tell) for owner in owners
    ]
    async with processes.running():
        async with anyio.create_task_group() as dying:
            for death, moment in zip(deaths, moments, strict=True):
                dying.start_soon(_die, processes, death, moment, result)
            async with anyio.create_task_group() as working:
                for client in clients:
                    working.start_soon(client.run, STEPS)
            for moment in moments:  # of faults for which there were too few calls
                moment.set()
        tell("the clients are done")
        # one more router, which has to repair what its predecessors have left
        if last:
            await processes.kill(last)
        else:
            await processes.terminate()
        await processes.settled()
        tell("all has settled")
        shown = {client: await client.check_everything() for client in clients}
        ages = random.Random(f"kill {result.seed} ages")
        set_back = ages.random() < _PUT_BACK
        # never both: a catalog rebuilt from an old one cannot know what an older store had acknowledged last
        if not set_back and ages.random() < _PUT_BACK / (1 - _PUT_BACK):
            shown = await _put_back_a_catalog(processes, clients, ages, result)
        check_files(folder, [record for there in shown.values() for record in there])
        if set_back:
            shown = await _put_back_a_store(processes, clients, ages, result)
        await processes.end()
    for client in clients:
        result.outcomes += client.outcomes
    result.longest_orphan = processes.longest_orphan
    records = [record for there in shown.values() for record in there]
    result.records = len(records)
    if not set_back:
        check_files(folder, records)
    if processes.tracebacks:
        raise Wrong(f"{processes.tracebacks} tracebacks on stderr")


async def _put_back_a_catalog(
    processes: Processes, clients: Sequence[Client], ages: random.Random, result: Round
) -> dict[Client, list[Record]]:
    """Put a catalog of random age in the place of the present one; assert that each client has all its records."""
    _, copies = ages.choice([copy for copy in processes.copies if not _is_redoing(copy[1]["router"])] or [(0, {})])
    if "router" in copies:
        await processes.put_back("router", copies["router"])
        result.deaths["catalog put back"] += 1
        await processes.settled()
    return {client: await client.check_everything() for client in clients}


async def _put_back_a_store(
    processes: Processes, clients: Sequence[Client], ages: random.Random, result: Round
) -> dict[Client, list[Record]]:
    """Put a store's file of random age in the place of the present one.

    Records that the store got since may be missing, and records that left it since may be back. No other record may be
    missing, and none may be shown with an old content.
    """
    before = {record.id: record for client in clients for record in await client.everything()}
    _, copies = ages.choice(processes.copies)
    tier = ages.choice([name for name in copies if name != "router"])
    await processes.put_back(tier, copies[tier])
    result.deaths["store put back"] += 1
    await processes.settled()
    shown = {client: await client.everything() for client in clients}
    after = {record.id: record for records in shown.values() for record in records}
    missing = [id for id, record in before.items() if id not in after and record.tier != tier]
    altered = [id for id, record in after.items() if id in before and record.content != before[id].content]
    if missing or altered:
        raise Wrong(f"{tier} was put back, and {missing} are gone, {altered} are as they once were")
    return shown


def _is_redoing(catalog: Path) -> bool:
    """Return whether the catalog has a pending write. A record with one that was forgotten later would be back."""
    with closing(sqlite3.connect(catalog)) as copy:
        return copy.execute("SELECT 1 FROM redo").fetchone() is not None


async def _die(processes: Processes, death: Death, moment: anyio.Event, result: Round) -> None:
    await moment.wait()
    await anyio.sleep(death.delay)
    result.deaths[death.what] += 1
    match death.what:
        case "hang":
            await processes.hang(death.victims[0], death.seconds)
        case "restart":
            await processes.terminate()
        case _:
            await processes.kill(death.victims)


def check_files(folder: Path, records: list[Record]) -> None:
    """Check that the stores' files hold exactly the records that clients saw, in the tiers named. Raises Wrong."""
    held: dict[str, list[str]] = {}
    contents: dict[str, str] = {}
    for tier in TIERS:
        with closing(sqlite3.connect(f"file:{folder / f'{tier}.db'}?mode=ro", uri=True)) as store:
            if store.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise Wrong(f"the file of {tier} is damaged")
            for id, content in store.execute("SELECT id, content FROM record"):
                held.setdefault(id, []).append(tier)
                contents[id] = content
    shown: Mapping[str, Record] = {record.id: record for record in records}
    wrong = {id: tiers for id, tiers in held.items() if id not in shown or tiers != [shown[id].tier]}
    if wrong:
        raise Wrong(f"the stores' files hold what was not shown: {wrong}; {[contents[id] for id in wrong]}")
    missing = [id for id in shown if id not in held]
    altered = [id for id, record in shown.items() if contents.get(id) != record.content]
    if missing or altered:
        raise Wrong(f"the stores' files lack {missing}, and hold other contents of {altered}")


def _sentences(problems: BaseExceptionGroup[BaseException]) -> list[str]:
    return [
        sentence
        for problem in problems.exceptions
        for sentence in (_sentences(problem) if isinstance(problem, BaseExceptionGroup) else [str(problem)])
    ]
