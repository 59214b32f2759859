"""tier.py FILE: an A2M memory server with the protocol's core, in one process, with one journal on disk."""

import fcntl
import json
import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

CORE = ["describe", "remember", "recall", "timeline", "forget"]
OPTIONAL = [
    *("promote", "consolidate", "reinforce", "session/list", "session/close", "fetch"),
    *("events", "events/subscribe", "events/unsubscribe", "summarize"),
]
TYPES = {
    "records": list,
    "ids": list,
    "query": str,
    "where": dict,
    "limit": int,
    "content": str,
    "id": str,
    "role": str,
    "group": str,
    "metadata": dict,
}


class Rejected(Exception):
    """A call that is answered with an error."""

    def __init__(self, code, message):
        self.error = {"code": code, "message": message}


def check(fields):
    for name, expected in TYPES.items():
        value = fields.get(name)
        if value is not None and (type(value) is not expected or (expected is int and value < 0)):
            raise Rejected(-32602, f"{name}: expected {expected.__name__}, got {json.dumps(value)[:80]}")


class Tier:
    def __init__(self, path):
        self.records = {}
        self.journal = Path(path).open("a+b")  # noqa: SIM115
        fcntl.flock(self.journal, fcntl.LOCK_EX)  # an earlier process may still be writing its last line
        self.journal.seek(0)
        complete = 0
        for line in self.journal:
            if line.endswith(b"\n"):
                self.apply(json.loads(line))
                complete += len(line)
        self.journal.truncate(complete)  # a crash cut off the last line, so that call was never answered

    def apply(self, change):
        self.records.update({record["id"]: record for record in change.get("written", [])})
        for id in change.get("forgotten", []):
            self.records.pop(id, None)

    def save(self, change):
        """Write a change to the disk, then apply it: the answer promises that it is on the disk."""
        self.journal.write(json.dumps(change).encode() + b"\n")
        self.journal.flush()
        os.fsync(self.journal.fileno())
        self.apply(change)

    def describe(self, params):
        methods = [f"memory/{name}" for name in CORE]
        return {"protocol": "a2m/0.1", "name": "tier.py", "capabilities": ["core"], "methods": methods}

    def remember(self, params):
        records = params.get("records")
        if records is None or not all(isinstance(record, dict) and "content" in record for record in records):
            raise Rejected(-32602, "records: expected an array of objects with content")
        for record in records:
            check(record)
        if any("tier" in record for record in records):
            raise Rejected(-32003, "this server has no tiers")
        ids, new = [], {}
        for record in records:
            id = record.get("id") or uuid.uuid4().hex
            ids.append(id)
            if id not in self.records:  # a known id changes nothing, so that a write can be repeated
                now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
                fields = {name: record[name] for name in ("content", "role", "metadata", "group") if name in record}
                new.setdefault(id, {"id": id, "created_at": now, **fields})
        self.save({"written": list(new.values())})
        return {"ids": ids}

    def recall(self, params):
        words = set((params.get("query") or "").lower().split())
        found = []
        for age, record in enumerate(reversed(self.matching(params))):
            shared = len(words & set(record["content"].lower().split()))
            if shared or not words:
                found.append({**record, "score": shared / len(words) if words else 1 / (1 + age)})
        found.sort(key=lambda record: -record["score"])
        return {"records": found[: params.get("limit", 8) or None]}

    def timeline(self, params):
        return {"records": self.matching(params)[-(params.get("limit") or 0) :]}

    def forget(self, params):
        if not any(name in params for name in ("ids", "query", "where")):
            raise Rejected(-32602, "expected ids, a query or a where")
        chosen = [record["id"] for record in self.matching(params)]
        if "ids" in params:
            chosen = [id for id in chosen if id in params["ids"]]
        if "query" in params:
            found = {record["id"] for record in self.recall({**params, "limit": 0})["records"]}
            chosen = [id for id in chosen if id in found]
        self.save({"forgotten": chosen})
        return {"forgotten": len(chosen)}

    def matching(self, params):
        """Return the records that meet every condition of `where`, on a field of the record, else of its metadata."""

        def meets(record, name, wanted):
            value = record[name] if name in record else record.get("metadata", {}).get(name)
            return value in wanted if isinstance(wanted, list) else value == wanted

        where = params.get("where") or {}
        return [r for r in self.records.values() if all(meets(r, name, wanted) for name, wanted in where.items())]

    def answer(self, line):
        message = id = None
        try:
            try:
                message = json.loads(line)
            except ValueError:
                raise Rejected(-32700, "expected JSON") from None
            if not isinstance(message, dict) or not isinstance(message.get("method"), str):
                raise Rejected(-32600, "expected one request object")
            id, name = message.get("id"), message["method"].removeprefix("memory/")
            if name not in CORE:
                raise Rejected(-32003 if name in OPTIONAL else -32601, f"{message['method']} is not served here")
            params = message.get("params", {})
            if not isinstance(params, dict):
                raise Rejected(-32602, "expected parameters by name")
            check(params)
            outcome = {"result": getattr(self, name)(params)}
        except Rejected as rejected:
            outcome = {"error": rejected.error}
        if isinstance(message, dict) and "method" in message and "id" not in message:
            return None  # a notification
        return json.dumps({"jsonrpc": "2.0", "id": id, **outcome})


tier = Tier(sys.argv[1])
for line in sys.stdin.buffer:
    if line.strip():
        answer = tier.answer(line)
        if answer is not None:
            print(answer, flush=True)
