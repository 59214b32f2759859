"""Two worlds that differ in one principal's private records, and another principal that asks the same in both (§6).

Principal "a" makes private calls in one world, and other ones, or none, in the other. Every answer to "b" must then be
the same, byte for byte: so no call of "b" can reveal in which of the two worlds it runs.

Some differences reveal nothing and are ignored. Fresh ids, which each world makes for itself, are numbered in the order
in which "b" first sees them. Cursors, which are all different, are compared by length. Moments are the same, because
the clocks stand still within a step.

Calls are data. A word of the form `<whose:number>` in them stands for a value that is known only in a run: see `Call`.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import msgspec
from hypothesis import strategies as st

from a2m_router.config.settings import Settings
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_call
from tests.support.federated import LOCAL, START, Clock, Trial, Weather, trial

Who = Literal["a", "b", "local"]

CALLERS: Final[dict[Who, Caller]] = {
    "a": Caller(asserts_owner=False, owner="a"),
    "b": Caller(asserts_owner=False, owner="b"),
    "local": LOCAL,
}

# It is in the content of every private record of "a", and in no other.
SECRET: Final = "hush"

# The ids of the records that "a" has published: both worlds get the same calls for them.
OPEN: Final = ("open0", "open1")

PRIVATE: Final = ("working", "episodic", "semantic")
SHARED: Final = "procedural"
_TIERS: Final = (*PRIVATE, SHARED)

# Each conversation has its own capacity, so that no principal's records displace another's. Separate tests cover what a
# shared capacity reveals, and what a tier's own ranking does.
SECLUDED: Final = """
[policy]
pass = "{policy}"
[recall]
rankings = ["lexical", "vector"]
candidates = 1000
[tiers.working]
kind = "working"
command = ["-"]
capacity = 3
per_session = true
spill_to = "episodic"
distil = DISTIL
half_life = "5m"
[tiers.episodic]
kind = "episodic"
command = ["-"]
capacity = 4
per_session = true
spill_to = "semantic"
promote_to = "semantic"
promote_after = 2
[tiers.semantic]
kind = "semantic"
command = ["-"]
[tiers.procedural]
kind = "procedural"
command = ["-"]
shared = true
"""

_FRESH_ID: Final = re.compile(rb"\b[0-9a-f]{32}\b")
_CURSOR: Final = re.compile(rb'"cursor":"([^"]*)"')
_MOMENT: Final = re.compile(rb'"\d{4}-\d\d-\d\dT[^"]*Z"')
_WORD: Final = re.compile(r"<(mine|theirs|cursor|their cursor):(\d+)>")


class Call(msgspec.Struct, frozen=True):
    """One call, without the `memory/` before its method. Its parameters may hold words that a run fills in.

    `<mine:3>`: the id of the caller's own third record, in its world. `<theirs:3>`: an id of "a"'s in the first world,
    used in both, as if guessed. `<cursor:3>`, `<their cursor:3>`: one that "b", or "a", got in that world.
    """

    method: str
    params: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """An answer as it was received, and decoded."""

    raw: bytes

    @property
    def error(self) -> Any:
        return msgspec.json.decode(self.raw).get("error")

    @property
    def result(self) -> Any:
        answer = msgspec.json.decode(self.raw)
        if "error" in answer:
            raise A2MError(answer["error"]["code"], answer["error"]["message"], answer["error"].get("data"))
        return answer["result"]


async def ask(fed: Trial, who: Who, method: str, **params: Any) -> Answer:
    """Return the federation's answer to a call of one of CALLERS."""
    answer = await fed.federation.answer(render_call(1, f"memory/{method}", params), CALLERS[who])
    assert answer is not None
    return Answer(answer)


class StillClock(Clock):
    """A clock that moves only when a test moves it."""

    def __call__(self) -> int:
        return self.now


class World:
    """One of the two worlds: a federation, and the ids and cursors that it has given out."""

    def __init__(self, fed: Trial) -> None:
        self.fed = fed
        self.ids: dict[Who, list[str]] = {"a": [], "b": [], "local": []}
        self.cursors: dict[Who, list[str]] = {"a": [], "b": [], "local": []}
        self._seen: dict[bytes, bytes] = {}

    async def ask(self, who: Who, call: Call) -> Answer:
        answer = await ask(self.fed, who, call.method, **call.params)
        told = msgspec.json.decode(answer.raw).get("result", {})
        written = told.get("records", ()) if call.method == "summarize" else ()
        new = told.get("ids", [record["id"] for record in written])
        self.ids[who] += [id for id in new if id not in self.ids[who] and id not in OPEN]
        self.cursors[who] += [told["cursor"]] if "cursor" in told else []
        return answer

    def takes(self, ids: Sequence[str]) -> bool:
        """Return whether a write of "b"'s with these ids must be refused because another owner has one of them."""
        return any(entry.owner not in (None, "b") for entry in self.fed.federation.catalog.records.find(ids).values())

    def blurred(self, answer: Answer, given: set[bytes]) -> bytes:
        """Return the answer without what differs and reveals nothing: cursors, and fresh ids that "b" did not name."""

        def name(found: re.Match[bytes]) -> bytes:
            id = found[0]
            return id if id in given else self._seen.setdefault(id, b"#%d" % len(self._seen))

        without_ids = _FRESH_ID.sub(name, answer.raw)
        return _CURSOR.sub(lambda found: b'"cursor":"%d characters"' % len(found[1]), without_ids)


class TwoWorlds:
    """Both worlds, kept in step. Every answer to "b" is compared when it comes."""

    def __init__(self, first: World, second: World, settle: bool) -> None:
        self.first = first
        self.second = second
        self._settle = settle
        self._given: set[bytes] = set()

    async def step(self) -> None:
        """Move both clocks to the next moment; with `settle`, the policy's background work is done first."""
        for world in (self.first, self.second):
            if self._settle:
                await world.fed.settled()
            world.fed.clock.now += 1000

    async def apart(self, first: Sequence[Call], second: Sequence[Call] = ()) -> None:
        """Make the private calls of "a": some in the first world, others in the second."""
        for world, calls in ((self.first, first), (self.second, second)):
            for call in calls:
                await self.ask_in_private(world, call)
        await self.step()

    async def ask_in_private(self, world: World, call: Call) -> None:
        """Make one private call of "a" in one world, without a step of the clocks."""
        known = len(world.cursors["a"])
        await world.ask("a", self._filled(call, world, "a"))
        # a cursor that "a" got in this world alone is none that "b" could guess in both
        del world.cursors["a"][known:]

    async def alike(self, who: Who, call: Call) -> None:
        """Make a call in both worlds whose effect every principal may see."""
        for world in (self.first, self.second):
            await world.ask(who, self._filled(call, world, who))
        await self.step()

    async def compare(self, call: Call) -> Answer:
        """Return the answer to "b" in the first world; fail if the second differs, or if either contains a secret.

        The one exception is the protocol's own: an id is unique in the whole federation. So a write with an id that
        another owner has in one world is refused there, and is possible in the other. Then only the refusal is checked:
        it says no more than that the id is taken. The write is not made in the other world, so that the worlds stay
        alike.
        """
        ids = written_ids(self._filled(call, self.first, "b"))
        taken = [world for world in (self.first, self.second) if world.takes(ids)]
        if len(taken) == 1:
            [world] = taken
            answer = await world.ask("b", self._filled(call, world, "b"))
            assert_says_only_that_it_is_taken(answer, ids)
        else:
            answer, another = [
                await world.ask("b", self._filled(call, world, "b")) for world in (self.first, self.second)
            ]
            assert_same(call, self.first.blurred(answer, self._given), self.second.blurred(another, self._given))
            self._assert_no_secret(call, another)
        self._assert_no_secret(call, answer)
        await self.step()
        return answer

    def _assert_no_secret(self, call: Call, answer: Answer) -> None:
        assert SECRET.encode() not in answer.raw, (call, answer.raw)
        for world in (self.first, self.second):
            private = {id.encode() for id in world.ids["a"]} - self._given
            assert not [id for id in private if len(id) == 32 and id in answer.raw], (call, answer.raw)

    def _filled(self, call: Call, world: World, who: Who) -> Call:
        return Call(call.method, {name: self._value(value, world, who) for name, value in call.params.items()})

    def _value(self, value: Any, world: World, who: Who) -> Any:
        match value:
            case str():
                found = _WORD.fullmatch(value)
                return value if found is None else self._word(found[1], int(found[2]), world, who)
            case list():
                return [self._value(item, world, who) for item in value]
            case dict():
                return {name: self._value(item, world, who) for name, item in value.items()}
        return value

    def _word(self, kind: str, number: int, world: World, who: Who) -> str:
        known = {
            "mine": world.ids[who],
            "theirs": self.first.ids["a"],
            "cursor": world.cursors["b"],
            "their cursor": world.cursors["a"],
        }[kind]
        word = known[number % len(known)] if known else "nothing"
        if kind == "theirs":
            self._given.add(word.encode())
        return word


def without_moments(raw: bytes) -> bytes:
    """Return an answer without its moments, for worlds whose clocks run."""
    return _MOMENT.sub(b'"a moment"', raw)


def written_ids(call: Call) -> list[str]:
    """Return the ids that a write names."""
    records = call.params["records"] if call.method == "remember" else []
    return [record["id"] for record in records if "id" in record]


def assert_says_only_that_it_is_taken(answer: Answer, ids: Sequence[str]) -> None:
    """Assert that the refusal of a write with another owner's id names that id, which the caller gave, and no more."""
    sentences = [f"records: the id {id!r} belongs to another owner" for id in ids]
    assert answer.error["message"] in sentences
    assert answer.error == {"code": Code.SCOPE_DENIED, "message": answer.error["message"]}


def assert_same(call: Call, first: bytes, second: bytes) -> None:
    assert first == second, f"{call}\n  in the first world:  {first!r}\n  in the second world: {second!r}"


@asynccontextmanager
async def two_worlds(
    settings: Settings, *, weather: Sequence[Weather | None] = (None, None), settle: bool = True
) -> AsyncIterator[TwoWorlds]:
    """Run two federations with the same settings.

    Args:
        weather: of the first, and of the second.
        settle: let the policy finish its background work before the next step; it must then run in the background.
    """
    clocks = [StillClock(), StillClock()]
    for clock in clocks:
        clock.now = START
    async with (
        trial(settings, clock=clocks[0], weather=weather[0]) as first,
        trial(settings, clock=clocks[1], weather=weather[1]) as second,
    ):
        yield TwoWorlds(World(first), World(second), settle)


class Step(msgspec.Struct, frozen=True):
    """The private calls of "a" in each world, the calls whose effect all may see, and the calls of "b" after them."""

    first: list[Call]
    second: list[Call]
    seen_by_all: list[tuple[Who, Call]]
    asked: list[Call]


# --- the words that all principals use, so that their calls interfere

_sessions = st.sampled_from(["s", "t"])
_keys = st.sampled_from(["k", "k/a", "x"])
_prefixes = st.sampled_from(["k", "k/", "x", ""])
# the longest has enough sentences to be summarized
_words = st.sampled_from(["alpha", "alpha beta", "delta", "The alpha is old. Some beta came late. Nobody saw gamma."])
_vectors = st.sampled_from([[0.0, 1.0], [1.0, 0.5]])
_numbers = st.integers(0, 9)
# ids that "a" may choose for private records, and "b" may guess
_GUESSABLE: Final = ("a0", "a1", "a2")


def secret(words: str) -> str:
    """Return a content of a private record of "a": each of its sentences is marked."""
    return f"{words.replace('.', f' {SECRET}.')} {SECRET}"


def calls(method: str, required: Mapping[str, Any], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.builds(Call, st.just(method), st.fixed_dictionaries(dict(required), optional=optional))


def _drafts(contents: st.SearchStrategy[str], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"content": contents},
        optional={
            "role": st.sampled_from(["user", "tool"]),
            "session": _sessions,
            "key": _keys,
            "group": st.sampled_from(["g", "h"]),
            "metadata": st.sampled_from([{"m": 1}, {"m": 2}]),
            "salience": st.sampled_from([0.0, 0.5, 2.0]),
            "embedding": _vectors,
            "uri": st.just("u:1"),
            **more,
        },
    )


# --- private calls of "a": none touches a shared record, or one without an owner

_own = st.lists(st.sampled_from([f"<mine:{n}>" for n in range(10)]), min_size=1, max_size=3)
_his = {"owner": st.just("a"), "tier": st.just(list(PRIVATE))}
_wheres_of_his = st.fixed_dictionaries(_his, optional={"session": _sessions, "m": st.just(1), "role": st.just("user")})
_private_tier = st.sampled_from(PRIVATE)
_secrets = _drafts(_words.map(secret), id=st.sampled_from(_GUESSABLE), tier=_private_tier)

private = st.one_of(
    calls("remember", {"records": st.lists(_secrets, min_size=1, max_size=4)}),
    calls("remember", {"records": st.lists(_secrets, min_size=1, max_size=4)}),
    calls("forget", {"ids": _own}),
    calls("forget", {"where": _wheres_of_his}, query=st.just("alpha"), key_prefix=_prefixes),
    calls("promote", {"ids": _own, "tier": _private_tier}, salience=st.just(2.0)),
    calls("reinforce", {"ids": _own}),
    calls("recall", {"where": _wheres_of_his}, query=_words, limit=st.just(100)),
    calls("summarize", {"ids": _own}, into=_private_tier, key=_keys),
    calls("summarize", {"where": _wheres_of_his}, into=_private_tier),
    calls("session/close", {"session": _sessions}),
    calls("consolidate", {}),
    calls("events", {}),
)

# --- calls whose effect all may see: on records without an owner, and on those that "a" has published

_NOBODYS: Final = ("n0", "n1")


def _open_drafts(ids: Sequence[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    fields = {"id": st.sampled_from(ids), "content": _words}
    several = {"session": _sessions, "metadata": st.just({"m": 1}), "embedding": _vectors, "group": st.just("open")}
    return st.lists(st.fixed_dictionaries(fields, optional=several), min_size=1, max_size=2)


_some_of_a = st.lists(st.sampled_from(OPEN), min_size=1, max_size=2)
_some_of_nobody = st.lists(st.sampled_from(_NOBODYS), min_size=1, max_size=2)
_mixed = st.tuples(_some_of_nobody, _own).map(lambda ids: ids[0] + ids[1])


def _by(who: Who, call: st.SearchStrategy[Call]) -> st.SearchStrategy[tuple[Who, Call]]:
    return st.tuples(st.just(who), call)


_published = _open_drafts(OPEN).map(lambda drafts: [{**draft, "tier": SHARED} for draft in drafts])
seen_by_all = st.one_of(
    _by("local", calls("remember", {"records": _open_drafts(_NOBODYS)})),
    _by("local", calls("forget", {"ids": _some_of_nobody})),
    _by("local", calls("promote", {"ids": _some_of_nobody, "tier": st.sampled_from(_TIERS)})),
    _by("a", calls("remember", {"records": _published})),
    _by("a", calls("forget", {"ids": _some_of_a})),
    # together with private records of "a": of those nothing may be revealed
    _by("a", calls("forget", {"ids": _mixed})),
    _by("a", calls("promote", {"ids": _mixed, "tier": _private_tier})),
    # out of the scope of the other principals, and back
    _by("a", calls("promote", {"ids": _some_of_a, "tier": st.sampled_from(["semantic", SHARED])})),
    _by("a", calls("recall", {"where": st.just({"tier": SHARED})})),
    _by("a", calls("events", {"cursor": st.just("<their cursor:0>")})),
)

# --- calls of "b", with and without an attempt to learn secrets

_guesses = st.sampled_from([*_GUESSABLE, *_NOBODYS, *OPEN, *(f"<theirs:{n}>" for n in range(10))])
_ids = st.lists(_guesses | st.sampled_from([f"<mine:{n}>" for n in range(10)]), min_size=1, max_size=4)
_tiers = st.sampled_from(_TIERS)
_wheres = st.one_of(
    st.sampled_from(
        [
            *({"session": "s"}, {"session": ["s", None]}, {"group": "g"}, {"owner": "a"}, {"owner": ["a", "b", None]}),
            *({"m": 1}, {"m": 1, "session": "t"}, {"role": "user"}, {"key": "k"}, {"revision": 1}, {"uri": "u:1"}),
            *({"access_count": [0, 1]}, {"salience": 1}, {"tier": "semantic"}, {"content": f"alpha {SECRET[:2]}"}),
        ]
    ),
    _ids.map(lambda ids: {"id": ids}),
)
_prompts = st.sampled_from([True, {"style": "facts", "cite": True}, {"style": "transcript", "budget": 40}])
# with another owner's name the call is refused, whatever records there are
_asserted = st.sampled_from(["b", "b", "a"])
_selectors: dict[str, st.SearchStrategy[Any]] = {
    "tier": _tiers,
    "where": _wheres,
    "key_prefix": _prefixes,
    "owner": _asserted,
}
_limits = st.sampled_from([1, 2, 100])
_reading = {**_selectors, "limit": _limits, "embeddings": st.booleans(), "prompt": _prompts}
_drafts_of_his = st.lists(_drafts(_words, id=st.sampled_from([*_NOBODYS, "b0"]), tier=_tiers), min_size=1, max_size=3)
_guessed_writes = st.builds(
    lambda guess, draft: [{"content": "alpha"}, {**draft, "id": guess}], _guesses, _drafts(_words, tier=_tiers)
)
_cursors = st.sampled_from(["<cursor:0>", "<cursor:1>", "<their cursor:0>", "<their cursor:1>", "AAAA"])
_kinds = st.lists(st.sampled_from(["written", "forgotten", "promoted", "consolidated", "session_closed"]), max_size=2)

# by method, so that a test can check that none is left out
READS: Final[Mapping[str, st.SearchStrategy[Call]]] = {
    "timeline": calls("timeline", {}, **_reading) | calls("timeline", {}, limit=_limits),
    "recall": calls("recall", {}, query=_words, embedding=_vectors, min_score=st.just(0.01), **_reading)
    | calls("recall", {}, query=_words, limit=st.just(100)),
    "fetch": calls("fetch", {"key": _keys}, owner=_asserted),
    "session/list": calls("session/list", {}, owner=_asserted),
    "describe": calls("describe", {}, owner=_asserted),
    "events": calls("events", {}, cursor=_cursors, limit=_limits, kinds=_kinds, owner=_asserted),
}
WRITES: Final[Mapping[str, st.SearchStrategy[Call]]] = {
    "remember": calls("remember", {"records": _drafts_of_his}, session=_sessions, owner=_asserted),
    "forget": calls("forget", {"ids": _ids}) | calls("forget", {}, ids=_ids, query=_words, **_selectors),
    "promote": calls("promote", {"ids": _ids, "tier": _tiers}, salience=st.just(1.0), owner=_asserted),
    "reinforce": calls("reinforce", {"ids": _ids}, amount=st.sampled_from([1.0, -5.0]), owner=_asserted),
    "session/close": calls("session/close", {"session": _sessions}, owner=_asserted),
    "consolidate": calls("consolidate", {}),
    "summarize": calls("summarize", {}, ids=_ids, query=_words, limit=_limits, into=_tiers, key=_keys, **_selectors),
}
reads = st.one_of(*READS.values())
writes = st.one_of(*WRITES.values())
guesses = calls("remember", {"records": _guessed_writes})
asked = st.one_of(reads, reads, writes, guesses)

steps = st.builds(
    Step,
    st.lists(private, max_size=4),
    st.lists(private, max_size=2),
    st.lists(seen_by_all, max_size=2),
    st.lists(asked, min_size=1, max_size=4),
)
