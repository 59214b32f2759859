"""An MCP server without an SDK, which starts at once: `small_mcp.py [--marks FOLDER] [--tool NAME]`, on stdio.

It has one tool. In FOLDER it leaves a file for each start; it dies once for each file `die` there.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

PAGES = [
    {"content": "Expenses are paid on the 15th.", "score": 0.9},
    {"content": "The office opens at eight.", "score": 0.4},
    {"content": "Tea is in the kitchen.", "score": 0.2},
]

parser = argparse.ArgumentParser()
parser.add_argument("--marks", type=Path)
parser.add_argument("--tool", default="search")
options = parser.parse_args()
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}


def is_marked(mark: str) -> bool:
    """Return whether a mark is there, and remove it."""
    if options.marks is None or not (options.marks / mark).exists():
        return False
    (options.marks / mark).unlink()
    return True


def search(limit: int = 5, **_: Any) -> dict[str, Any]:
    if is_marked("die"):
        os._exit(3)
    found = {"result": PAGES[:limit]}
    return {"content": [{"type": "text", "text": json.dumps(found)}], "structuredContent": found}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None if there is no such method."""
    match method:
        case "initialize":
            about = {"name": "handbook", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [{"name": options.tool, "inputSchema": SCHEMA}]}
        case "tools/call":
            return search(**params.get("arguments", {}))
    return None


if options.marks is not None:
    (options.marks / f"started-{os.getpid()}").touch()
print("the handbook starts", file=sys.stderr, flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        failure = {"code": -32601, "message": "no such method"}
        outcome = {"error": failure} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
