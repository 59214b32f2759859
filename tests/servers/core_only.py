"""An A2M 0.1 server of `core` alone, as one writes it in an afternoon: any store behind the router.

    python tests/servers/core_only.py [--file PATH] [--http HOST:PORT] [options]

It keeps to the specification and does nothing beyond it. Recall counts shared words. `where` compares as Python does; a
timeline ignores it without `where_on_timeline` (§4.4 requires it only with sessions). By option the server declares
further capabilities, and then implements them, so that a tier can have any subset.

If a call selects by a capability that is not declared, a read ignores that selector, and `forget` refuses it: ignoring
it would delete more than was asked for.
"""

import argparse
import json
import math
import re
import sys
import threading
import time
import uuid
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Never

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])

from tests.servers import javascript
from tests.servers.bindings import over_stdio, serve_http
from tests.servers.journal import Change, Journal
from tests.servers.protocol import (
    CAPABILITIES,
    CAPABILITY_NOT_SUPPORTED,
    CAPABILITY_OF,
    COUNT,
    EMBEDDING_MISMATCH,
    FLAG,
    ID,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LIST,
    METHOD_NOT_FOUND,
    METHODS,
    NAME,
    NUMBER,
    OBJECT,
    PARSE_ERROR,
    PROTOCOL,
    PROTOCOL_NOT_SUPPORTED,
    QUOTA_EXCEEDED,
    READ_ONLY,
    READS,
    STRING,
    STRINGS,
    UNKNOWN_TIER,
    VECTOR,
    WEIGHT,
    Params,
    Record,
    Refused,
    fields_of,
    required,
    taken,
)

Result = dict[str, Any]

LIMITS: Final = ("max_records_per_call", "max_recall_limit", "max_content_length")
TWO_TIERS: Final = {"hot": "working", "cold": "semantic"}
KINDS: Final = ("working", "episodic", "semantic", "procedural")

_DEFAULT_LIMIT: Final = 8


class CoreOnly:
    """The server. `answer` takes one message at a time, from any thread; every method of A2M is a method here.

    Args:
        path: the file that keeps the records; without it they are kept in memory. Fields that were written there with a
            capability are read with that capability.
        capabilities: those declared besides core, of CAPABILITIES.
        limits: those declared and enforced, of LIMITS.
        tiers: names and kinds, where tiers is declared; a record without a tier goes to the first working one.
        like_javascript: re-encode every message in and out as JSON.parse and JSON.stringify do.
        where_on_timeline: apply `where` on timeline; with sessions it always is.
        read_only: answer every write with READ_ONLY (§2.1).

    Raises ValueError for an unknown capability, limit or kind.
    """

    name = "core-only"

    def __init__(
        self,
        path: Path | None = None,
        *,
        capabilities: Collection[str] = (),
        limits: Mapping[str, int] | None = None,
        tiers: Mapping[str, str] = TWO_TIERS,
        like_javascript: bool = False,
        where_on_timeline: bool = False,
        read_only: bool = False,
    ) -> None:
        _expect_among(CAPABILITIES, capabilities, "capabilities")
        _expect_among(LIMITS, limits or (), "limits")
        _expect_among(KINDS, tiers.values(), "kinds of tiers")
        self.capabilities = tuple(name for name in CAPABILITIES if name == "core" or name in capabilities)
        self.limits = dict(limits or {})
        self.tiers = dict(tiers) if "tiers" in self.capabilities else {}
        self.like_javascript = like_javascript
        self.where_on_timeline = where_on_timeline or "sessions" in self.capabilities
        self.read_only = read_only
        self._records: dict[str, Record] = {}  # by id, in the order written
        self._width: int | None = None  # the width of vectors; the first one fixes it
        self._lock = threading.Lock()
        self._journal = Journal(path) if path is not None else None
        for change in self._journal.replayed() if self._journal is not None else ():
            self._make_true(change)

    def answer(self, message: bytes) -> bytes | None:
        """Return the response to one message, without a newline; None to a notification (§8)."""
        id, is_notification = None, False
        outcome: Result
        try:
            request = self._read(message)
            id = request.get("id")
            is_notification = "id" not in request
            with self._lock:
                outcome = {"result": self.call(request["method"], request.get("params"))}
        except Refused as refusal:
            outcome = {"error": {"code": refusal.code, "message": refusal.message}}
        except (OSError, RecursionError) as problem:
            outcome = {"error": {"code": INTERNAL_ERROR, "message": f"the call could not be carried out: {problem}"}}
        return None if is_notification else self._written({"jsonrpc": "2.0", "id": id, **outcome})

    def call(self, method: str, params: Any) -> Result:
        """Return the result of one call. Raises Refused."""
        capability = CAPABILITY_OF.get(method)
        if capability is None:
            raise Refused(METHOD_NOT_FOUND, f"there is no method {method!r} in {PROTOCOL}")
        if capability not in self.capabilities:
            raise Refused(CAPABILITY_NOT_SUPPORTED, f"{method}: this server does not implement {capability}")
        if self.read_only and method not in READS:
            raise Refused(READ_ONLY, f"{method}: this server takes no writes")
        if not isinstance(params, dict | None):
            raise Refused(INVALID_PARAMS, "params: expected an object")
        carry_out: Callable[[Params], Result] = getattr(self, method.removeprefix("memory/").replace("/", "_"))
        return carry_out(params or {})

    # --- core

    def describe(self, params: Params) -> Result:
        """Describe this server (§4.1)."""
        wanted = taken(params, "protocol", STRING)
        if wanted not in (None, PROTOCOL):
            raise Refused(PROTOCOL_NOT_SUPPORTED, f"protocol: this server speaks {PROTOCOL}, not {wanted!r}")
        described: Result = {
            "protocol": PROTOCOL,
            "name": self.name,
            "capabilities": list(self.capabilities),
            "methods": [method for capability in self.capabilities for method in METHODS[capability]],
        }
        if self.limits:
            described["limits"] = self.limits
        if self.tiers:
            counts = self._counts(self._visible(params))
            described["tiers"] = [
                {"name": name, "kind": kind, "count": counts[name], **self._spill(name)}
                for name, kind in self.tiers.items()
            ]
        if "embeddings" in self.capabilities:
            described["embeddings"] = {"dimensions": self._width, "metric": "cosine", "metrics": ["cosine"]}
        return described

    def remember(self, params: Params) -> Result:
        """Write all of the records or none (§4.2)."""
        entries = required(params, "records", LIST)
        self._keep_to("max_records_per_call", len(entries), "records")
        defaults: Record = {}
        for capability, name in (("scopes", "owner"), ("sessions", "session")):
            if capability in self.capabilities and (value := taken(params, name, STRING)) is not None:
                defaults[name] = value
        width = self._width
        written: dict[str, Record] = {}
        ids: list[str] = []
        for number, entry in enumerate(entries):
            fields = {**defaults, **fields_of(entry, f"records[{number}]", self.capabilities)}
            self._keep_to("max_content_length", len(fields.get("content", "")), f"records[{number}].content")
            self._expect_tier(fields.get("tier"))
            if "embedding" in fields:
                width = _expect_width(width, fields["embedding"])
            known = ChainMap(written, self._records)
            record = self._placed(fields, known)
            if record is not known.get(record["id"]):
                written[record["id"]] = record
            ids.append(record["id"])
        self._commit({"put": list(written.values())})
        return {"ids": ids}

    def recall(self, params: Params) -> Result:
        """Return the records that share most words with a query, or are nearest a vector; else the newest (§4.3)."""
        query, where = taken(params, "query", STRING), taken(params, "where", OBJECT)
        min_score, vector = taken(params, "min_score", NUMBER), None
        if "embeddings" in self.capabilities and (vector := taken(params, "embedding", VECTOR)) is not None:
            _expect_width(self._width, vector)
        limit = self._recall_limit(params)
        newest_first = [record for record in reversed(self._selected(params)) if _fits(record, where or {})]
        ranked = sorted(_scored(newest_first, _words(query or ""), vector), key=lambda scored: -scored[0])
        chosen = [(score, record) for score, record in ranked if min_score is None or score >= min_score][:limit]
        if "salience" in self.capabilities and chosen and not self.read_only:
            chosen = self._touched(chosen)
        return {"records": [{**shown, "score": score} for score, shown in self._shown(chosen, params)]}

    def timeline(self, params: Params) -> Result:
        """Return the newest records in ascending order of created_at (§4.4)."""
        where = taken(params, "where", OBJECT) or {}
        limit = taken(params, "limit", COUNT) or 0
        found = [record for record in self._selected(params) if not self.where_on_timeline or _fits(record, where)]
        found.sort(key=lambda record: record["created_at"])
        newest = [(0.0, record) for record in found[-limit:]]
        return {"records": [shown for _, shown in self._shown(newest, params)]}

    def forget(self, params: Params) -> Result:
        """Delete the records that match all given selectors (§4.5); a query matches records with every word of it."""
        ids, where = taken(params, "ids", STRINGS), taken(params, "where", OBJECT)
        query, tier = taken(params, "query", STRING), taken(params, "tier", STRING)
        prefix = taken(params, "key_prefix", STRING)
        if all(selector is None for selector in (ids, where, query, tier, prefix)):
            raise Refused(INVALID_PARAMS, "expected at least one of ids, query, tier, where and key_prefix")
        for name, value, capability in (("tier", tier, "tiers"), ("key_prefix", prefix, "keys")):
            if value is not None and capability not in self.capabilities:
                raise Refused(CAPABILITY_NOT_SUPPORTED, f"{name}: this server does not implement {capability}")
        words = _words(query or "")
        if query is not None and not words:
            raise Refused(INVALID_PARAMS, "query: expected at least one word, since without any it selects everything")
        gone = [
            record["id"]
            for record in self._selected(params)
            if (ids is None or record["id"] in ids)
            and _fits(record, where or {})
            and words <= _words(record["content"])
        ]
        self._commit({"drop": gone})
        return {"forgotten": len(gone)}

    # --- tiers

    def promote(self, params: Params) -> Result:
        """Move records with their groups (§4.6)."""
        ids, tier = required(params, "ids", STRINGS), required(params, "tier", STRING)
        gain = taken(params, "salience", WEIGHT)
        self._expect_tier(tier)
        chosen = [record for id, record in self._records.items() if id in ids and record["tier"] != tier]
        moved = [{**record, "tier": tier} for record in self._with_groups(chosen)]
        if "salience" in self.capabilities and gain is not None:
            moved = [{**record, "salience": record["salience"] + gain} for record in moved]
        self._commit({"put": moved})
        return {"promoted": len(moved)}

    def consolidate(self, params: Params) -> Result:
        """Move nothing: no tier has a capacity (§4.7)."""
        return self._reorganized(0, params)

    # --- salience, keys, sessions

    def reinforce(self, params: Params) -> Result:
        """Raise the salience of records (§4.8)."""
        ids, amount = required(params, "ids", STRINGS), taken(params, "amount", NUMBER)
        gain = 1 if amount is None else amount
        raised = [
            {**record, "salience": max(0, record["salience"] + gain)}
            for id, record in self._records.items()
            if id in ids
        ]
        self._commit({"put": raised})
        return {"reinforced": len(raised)}

    def fetch(self, params: Params) -> Result:
        """Return the record at a key: the caller's, else the one without an owner, else null (§4.9)."""
        key, owner = required(params, "key", NAME), self._owner(params)
        there = _at(key, owner, self._records.values()) or _at(key, None, self._records.values())
        found = self._shown([(0.0, there)] if there is not None else [], params)
        return {"record": found[0][1] if found else None}

    def session_list(self, params: Params) -> Result:
        """Return the conversations, each with the number of its records (§4.10)."""
        sessions: dict[str, list[Record]] = {}
        for record in self._visible(params):
            if record.get("session"):
                sessions.setdefault(record["session"], []).append(record)
        listed: list[Result] = []
        for session, records in sessions.items():
            births = [record["created_at"] for record in records]
            entry = {"session": session, "records": len(records), "opened_at": min(births), "touched_at": max(births)}
            listed.append({**entry, "tiers": self._counts(records)} if self.tiers else entry)
        return {"sessions": listed}

    def session_close(self, params: Params) -> Result:
        """Move a conversation with its groups out of the tier that spills (§4.11)."""
        session = required(params, "session", NAME)
        leaving = [
            record
            for record in self._visible(params)
            if record.get("session") == session and self._spill(record.get("tier"))
        ]
        moved = [{**record, "tier": self._spill(record["tier"])["spill_to"]} for record in self._with_groups(leaving)]
        self._commit({"put": moved})
        return {**self._reorganized(len(moved), params), "closed": session, "flushed": len(moved)}

    # --- messages

    def _read(self, message: bytes) -> dict[str, Any]:
        """Return the request or notification in a message. Raises Refused."""
        try:
            text = message.decode(errors="replace" if self.like_javascript else "strict")
            if self.like_javascript:
                text = javascript.reencoded(text)
            request = json.loads(text, parse_int=_integer, parse_constant=_no_such_word)
        except RecursionError:
            raise Refused(INVALID_REQUEST, "the message nests too deeply") from None
        except ValueError as problem:
            raise Refused(PARSE_ERROR, f"the message is not JSON: {problem}") from None
        if not isinstance(request, dict):
            raise Refused(INVALID_REQUEST, "expected one JSON-RPC request object; there are no batches")
        has_id = request.get("id") is None or ID.fits(request["id"])
        if request.get("jsonrpc") != "2.0" or not isinstance(request.get("method"), str) or not has_id:
            raise Refused(INVALID_REQUEST, 'expected "jsonrpc": "2.0", a method and an id that is a string or a number')
        return request

    def _written(self, response: Result) -> bytes:
        text = json.dumps(response)
        return (javascript.reencoded(text) if self.like_javascript else text).encode()

    # --- the records

    def _commit(self, change: Change) -> None:
        """Make a change, first in the journal."""
        if not any(change.values()):
            return
        if self._journal is not None:
            self._journal.append(change)
        self._make_true(change)

    def _make_true(self, change: Change) -> None:
        for record in change.get("put", ()):
            self._records[record["id"]] = record
            if self._width is None and "embedding" in record:
                self._width = len(record["embedding"])
        for id in change.get("drop", ()):
            del self._records[id]

    def _placed(self, fields: Record, known: Mapping[str, Record]) -> Record:
        """Return the record that a write makes of these fields, or the one in `known` if nothing changes."""
        key, owner = fields.get("key"), fields.get("owner")
        there = known.get(fields.get("id", ""))
        if there is not None:
            is_at_its_key = key is not None and (key, owner) == (there.get("key"), there.get("owner"))
            if not is_at_its_key or fields.get("content", "") == there["content"]:
                return there
        elif key is not None:
            there = _at(key, owner, known.values())
        if there is not None:
            earned = ("tier", "salience", "access_count", "accessed_at")
            kept: Record = {name: there[name] for name in earned if name in there}
            born = {"id": there["id"], "created_at": there["created_at"], "revision": there["revision"] + 1}
            return {"content": "", **kept, **fields, **born}
        given: Record = {"id": str(uuid.uuid4()), "content": "", "created_at": _now()}
        if "tiers" in self.capabilities:
            given["tier"] = next(
                (name for name, kind in self.tiers.items() if kind == "working"), next(iter(self.tiers))
            )
        if "salience" in self.capabilities:
            given |= {"salience": 1, "access_count": 0}
        if key is not None:
            given["revision"] = 0
        return {**given, **fields}

    def _touched(self, scored: Iterable[tuple[float, Record]]) -> list[tuple[float, Record]]:
        at = _now()
        touched = [
            (score, {**record, "access_count": record["access_count"] + 1, "accessed_at": at})
            for score, record in scored
        ]
        self._commit({"put": [record for _, record in touched]})
        return touched

    # --- the records that a call selects

    def _owner(self, params: Params) -> str | None:
        owner: str | None = taken(params, "owner", STRING) if "scopes" in self.capabilities else None
        return owner

    def _visible(self, params: Params) -> list[Record]:
        """Return all records without an owner in the call; else the owner's, and those without an owner (§6)."""
        owner = self._owner(params)
        records = self._records.values()
        return [record for record in records if owner is None or record.get("owner") in (None, owner)]

    def _selected(self, params: Params) -> list[Record]:
        """Return the visible records in the given tier and beneath the given key, in the order written."""
        found = self._visible(params)
        if "tiers" in self.capabilities and (tier := taken(params, "tier", STRING)) is not None:
            self._expect_tier(tier)
            found = [record for record in found if record["tier"] == tier]
        if "keys" in self.capabilities and (prefix := taken(params, "key_prefix", STRING)) is not None:
            found = [record for record in found if _is_beneath(prefix, record.get("key"))]
        return found

    def _shown(self, scored: Iterable[tuple[float, Record]], params: Params) -> list[tuple[float, Record]]:
        """Return records as a caller sees them: with vectors only on request (§3.7)."""
        if "embeddings" not in self.capabilities or taken(params, "embeddings", FLAG):
            return list(scored)
        return [(score, {name: record[name] for name in record if name != "embedding"}) for score, record in scored]

    def _with_groups(self, records: Iterable[Record]) -> list[Record]:
        """Return the records with the others of their groups: same owner, same name, same tier (§3.4)."""
        ids: set[str] = set()
        groups: set[tuple[Any, ...]] = set()
        for record in records:
            ids.add(record["id"])
            if record.get("group") is not None:
                groups.add(_group(record))
        return [record for record in self._records.values() if record["id"] in ids or _group(record) in groups]

    # --- what the server declares

    def _spill(self, tier: str | None) -> dict[str, str]:
        """Return where a working tier spills to: the next tier that is not procedural. Empty for other kinds."""
        names = list(self.tiers)
        if self.tiers.get(tier or "") != "working":
            return {}
        onward = [name for name in names[names.index(tier or "") + 1 :] if self.tiers[name] != "procedural"]
        return {"spill_to": onward[0]} if onward else {}

    def _counts(self, records: Iterable[Record]) -> dict[str, int]:
        counts = dict.fromkeys(self.tiers, 0)
        for record in records:
            counts[record["tier"]] += 1
        return counts

    def _reorganized(self, moved: int, params: Params) -> Result:
        counts = self._counts(self._visible(params)) if self.tiers else {}
        return {"moved": moved, "promoted": 0, "dropped": 0, "summarized": 0, "counts": counts}

    def _recall_limit(self, params: Params) -> int | None:
        """Return the most records that a recall may return; None without a limit (§4.3)."""
        limit = taken(params, "limit", COUNT)
        most = self.limits.get("max_recall_limit")
        if limit is None:
            return _DEFAULT_LIMIT if most is None else min(_DEFAULT_LIMIT, most)
        self._keep_to("max_recall_limit", limit, "limit")
        return limit or most

    def _keep_to(self, name: str, amount: int, place: str) -> None:
        most = self.limits.get(name)
        if most is not None and amount > most:
            raise Refused(QUOTA_EXCEEDED, f"{place}: expected at most {name}={most}, got {amount}")

    def _expect_tier(self, tier: str | None) -> None:
        if tier is not None and tier not in self.tiers:
            raise Refused(UNKNOWN_TIER, f"tier: expected one of {', '.join(self.tiers)}, got {tier!r}")


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _fits(record: Record, where: Mapping[str, Any]) -> bool:
    """Return whether each named field, or else metadata member, equals the wanted value, or one of several (§5.2)."""
    metadata = record.get("metadata") or {}
    for name, wanted in where.items():
        value = record[name] if name in record else metadata.get(name)
        if value not in wanted if isinstance(wanted, list) else value != wanted:
            return False
    return True


def _is_beneath(prefix: str, key: str | None) -> bool:
    return key is not None and (key == prefix or key.startswith(prefix and prefix.removesuffix("/") + "/"))


def _at(key: str, owner: str | None, records: Iterable[Record]) -> Record | None:
    """Return the owner's record at a key, of which there is at most one (§3.6)."""
    return next((record for record in records if (record.get("key"), record.get("owner")) == (key, owner)), None)


def _group(record: Record) -> tuple[Any, ...]:
    return record.get("owner"), record.get("group"), record.get("tier")


def _scored(newest_first: Sequence[Record], words: set[str], vector: list[float] | None) -> list[tuple[float, Record]]:
    """Return the records that match the words or the vector, with scores in [0, 1]; without either, all by recency."""
    if not words and vector is None:
        return [(1 / (1 + age), record) for age, record in enumerate(newest_first)]
    scored = []
    for record in newest_first:
        shared = len(words & _words(record["content"]))
        embedding = record.get("embedding") if vector is not None else None
        if shared or embedding is not None:
            likeness = [shared / len(words)] if words else []
            if vector is not None:
                likeness.append(0.0 if embedding is None else (1 + _cosine(vector, embedding)) / 2)
            scored.append((sum(likeness) / len(likeness), record))
    return scored


def _cosine(one: list[float], other: list[float]) -> float:
    length, other_length = math.hypot(*one), math.hypot(*other)
    if 0.0 in (length, other_length):
        return 0.0
    cosine = sum(a / length * (b / other_length) for a, b in zip(one, other, strict=True))
    return max(-1.0, min(1.0, cosine))


def _expect_width(width: int | None, vector: list[float]) -> int:
    """Return the width of all vectors: this one's, if it is the first. Raises Refused with EMBEDDING_MISMATCH."""
    if width not in (None, len(vector)):
        raise Refused(EMBEDDING_MISMATCH, f"embedding: expected {width} numbers, got {len(vector)}")
    return len(vector)


def _expect_among(known: Collection[str], names: Iterable[str], what: str) -> None:
    unknown = sorted(set(names).difference(known))
    if unknown:
        raise ValueError(f"{what}: expected some of {', '.join(known)}, got {', '.join(unknown)}")


def _integer(digits: str) -> int | float:
    """Return the integer; infinity for one that Python does not read, which is refused where it would be stored."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _no_such_word(word: str) -> Never:
    raise ValueError(f"JSON has no {word}")


# --- the command


def main(kind: type[CoreOnly] = CoreOnly, arguments: Sequence[str] | None = None) -> None:
    """Serve one server of this kind, on stdio or, if asked for, over HTTP."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.http is not None and "scopes" in options.capability:
        parser.error("scopes cannot be declared over HTTP: there is nothing here that tells callers apart (§6)")
    try:
        server = kind(
            options.file,
            capabilities=options.capability,
            limits=dict(options.limit),
            tiers=dict(options.tier) or TWO_TIERS,
            like_javascript=options.like_javascript,
            where_on_timeline=options.where_on_timeline,
            read_only=options.read_only,
        )
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    if options.http is None:
        over_stdio(server.answer)
    else:
        serve_http(server.answer, *options.http)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="An A2M 0.1 server of core alone, and of what else is asked for.")
    parser.add_argument("--file", type=Path, metavar="PATH", help="keep the records in this file")
    parser.add_argument("--http", type=_address, metavar="HOST:PORT", help="serve HTTP there; without it, stdio")
    parser.add_argument("--capability", action="append", default=[], choices=CAPABILITIES, help="declare it, too")
    parser.add_argument("--limit", action="append", default=[], type=_limit, metavar="NAME=NUMBER", help="declare it")
    parser.add_argument("--tier", action="append", default=[], type=_pair, metavar="NAME=KIND", help="have this tier")
    for flag, does in (
        ("--like-javascript", "re-encode every message as JavaScript does"),
        ("--where-on-timeline", "keep to where on memory/timeline"),
        ("--read-only", "take no writes"),
    ):
        parser.add_argument(flag, action="store_true", help=does)
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _limit(text: str) -> tuple[str, int]:
    name, value = _pair(text)
    return name, int(value)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    main()
