"""Checks, and the server under test.

A check is a function that calls a `Target` and raises `Failure` with one sentence if the answer is not as the
specification requires. The decorator `check` adds it to CHECKS with the sentences that it tests and its conditions:

- `needs`: capabilities; without one of them the check is skipped.
- `unless`: a capability; the check is for servers that do not declare it.
- `binding`: the check applies to this binding only.
- `writes`: the check writes, so it does not apply to a read-only server.
- `read_only`: the check applies to the read-only profile only (§2.1).
"""

import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from a2m_router.conformance.client import PROTOCOL, Client, Http, Message, NoAnswer, Stdio

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
UNKNOWN_RECORD: Final = -32001
UNKNOWN_TIER: Final = -32002
CAPABILITY_NOT_SUPPORTED: Final = -32003
READ_ONLY: Final = -32004
SCOPE_DENIED: Final = -32005
QUOTA_EXCEEDED: Final = -32006
PROTOCOL_NOT_SUPPORTED: Final = -32007
EMBEDDING_MISMATCH: Final = -32008

# the methods of each capability (§2, §4)
METHODS: Final[dict[str, tuple[str, ...]]] = {
    "core": ("memory/describe", "memory/remember", "memory/recall", "memory/timeline", "memory/forget"),
    "tiers": ("memory/promote", "memory/consolidate"),
    "salience": ("memory/reinforce",),
    "scopes": (),
    "sessions": ("memory/session/list", "memory/session/close"),
    "keys": ("memory/fetch",),
    "embeddings": (),
    "external": (),
    "events": ("memory/events", "memory/events/subscribe", "memory/events/unsubscribe"),
    "summarize": ("memory/summarize",),
    "prompt": (),
}

TIMESTAMP: Final = re.compile(r"\d{4}-(0[1-9]|1[0-2])-([0-2]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)\.\d{3}Z")

Record = dict[str, Any]


class Failure(Exception):
    """The server broke a rule; the message says what was sent, what was expected, and what came."""


class NotApplicable(Exception):
    """The check does not apply to this server; the sentence says why."""


class Skipped(Exception):
    """An option that the check needs was not given."""


class Check(NamedTuple):
    name: str  # "core.timeline_ascends"
    section: str  # "core"
    run: Callable[["Target"], None]
    sentences: tuple[str, ...]
    needs: tuple[str, ...]
    unless: str | None
    binding: str | None
    writes: bool
    read_only: bool


CHECKS: Final[list[Check]] = []


def check(
    *sentences: str,
    needs: Iterable[str] = (),
    unless: str | None = None,
    binding: str | None = None,
    writes: bool = True,
    read_only: bool = False,
) -> Callable[[Callable[["Target"], None]], Callable[["Target"], None]]:
    """Register a check; see the top of this module."""

    def registered(run: Callable[["Target"], None]) -> Callable[["Target"], None]:
        section = run.__module__.rpartition("checks_")[2]
        name = f"{section}.{run.__name__}"
        needed = (needs,) if isinstance(needs, str) else tuple(needs)
        CHECKS.append(Check(name, section, run, sentences, needed, unless, binding, writes, read_only))
        return run

    return registered


def expect(true: bool, sentence: str) -> None:
    """Raise Failure with the sentence unless the condition is true."""
    if not true:
        raise Failure(sentence)


def an_object(value: Any, what: str) -> Record:
    """Return the value as an object; raise Failure if it is not one."""
    if not isinstance(value, dict):
        raise Failure(f"{what}: expected an object, got {shown(value)}")
    return value


# Subjects without similarity to each other, for any kind of ranking.
_SUBJECTS: Final = (
    "The lighthouse keeper {} repaints the lantern room every spring",
    "Invoice {} for the dental clinic was paid by bank transfer",
    "A violin by {} needs new strings before the autumn concert",
    "Glacier {} retreats because summers in the valley grow warmer",
    "The compiler {} rejects programs whose types do not agree",
    "Grandmother {} bakes rye bread with caraway on Saturdays",
    "Submarine {} surfaced near the harbour to repair its engine",
    "The football club {} lost its goalkeeper to an injury",
    "Tomato seedlings of the sort {} want sunlight and little water",
    "Senator {} voted against the new railway through the desert",
    "Telescope {} photographed a comet with a double tail",
    "The tailor {} shortened a wedding dress of green silk",
)


class Target:
    """The server under test, with helpers for calls.

    Args:
        client: the connection that all checks use.
        other: a connection of another principal, over HTTP.
        patience: seconds to wait for effects without an answer: of a notification, or a pushed event.
    """

    def __init__(
        self, client: Client, other: Client | None = None, seed: int | None = None, patience: float = 10
    ) -> None:
        self.client = client
        self.other = other
        self.patience = patience
        self.described: Message = {}
        self.capabilities: frozenset[str] = frozenset()
        self.read_only = False
        self.gone: str | None = None  # why the server cannot be called any more
        self.tag = ""
        self._random = random.Random(seed)
        self._subjects = itertools.cycle(_SUBJECTS)
        self._written: list[tuple[Client, str | None, list[str]]] = []

    def meet(self) -> None:
        """Read the description, and find out whether the server accepts writes. Raises Failure or NoAnswer."""
        self.described = self.ask("describe", protocol=PROTOCOL)
        names = self.described.get("capabilities")
        expect(isinstance(names, list), f"memory/describe: expected a list of capabilities, got {names!r}")
        self.capabilities = frozenset(name for name in names or () if isinstance(name, str))
        self.begin()
        probe = self.call("remember", records=[self.note()])
        self.read_only = probe.get("error", {}).get("code") == READ_ONLY
        self.note_written(probe)
        self.clean()

    def begin(self) -> None:
        """Choose a new tag, so that a check sees only its own records."""
        self.tag = self.word()
        self._subjects = itertools.cycle(_SUBJECTS)

    def clean(self) -> bool:
        """Try to forget the records written since the last time; return False if a call was not answered."""
        while self._written:
            client, owner, ids = self._written[0]
            params = {"ids": ids} if owner is None else {"ids": ids, "owner": owner}
            try:
                client.request("memory/forget", params)
            except NoAnswer:
                return False
            self._written.pop(0)
        return True

    def recovered(self, *, doubtful: bool) -> str:
        """Restart a lost server, and return how it was lost; empty if it was not. See `Client.lost`.

        If the restart fails, `gone` is set."""
        lost = self.client.lost(doubtful=doubtful)
        if lost is None:
            if doubtful:
                self._written.clear()  # a forget that fails now would fail later, too
            return ""
        # let the restarted server forget the records of before, unless that kills it
        for cleans in (True, False):
            if not cleans:
                self._written.clear()
            why = self.client.restart()
            if why is not None:
                self.gone = f"{lost}\n{why}"
                return self.gone
            if self.clean():
                break
            self.client.lost(doubtful=True)
        return f"{lost}\nIt {'was restarted' if self.client.binding == 'stdio' else 'came back'}, and answers."

    # --- what to write

    def word(self) -> str:
        """Return a new word, made of letters only."""
        return "".join(self._random.choice("bdfgklmnprtvz") + self._random.choice("aeiou") for _ in range(6)) + "k"

    def note(self, **fields: Any) -> Record:
        """Return a record about a new subject, with this check's tag."""
        record = {"content": next(self._subjects).format(self.word()), "metadata": {"conformance": self.tag}, **fields}
        if "metadata" in fields:
            record["metadata"] = {"conformance": self.tag, **fields["metadata"]}
        return record

    def notes(self, count: int, **fields: Any) -> list[Record]:
        return [self.note(**fields) for _ in range(count)]

    @property
    def mine(self) -> Record:
        """A `where` that selects this check's records."""
        return {"conformance": self.tag}

    # --- calls; `by` is a Client, by default this target's own (typed as Any, since **params have any type)

    def call(self, method: str, /, *, by: Any = None, **params: Any) -> Message:
        """Return the whole response."""
        response = (by or self.client).request(f"memory/{method}", params)
        if ("result" in response) == ("error" in response) or response.get("jsonrpc") != "2.0":
            raise Failure(
                f"memory/{method}: expected a JSON-RPC 2.0 response with a result or an error, got {response}"
            )
        return response

    def ask(self, method: str, /, *, by: Any = None, **params: Any) -> Message:
        """Return the result, an object. Raise Failure for an error."""
        response = self.call(method, by=by, **params)
        if "error" in response:
            raise Failure(
                f"memory/{method} with {shown(params)}: expected a result, got error {shown(response['error'])}"
            )
        result = response["result"]
        if not isinstance(result, dict):
            raise Failure(
                f"memory/{method} with {shown(params)}: expected an object as the result, got {shown(result)}"
            )
        return result

    def refused(self, codes: int | Sequence[int], method: str, /, *, by: Any = None, **params: Any) -> Message:
        """Return the error, with one of the codes. Raise Failure for anything else."""
        wanted = [codes] if isinstance(codes, int) else list(codes)
        response = self.call(method, by=by, **params)
        error = response.get("error")
        if not isinstance(error, dict) or error.get("code") not in wanted:
            came = error if error is not None else response.get("result")
            expected = " or ".join(map(str, wanted))
            raise Failure(f"memory/{method} with {shown(params)}: expected error {expected}, got {shown(came)}")
        return error

    def remember(
        self, *records: Record, by: Client | None = None, owner: str | None = None, session: str | None = None
    ) -> list[str]:
        """Write records in one call; return the ids."""
        defaults = {name: value for name, value in (("owner", owner), ("session", session)) if value is not None}
        response = self.call("remember", by=by, records=list(records), **defaults)
        self.note_written(response, by, owner)
        if "error" in response:
            raise Failure(
                f"memory/remember of {shown(list(records))}: expected ids, got error {shown(response['error'])}"
            )
        ids = response["result"].get("ids") if isinstance(response["result"], dict) else None
        if not isinstance(ids, list) or len(ids) != len(records) or not all(isinstance(id, str) for id in ids):
            raise Failure(f"memory/remember of {len(records)} records: expected as many string ids, got {shown(ids)}")
        return ids

    def remember_apart(self, *records: Record) -> list[str]:
        """Write one record after the other, each in another millisecond."""
        ids = []
        for record in records:
            ids += self.remember(record)
            time.sleep(0.004)
        return ids

    def note_written(self, response: Message, by: Client | None = None, owner: str | None = None) -> None:
        """Keep the ids of a write, so that the records are forgotten at the end."""
        result = response.get("result")
        ids = result.get("ids") if isinstance(result, dict) else None
        if isinstance(ids, list) and ids:
            self._written.append((by or self.client, owner, ids))

    def records(self, method: str, /, *, by: Any = None, **params: Any) -> list[Record]:
        """Return the records of a recall or timeline. Raise Failure if they are not a list of objects."""
        records = self.ask(method, by=by, **params).get("records")
        if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
            raise Failure(f"memory/{method} with {shown(params)}: expected records, got {shown(records)}")
        return records

    def timeline(self, **params: Any) -> list[Record]:
        """Return this check's records, as timeline returns them."""
        return self.records("timeline", **{"where": self.mine, **params})

    def recall(self, query: str, **params: Any) -> list[Record]:
        """Return this check's records, as recall ranks them."""
        return self.records("recall", query=query, **{"where": self.mine, "limit": 50, **params})

    def read(self, id: str, **params: Any) -> Record:
        """Return the record with this id. Raise Failure if it is not among this check's records."""
        found = [record for record in self.timeline(**params) if record.get("id") == id]
        if len(found) != 1:
            raise Failure(
                f"memory/timeline where {shown(self.mine)}: expected one record {id!r}, got {len(found)} of it"
            )
        return found[0]

    # --- who is asking

    def agents(self) -> tuple["Agent", "Agent"]:
        """Return two callers with different owners. Raise Skipped if there is only one."""
        if self.client.binding != "http":
            return Agent(self, self.client, f"agent-{self.word()}"), Agent(self, self.client, f"agent-{self.word()}")
        if self.other is None:
            raise Skipped("needs --other-token")
        return Agent(self, self.client, None), Agent(self, self.other, None)

    # --- tiers

    def tiers(self) -> list[Record]:
        """Return the current tiers. Raise Failure if they are not a list of objects."""
        tiers = self.ask("describe").get("tiers")
        if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
            raise Failure(f"memory/describe with tiers declared: expected a list of tiers, got {shown(tiers)}")
        return tiers

    def moved(self, id: str, **params: Any) -> str:
        """Promote a record to the first other tier that accepts it, and return that tier.

        Raises NotApplicable if no tier accepts it.
        """
        here = self.read(id).get("tier")
        names = [tier.get("name") for tier in self.tiers()]
        onward = [tier.get(way) for way in ("promote_to", "spill_to") for tier in self.tiers() if tier["name"] == here]
        for name in [name for name in dict.fromkeys((*onward, *names)) if name not in (here, None)]:
            response = self.call("promote", ids=[id], tier=name, **params)
            if "result" in response:
                return str(name)
        raise NotApplicable(f"no other tier accepts a record from {here!r}")

    @property
    def stdio(self) -> Stdio:
        assert isinstance(self.client, Stdio)
        return self.client

    @property
    def http(self) -> Http:
        assert isinstance(self.client, Http)
        return self.client


class Agent(NamedTuple):
    """A caller: over HTTP its token identifies it, on other bindings the `owner` in its calls."""

    target: Target
    client: Client
    owner: str | None

    @property
    def named(self) -> dict[str, str]:
        return {} if self.owner is None else {"owner": self.owner}

    def remember(self, *records: Record) -> list[str]:
        return self.target.remember(*records, by=self.client, owner=self.owner)

    def ask(self, method: str, /, **params: Any) -> Message:
        return self.target.ask(method, by=self.client, **self.named, **params)

    def call(self, method: str, /, **params: Any) -> Message:
        return self.target.call(method, by=self.client, **self.named, **params)

    def ids(self, method: str, /, **params: Any) -> list[str]:
        """Return the ids of this check's records in a recall or timeline."""
        found = self.target.records(method, by=self.client, **{**self.named, "where": self.target.mine, **params})
        return [str(record.get("id")) for record in found]


def ids_of(records: Iterable[Record]) -> list[Any]:
    return [record.get("id") for record in records]


def shown(value: Any, most: int = 300) -> str:
    """Return a value for a sentence, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal as JSON, where a number is never a boolean."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
