"""A correct A2M 0.1 server with all eleven capabilities, in memory and small; `wrong_servers` derives from it.

Each method is small and implements one rule or a few, so that a wrong server replaces a single method.
"""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, ClassVar

Record = dict[str, Any]
Params = dict[str, Any]

PROTOCOL = "a2m/0.1"
METHODS: dict[str, tuple[str, ...]] = {
    "core": ("describe", "remember", "recall", "timeline", "forget"),
    "tiers": ("promote", "consolidate"),
    "salience": ("reinforce",),
    "scopes": (),
    "sessions": ("session/list", "session/close"),
    "keys": ("fetch",),
    "embeddings": (),
    "external": (),
    "events": ("events", "events/subscribe", "events/unsubscribe"),
    "summarize": ("summarize",),
    "prompt": (),
}
OPTIONAL_FIELDS = {
    "salience": ("salience",),
    "scopes": ("owner",),
    "sessions": ("session",),
    "keys": ("key",),
    "embeddings": ("embedding",),
    "external": ("uri", "media_type"),
    "tiers": ("tier",),
}
SELECTORS = ("ids", "query", "tier", "where", "key_prefix")


class Refused(Exception):
    """An error that the server answers."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """One store. `http` and `tokens` tell how it is reached; over HTTP the caller is the token's owner."""

    capabilities: ClassVar[tuple[str, ...]] = tuple(METHODS)
    limits: ClassVar[dict[str, int]] = {
        "max_records_per_call": 100,
        "max_recall_limit": 200,
        "max_content_length": 10_000,
    }
    tiers: ClassVar[dict[str, Record]] = {
        "working": {"kind": "working", "capacity": 6, "per_session": True, "spill_to": "episodic"},
        "episodic": {"kind": "episodic", "promote_to": "semantic"},
        "semantic": {"kind": "semantic"},
        "procedural": {"kind": "procedural"},
    }
    read_only: ClassVar[bool] = False
    retained: ClassVar[int] = 500

    def __init__(self, *, http: bool = False, tokens: dict[str, str] | None = None) -> None:
        self.http = http
        self.tokens = tokens or {}
        self.records: list[Record] = []
        self.log: list[tuple[str | None, Record]] = []  # an event's owner; None: every caller sees it
        self.log_begins = 0
        self.subscription: Params | None = None
        self.pushed = 0
        self.principal: str | None = None
        self.assigned = 0
        self.lock = Lock()

    # --- messages

    def declared(self) -> list[str]:
        return [name for name in self.capabilities if name != "scopes" or not self.http or self.tokens]

    def answer(self, body: bytes, principal: str | None = None) -> bytes | None:
        """Return the response to one message; None to a notification."""
        with self.lock:
            self.principal = principal
            try:
                message = json.loads(body)
            except ValueError:
                return self.error(None, -32700, "not JSON")
            return self.answer_message(message)

    def answer_message(self, message: Any) -> bytes | None:
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return self.error(message.get("id") if isinstance(message, dict) else None, -32600, "no request")
        id = message.get("id")
        try:
            result = self.carry_out(message["method"], message.get("params", {}))
        except Refused as refused:
            return None if "id" not in message else self.error(id, refused.code, str(refused))
        return None if "id" not in message else self.rendered({"id": id, "result": result})

    def error(self, id: Any, code: int, text: str) -> bytes:
        return self.rendered({"id": id, "error": {"code": code, "message": text}})

    def rendered(self, message: Record) -> bytes:
        return json.dumps({"jsonrpc": "2.0", **message}).encode()

    def carry_out(self, method: str, params: Any) -> Record:
        name = method.removeprefix("memory/")
        owning = next((capability for capability, names in METHODS.items() if name in names), None)
        if owning is None or not method.startswith("memory/"):
            raise Refused(-32601, f"no method {method}")
        if owning not in self.declared():
            raise self.not_declared(owning)
        if not isinstance(params, dict):
            raise Refused(-32602, "params by name, please")
        params = {**params, **self.asserted(params)}
        result: Record = getattr(self, name.replace("/", "_"))(params)
        return result

    def not_declared(self, capability: str) -> Refused:
        return Refused(-32003, f"{capability} is not declared")

    def asserted(self, params: Params) -> Params:
        """Return the owner that replaces the one in the parameters."""
        if not self.http:
            return {}
        if params.get("owner") not in (None, self.principal):
            raise Refused(-32005, "another's")
        return {"owner": self.principal}

    # --- core

    def describe(self, params: Params) -> Record:
        declared = self.declared()
        result: Record = {
            "protocol": PROTOCOL,
            "name": "small",
            "capabilities": declared,
            "methods": [f"memory/{name}" for capability in declared for name in METHODS[capability]],
            "limits": self.limits,
        }
        seen = self.visible(params)
        more: dict[str, Any] = {
            "tiers": [{"name": name, "count": self.count(seen, name), **tier} for name, tier in self.tiers.items()],
            "embeddings": {"dimensions": self.width(), "metric": "cosine", "metrics": ["cosine"]},
            "events": {"push": self.pushes()},
            "summarize": {"model": None},
            "prompt": {"styles": ["facts"], "methods": ["template", "none"]},
        }
        return result | {name: value for name, value in more.items() if name in declared}

    def count(self, records: list[Record], tier: str) -> int:
        return sum(record["tier"] == tier for record in records)

    def pushes(self) -> bool:
        return not self.http

    def remember(self, params: Params) -> Record:
        if self.read_only:
            raise Refused(-32004, "read-only")
        given = self.wanted(params, "records", list)
        if len(given) > self.limits["max_records_per_call"]:
            raise Refused(-32006, "too many records")
        drafts = [self.draft(record, params) for record in given]
        ids = [self.write(draft) for draft in drafts]
        self.spill()
        return {"ids": ids}

    def draft(self, given: Any, params: Params) -> Record:
        """Return a checked draft of a record. Raises Refused."""
        if not isinstance(given, dict):
            raise Refused(-32602, "a record is an object")
        if given.get("tier") is not None:
            self.check_tier_on_write(given["tier"])
        content = given.get("content", "")
        if not isinstance(content, str) or not ({"content", "uri", "embedding"} & given.keys()):
            raise Refused(-32602, "content is a string")
        if len(content) > self.limits["max_content_length"]:
            raise Refused(-32602, "too long")
        if not isinstance(given.get("metadata", {}), dict):
            raise Refused(-32602, "metadata is an object")
        if given.get("embedding") is not None:
            self.check_width(given["embedding"])
        kept = ["id", "role", "metadata", "group"]
        for capability in self.declared():
            kept += OPTIONAL_FIELDS.get(capability, ())
        draft = {"content": content, **{field: given[field] for field in kept if field in given}}
        for field in ("owner", "session"):
            if field in kept and draft.get(field) is None and params.get(field) is not None:
                draft[field] = params[field]
        return draft

    def check_tier_on_write(self, tier: str) -> None:
        if "tiers" not in self.declared():
            raise Refused(-32003, "tiers is not declared")
        self.check_tier(tier)

    def check_tier(self, tier: Any) -> None:
        if tier not in self.tiers:
            raise Refused(-32002, f"no tier {tier}")

    def width(self) -> int | None:
        return next((len(record["embedding"]) for record in self.records if record.get("embedding")), None)

    def check_width(self, vector: list[float]) -> None:
        if self.width() not in (None, len(vector)):
            raise Refused(-32008, "another width")

    def write(self, draft: Record) -> str:
        """Store a draft; return its id."""
        there = self.holder(draft)
        if there is not None:
            kept = {name: there[name] for name in ("id", "created_at", "access_count")}
            replaced = {"salience": 1, "tier": there["tier"], **draft, **kept, "revision": there["revision"] + 1}
            there.clear()
            there.update(replaced)
            self.tell_written(there)
            return str(there["id"])
        if self.with_id(draft.get("id")) is not None:
            return str(draft["id"])
        record = {"id": self.new_id(), "tier": "working", "salience": 1, "revision": 0, "access_count": 0, **draft}
        record["created_at"] = self.now()
        self.records.append(record)
        self.tell_written(record)
        return str(record["id"])

    def new_id(self) -> str:
        self.assigned += 1
        return f"r{self.assigned}"

    def now(self) -> Any:
        moment = time.time()
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment * 1000) % 1000:03d}Z"

    def with_id(self, id: Any) -> Record | None:
        return next((record for record in self.records if id is not None and record["id"] == id), None)

    def holder(self, draft: Record) -> Record | None:
        """Return the record that has the draft's key already."""
        if draft.get("key") is None:
            return None
        mine = (draft["key"], draft.get("owner"))
        return next((record for record in self.records if (record.get("key"), record.get("owner")) == mine), None)

    def recall(self, params: Params) -> Record:
        if not isinstance(params.get("query", ""), str):
            raise Refused(-32602, "query is a string")
        if params.get("embedding") is not None:
            self.check_width(params["embedding"])
        limit = self.recall_limit(params)
        scored = [(self.score(record, params), record) for record in self.selected(params)]
        best = self.ranked([pair for pair in scored if pair[0] > 0])[:limit]
        for _, record in best:
            record["access_count"] += 1
        found = [{**self.shown(record, params), "score": score} for score, record in best]
        return self.with_prompt({"records": found}, params)

    def recall_limit(self, params: Params) -> int:
        limit = self.limit(params) or 8
        if limit > self.limits["max_recall_limit"]:
            raise Refused(-32602, "limit is too high")
        return limit

    def limit(self, params: Params) -> int | None:
        if not isinstance(params.get("limit", 1), int):
            raise Refused(-32602, "limit is an integer")
        return params.get("limit")

    def ranked(self, scored: list[tuple[float, Record]]) -> list[tuple[float, Record]]:
        return sorted(scored, key=lambda pair: -pair[0])

    def score(self, record: Record, params: Params) -> float:
        vector, words = params.get("embedding"), set(re.findall(r"\w+", params.get("query") or ""))
        if vector is not None:
            return (1 + cosine(vector, record["embedding"])) / 2 if record.get("embedding") else 0
        if not words:
            return 1
        return len(words & set(re.findall(r"\w+", record["content"]))) / len(words)

    def timeline(self, params: Params) -> Record:
        limit = self.limit(params)
        ordered = sorted(self.selected(params), key=lambda record: record["created_at"])
        found = [self.shown(record, params) for record in self.window(ordered, limit)]
        return self.with_prompt({"records": found}, params)

    def window(self, ordered: list[Record], limit: int | None) -> list[Record]:
        return ordered[-limit:] if limit else ordered

    def shown(self, record: Record, params: Params) -> Record:
        hidden = {"embedding"} if not params.get("embeddings") else set()
        for capability, fields in OPTIONAL_FIELDS.items():
            if capability not in self.declared():
                hidden |= set(fields)
        return {name: value for name, value in record.items() if name not in hidden}

    def forget(self, params: Params) -> Record:
        if self.read_only:
            raise Refused(-32004, "read-only")
        if not any(selector in params for selector in SELECTORS):
            raise Refused(-32602, "a selector, please")
        gone = self.forgettable(params)
        self.records = [record for record in self.records if record not in gone]
        self.tell_forgotten(gone)
        return {"forgotten": len(gone)}

    def forgettable(self, params: Params) -> list[Record]:
        gone = self.selected(params)
        if params.get("query"):
            gone = [record for record in gone if self.score(record, params) > 0.5]
        return gone

    # --- selecting

    def visible(self, params: Params) -> list[Record]:
        if "scopes" not in self.declared() or params.get("owner") is None:
            return list(self.records)
        return [record for record in self.records if record.get("owner") in (None, params["owner"])]

    def selected(self, params: Params) -> list[Record]:
        """Return the records that the caller can see and its selectors select."""
        if params.get("tier") is not None:
            self.check_tier(params["tier"])
        where, ids, prefix = params.get("where") or {}, params.get("ids"), params.get("key_prefix")
        if not isinstance(where, dict) or not isinstance(ids, list | None):
            raise Refused(-32602, "where is an object, ids a list")
        return [
            record
            for record in self.visible(params)
            if (ids is None or record["id"] in ids)
            and (params.get("tier") in (None, record["tier"]))
            and (prefix is None or self.is_beneath(record.get("key") or "", prefix))
            and all(self.matches(record, name, wanted) for name, wanted in where.items())
        ]

    def matches(self, record: Record, name: str, wanted: Any) -> bool:
        value = record.get(name, record.get("metadata", {}).get(name))
        return value in wanted if isinstance(wanted, list) else bool(value == wanted)

    def is_beneath(self, key: str, prefix: str) -> bool:
        return key == prefix or key.startswith(prefix.removesuffix("/") + "/")

    def wanted(self, params: Params, name: str, kind: type) -> Any:
        if not isinstance(params.get(name), kind) or params[name] == "":
            raise Refused(-32602, f"{name} is required")
        return params[name]

    # --- tiers, salience, sessions, keys

    def promote(self, params: Params) -> Record:
        ids, tier = self.wanted(params, "ids", list), self.wanted(params, "tier", str)
        self.check_tier(tier)
        moving = [record for id in ids if (record := self.with_id(id)) is not None and record["tier"] != tier]
        for record in moving:
            record["salience"] += params.get("salience", 0)
        whole = [mate for record in moving for mate in self.together(record)]
        for record in whole:
            record["tier"] = tier
        if whole:
            self.tell({"kind": "promoted", "ids": [record["id"] for record in whole], "tier": tier}, whole)
        return {"promoted": len(whole)}

    def together(self, record: Record) -> list[Record]:
        """Return a record and the rest of its group, in its tier."""
        if record.get("group") is None:
            return [record]
        mine = (record["group"], record["tier"], record.get("session"))
        return [one for one in self.records if (one.get("group"), one["tier"], one.get("session")) == mine]

    def spill(self) -> int:
        """Move records beyond the capacity, whole groups at a time, oldest first."""
        moved = 0
        working = self.tiers["working"]
        for session in {record.get("session") for record in self.records}:
            while len(held := self.held(session)) > working["capacity"]:
                for record in self.together(held[0]):
                    record["tier"] = working["spill_to"]
                    moved += 1
        return moved

    def held(self, session: str | None) -> list[Record]:
        return [record for record in self.records if record["tier"] == "working" and record.get("session") == session]

    def consolidate(self, params: Params) -> Record:
        return self.consolidated(self.spill())

    def consolidated(self, moved: int) -> Record:
        did = {"moved": moved, "promoted": 0, "dropped": 0, "summarized": 0}
        self.tell({"kind": "consolidated", **did}, [])
        return {**did, "counts": {name: self.count(self.records, name) for name in self.tiers}}

    def reinforce(self, params: Params) -> Record:
        found = [record for id in self.wanted(params, "ids", list) if (record := self.with_id(id)) is not None]
        seen = [record for record in found if record in self.visible(params)]
        for record in seen:
            record["salience"] += params.get("amount", 1)
        return {"reinforced": len(seen)}

    def session_list(self, params: Params) -> Record:
        sessions: dict[str, int] = {}
        for record in self.visible(params):
            if record.get("session") is not None:
                sessions[record["session"]] = sessions.get(record["session"], 0) + 1
        return {"sessions": [{"session": name, "records": count} for name, count in sessions.items()]}

    def session_close(self, params: Params) -> Record:
        session = self.wanted(params, "session", str)
        leaving = [record for record in self.visible(params) if record in self.held(session)]
        for record in leaving:
            record["tier"] = self.tiers["working"]["spill_to"]
        result = self.consolidated(len(leaving))
        self.tell({"kind": "session_closed", "session": session}, leaving)
        return {**result, "closed": session, "flushed": len(leaving)}

    def fetch(self, params: Params) -> Record:
        key = self.wanted(params, "key", str)
        found = [record for record in self.visible(params) if record.get("key") == key]
        found.sort(key=lambda record: record.get("owner") is None)
        return {"record": self.shown(found[0], params) if found else self.nothing_at(key)}

    def nothing_at(self, key: str) -> Record | None:
        return None

    # --- events

    def tell(self, event: Record, about: list[Record]) -> None:
        owners = {record.get("owner") for record in about}
        self.log.append((owners.pop() if len(owners) == 1 else None, {**event, "at": self.now()}))
        while len(self.log) > self.retained:
            self.log.pop(0)
            self.log_begins += 1

    def tell_written(self, record: Record) -> None:
        applying = {name: record[name] for name in ("tier", "session", "key") if record.get(name) is not None}
        revision = {"revision": record["revision"]} if "key" in record else {}
        self.tell({"kind": "written", "id": record["id"], **applying, **revision}, [record])

    def tell_forgotten(self, gone: list[Record]) -> None:
        self.tell({"kind": "forgotten", "count": len(gone), "ids": [record["id"] for record in gone]}, gone)

    def told(self, params: Params, owner: str | None, event: Record) -> bool:
        seen = "scopes" not in self.declared() or params.get("owner") is None or owner in (None, params["owner"])
        return seen and event["kind"] in (params.get("kinds") or [event["kind"]])

    def events(self, params: Params) -> Record:
        end = self.log_begins + len(self.log)
        cursor = params.get("cursor", str(end))
        if not cursor.isdigit():
            raise Refused(-32602, "no cursor of ours")
        place = max(int(cursor), self.log_begins)
        events: list[Record] = []
        limit = params.get("limit") or 100
        while place < end and len(events) < limit:
            owner, event = self.log[place - self.log_begins]
            events += [event] if self.told(params, owner, event) else []
            place += 1
        return {"events": events, "cursor": str(place), "more": place < end, **self.reset(int(cursor))}

    def reset(self, cursor: int) -> Record:
        return {"reset": True} if cursor < self.log_begins else {}

    def events_subscribe(self, params: Params) -> Record:
        if self.http:
            raise Refused(-32003, "no push over HTTP")
        self.subscription = params
        self.pushed = self.log_begins + len(self.log)
        return {"subscribed": True}

    def events_unsubscribe(self, params: Params) -> Record:
        self.subscription = None
        return {"subscribed": False}

    def notifications(self) -> list[bytes]:
        """Return the events since the last call, as notifications."""
        if self.subscription is None:
            return []
        since, self.pushed = max(self.pushed, self.log_begins), self.log_begins + len(self.log)
        new = self.log[since - self.log_begins :]
        return [
            self.rendered({"method": "memory/event", "params": event})
            for owner, event in new
            if self.told(self.subscription, owner, event)
        ]

    # --- summaries and text

    def summarize(self, params: Params) -> Record:
        if self.read_only:
            raise Refused(-32004, "read-only")
        if not any(selector in params for selector in SELECTORS):
            raise Refused(-32602, "a selector, please")
        into = params.get("into", "semantic")
        self.check_tier(into)
        read = self.selected(params)
        if not read:
            return {"records": [], "read": 0, "written": 0}
        text = max((record["content"] for record in read), key=len)
        place = {name: params[name] for name in ("key", "owner") if params.get(name) is not None}
        record = self.with_id(self.write({"content": text, "tier": into, **place}))
        assert record is not None
        return {"records": [self.shown(record, params)], "read": len(read), "written": 1}

    def with_prompt(self, result: Record, params: Params) -> Record:
        asked = params.get("prompt")
        if "prompt" not in self.declared() or asked is None or asked is False:
            return result
        options: Params = {} if asked is True else asked
        self.check_text(options)
        if options.get("method") == "none":
            return result
        text, ids = self.text(result["records"], options.get("budget"))
        return {**result, "prompt": text, "prompt_ids": ids}

    def check_text(self, options: Params) -> None:
        if options.get("method", "template") not in ("template", "none") or options.get("model") is not None:
            raise Refused(-32602, "not offered")

    def text(self, records: list[Record], budget: int | None) -> tuple[str, list[str]]:
        lines: list[str] = []
        ids: list[str] = []
        for record in records:
            line = f"- {record['content']}"
            if budget is None or len("\n".join([*lines, line])) <= budget:
                lines.append(line)
                ids.append(record["id"])
        return "\n".join(lines), ids

    # --- bindings

    def serve_stdio(self) -> int:
        """Answer lines until stdin ends; return the exit code."""
        for line in sys.stdin.buffer:
            if line.strip():
                for message in self.lines_for(line):
                    self.put(message)
        return 0

    def lines_for(self, line: bytes) -> Iterable[bytes]:
        """Return the answer to one line: the response, and the notifications after it."""
        answer = self.answer(line)
        return ([] if answer is None else [answer]) + self.notifications()

    def put(self, message: bytes) -> None:
        sys.stdout.buffer.write(message + b"\n")
        sys.stdout.buffer.flush()

    def refusal(self, headers: Any) -> tuple[int, bytes] | None:
        """Return the status and body with which an HTTP request is refused; None if it is admitted."""
        if self.is_foreign(headers):
            return 403, b""
        if self.tokens and self.caller(headers) is None:
            return 401, b""
        if headers.get("A2M-Protocol-Version") not in (None, PROTOCOL):
            return 400, self.error(None, -32007, "another version")
        return None

    def is_foreign(self, headers: Any) -> bool:
        return headers.get("Origin") is not None

    def caller(self, headers: Any) -> str | None:
        kind, _, token = (headers.get("Authorization") or "").partition(" ")
        return self.tokens.get(token) if kind == "Bearer" else None

    def post(self, body: bytes, headers: Any) -> tuple[int, bytes]:
        """Return the status and body for a POST."""
        refusal = self.refusal(headers)
        if refusal is not None:
            return refusal
        answer = self.answer(body, self.caller(headers))
        return (self.status_of(answer), answer) if answer is not None else (202, b"")

    def status_of(self, answer: bytes) -> int:
        return 200

    def get(self, path: str, headers: Any) -> tuple[int, bytes]:
        """Return the status and body for a GET."""
        if path == "/.well-known/a2m-server.json":
            return self.refusal(headers) or (200, json.dumps(self.describe({})).encode())
        return 405, b""


def cosine(one: list[float], other: list[float]) -> float:
    size = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / size if size else 0.0


def listening(server: Server, port: int = 0) -> ThreadingHTTPServer:
    """Return an HTTP server on a port of loopback, by default a free one; the caller runs `serve_forever`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(lambda: server.post(body, self.headers))

        def do_GET(self) -> None:
            self._send(lambda: server.get(self.path, self.headers))

        def _send(self, made: Callable[[], tuple[int, bytes]]) -> None:
            status, body = made()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
