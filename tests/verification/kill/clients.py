"""A client of a federation whose processes die: its calls, and how it evaluates each answer.

A client now and then repeats a write that got no answer, as clients with ids of their own do. The write may still be
carried out as long as the router that it was sent to lives. Until then the client does nothing else with its records.
"""

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from a2m_router.protocol.client.client import NoAnswer, Unanswered
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.records import Record
from tests.verification.kill.account import Account, Found, Version, Wrong
from tests.verification.kill.processes import TIERS, Processes

# seconds; a call on a tier over HTTP may wait half a minute for another call in doubt
TIMEOUT: Final = 3.0

WORDS: Final = ("harbour", "kernel", "lantern", "meadow", "needle", "orchard", "pilot", "quarry")
# metadata that a decoder would alter
METADATA: Final = ('{"big": 123456789012345678901234567890, "one": 1.0, "batch": "%s"}', '{"batch":"%s", "e": 1e3}')
WIDTH: Final = 8

T = TypeVar("T")


class _Ids(msgspec.Struct):
    ids: list[str]


class _Forgotten(msgspec.Struct):
    forgotten: int


class _Fetched(msgspec.Struct):
    record: Record | None = None


class Client:
    """One client, with an account of its own.

    Args:
        about_to_call: is called before each call.
        tell: writes each call and its result into the history.
    """

    def __init__(
        self,
        owner: str,
        processes: Processes,
        chance: random.Random,
        about_to_call: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.account = Account(owner)
        self.outcomes: Counter[str] = Counter()
        self._owner = owner
        self._processes = processes
        self._chance = chance
        self._about_to_call = about_to_call
        self._tell = tell
        self._count = 0
        self._keys = [f"{owner}/key/{number}" for number in range(6)]
        self._sessions = [f"{owner} session {number}" for number in range(2)]
        self._open: dict[str, int] = {}  # names that a call may still change, with its router's generation

    async def run(self, calls: int) -> None:
        """Carry out so many steps of one or two calls each. Raises Wrong for an impossible answer."""
        steps: Mapping[Callable[[], Awaitable[None]], int] = {
            self._write: 45,
            self._repeat: 20,
            self._timeline: 15,
            self._recall: 10,
            self._fetch: 7,
            self._forget_ids: 6,
            self._forget_batch: 3,
            self._forget_key: 3,
            self._promote: 6,
            self._close: 3,
            self._consolidate: 1,
        }
        for _ in range(calls):
            [step] = self._chance.choices(list(steps), list(steps.values()))
            await step()

    async def check_everything(self) -> list[Record]:
        """Return the records of this client after all has settled. Raises Wrong for an impossible answer."""
        found = await self._ask_for_everything()
        self.account.check(found, all_of_it=True)
        return found.records

    async def everything(self) -> list[Record]:
        """Return the records that the router shows to this client, without a check."""
        return (await self._ask_for_everything()).records

    async def _ask_for_everything(self) -> Found:
        found = await self._ask("timeline", Found, limit=1000, embeddings=True)
        if not isinstance(found, Found):
            raise Wrong(f"{self._owner}: the last timeline fails: {found!r}")
        return found

    # --- steps

    async def _write(self) -> None:
        batch = self._next("b")
        kind = self._chance.choice(("ids", "ids", "new", "keys", "group", "mixed"))
        size = self._chance.randint(2, 4) if kind in ("group", "mixed") else self._chance.randint(1, 3)
        tier = self._chance.choice((None, None, *TIERS))
        taken: set[str] = set()
        versions = []
        for _ in range(size):
            version = self._version(batch, kind if kind != "mixed" else self._chance.choice(("ids", "new", "keys")))
            if version.name not in taken and self._is_free(version.name):
                taken.add(version.name)
                versions.append(version)
        for version in versions:
            spread = self._chance.choice(TIERS) if kind == "mixed" else tier
            if spread is not None and "key" not in version.fields:
                version.fields["tier"] = spread
        if versions:
            self.account.begin_write(versions)
            await self._remember(versions)

    def _version(self, batch: str, kind: str) -> Version:
        number = self._next("v")
        fields: dict[str, Any] = {
            "content": f"{number} {' '.join(self._chance.choices(WORDS, k=6))}",
            "session": self._chance.choice((None, *self._sessions)),
            "metadata": Raw((self._chance.choice(METADATA) % batch).encode()),
            "role": self._chance.choice((None, "user", "assistant")),
        }
        name = number
        if kind == "keys":
            name = fields["key"] = self._chance.choice(self._keys)
        elif kind in ("ids", "group"):
            name = fields["id"] = f"{self._owner}-{number}"
        if kind == "group":
            fields["group"] = batch
        if self._chance.random() < 0.3:
            fields["embedding"] = [self._chance.uniform(-1, 1) for _ in range(WIDTH)]
        given = {field: value for field, value in fields.items() if value is not None}
        return Version(number, name, given, batch, fields.get("id"))

    async def _repeat(self) -> None:
        """Repeat a whole batch that got no answer."""
        for versions in self.account.in_doubt:
            whole = len(versions) == sum(v.batch == versions[0].batch for v in self.account.versions.values())
            named = all("id" in version.fields or "key" in version.fields for version in versions)
            if whole and named and all(self._is_free(version.name) for version in versions):
                await self._remember(versions)
                return

    async def _remember(self, versions: Sequence[Version]) -> None:
        answer = await self._ask("remember", _Ids, records=[version.fields for version in versions], changes=versions)
        if isinstance(answer, _Ids):
            self.account.end_write(versions, answer.ids)
        elif isinstance(answer, Unanswered):
            self.account.end_write(versions, None)

    async def _timeline(self) -> None:
        session = self._chance.choice((None, *self._sessions))
        where: dict[str, Any] = {} if session is None else {"where": {"session": session}}
        certain = self.account.certain()
        asked = [v.name for v in certain if session is None or v.fields.get("session") == session]
        found = await self._ask("timeline", Found, limit=1000, **where)
        if isinstance(found, Found):
            self.account.check(found, asked)

    async def _recall(self) -> None:
        certain = self.account.certain()
        if not certain:
            return
        version = self._chance.choice(certain)
        found = await self._ask("recall", Found, query=version.fields["content"], limit=10)
        if isinstance(found, Found):
            # the number in its content is a word that no other record has
            self.account.check(found, [version.name])

    async def _fetch(self) -> None:
        key = self._chance.choice(self._keys)
        asked = [version.name for version in self.account.certain() if version.name == key]
        answer = await self._ask("fetch", _Fetched, key=key)
        if isinstance(answer, _Fetched):
            self.account.check(Found([answer.record] if answer.record is not None else []), asked)

    async def _forget_ids(self) -> None:
        written = [v for v in self.account.versions.values() if v.id is not None and "key" not in v.fields]
        some = self._chance.sample(written, min(2, len(written)))
        if some:
            await self._forget(some, ids=[version.id for version in some])

    async def _forget_batch(self) -> None:
        """Forget a batch by its metadata, which only the tiers have."""
        certain = self.account.certain()
        if certain:
            batch = self._chance.choice(certain).batch
            await self._forget([v for v in certain if v.batch == batch], where={"batch": batch}, of_batch=batch)

    async def _forget_key(self) -> None:
        key = self._chance.choice(self._keys)
        written = [version for version in self.account.versions.values() if version.name == key]
        await self._forget(written[:1], key_prefix=key)

    async def _forget(self, versions: Sequence[Version], *, of_batch: str | None = None, **selector: Any) -> None:
        names = {version.name for version in versions}
        # if a part of the batch is in doubt, the forget would cover that part, too
        touched = names | {v.name for v in self.account.versions.values() if v.batch == of_batch}
        if not names or not all(self._is_free(name) for name in touched):
            return
        if touched != names:
            return
        answer = await self._ask("forget", _Forgotten, **selector, changes=versions)
        if not isinstance(answer, A2MError):
            self.account.end_forget(names, answered=isinstance(answer, _Forgotten))

    async def _promote(self) -> None:
        certain = [version for version in self.account.certain() if version.id is not None]
        if certain:
            ids = [version.id for version in self._chance.sample(certain, min(2, len(certain)))]
            await self._ask("promote", Raw, ids=ids, tier=self._chance.choice(TIERS[1:]))

    async def _close(self) -> None:
        await self._ask("session/close", Raw, session=self._chance.choice(self._sessions))

    async def _consolidate(self) -> None:
        await self._ask("consolidate", Raw)

    # --- calls

    async def _ask(
        self, method: str, type: type[T], *, changes: Iterable[Version] = (), **params: Any
    ) -> T | A2MError | Unanswered:
        """Return the answer, or the error that was the answer, or the reason why there was no answer."""
        peer = await self._processes.door(self._owner)
        generation = self._processes.generation
        self._about_to_call()
        changed = list(changes)
        about = msgspec.json.encode(params).decode()
        began = time.monotonic()
        outcome: T | A2MError | Unanswered
        try:
            raw = await peer.call(f"memory/{method}", {**params, "owner": self._owner}, timeout=TIMEOUT)
        except A2MError as error:
            if error.code != Code.INTERNAL_ERROR:
                raise Wrong(f"{self._owner}: {method} is answered with {error!r}: {params}") from None
            outcome, came = error, f"error {error.message} {error.data}"
            self.outcomes["error"] += 1
        except Unanswered as silence:
            outcome, came = silence, f"no answer: {silence.reason}"
            self.outcomes["too late" if isinstance(silence, NoAnswer) else "unanswered"] += 1
            for version in changed:
                self._open[version.name] = generation
        else:
            outcome = raw if type is Raw else msgspec.json.decode(raw, type=type)  # type: ignore[assignment]
            came = bytes(raw)[:400].decode("utf-8", "replace")
            self.outcomes["answered"] += 1
        took = time.monotonic() - began
        self._tell(f"{self._owner} {generation} {method} {about} ({took * 1000:.0f} ms): {came}")
        return outcome

    def _is_free(self, name: str) -> bool:
        return self._open.get(name, -1) < self._processes.generation

    def _next(self, letter: str) -> str:
        self._count += 1
        return f"{self._owner}{letter}{self._count}"
