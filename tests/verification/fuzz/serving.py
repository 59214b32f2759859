"""The servers under test: the federation behind a router, and a check that a server still works."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tests.verification.fuzz.generating import MAX_MESSAGE, TIERS
from tests.verification.fuzz.reporting import Report, Wrong

# the number of messages between two checks that the server still works
CANARY: Final = 2_000
CANARY_ID: Final = b'"canary"'
# the seconds within which every call must be answered; a hang is a finding
PATIENCE: Final = 60.0

TOKEN: Final = "fuzz-token"

FEDERATION: Final = f"""
state = "router.db"
[limits]
max_message = "{MAX_MESSAGE // 2**10}KiB"
[serve]
origins = ["https://app.example"]
[[serve.principals]]
owner = "fuzz"
token_sha256 = "{sha256(TOKEN.encode()).hexdigest()}"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db", "--kind", "working"]
capacity = 24
per_session = true
spill_to = "episodic"
half_life = "5m"
[tiers.episodic]
kind = "episodic"
command = ["a2m-store", "episodic.db", "--kind", "episodic"]
capacity = 1000
spill_to = "semantic"
promote_to = "semantic"
promote_after = 3
[tiers.semantic]
kind = "semantic"
command = ["a2m-store", "semantic.db", "--kind", "semantic"]
[tiers.procedural]
kind = "procedural"
command = ["a2m-store", "procedural.db", "--kind", "procedural"]
"""


def program(name: str) -> str:
    """Return the path of one of our commands."""
    return str(Path(sys.executable).with_name(name))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and reap it; its stores end with their stdin."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def check_alive(ask: Callable[[bytes], Any], report: Report) -> None:
    """Check that a record can be written, found and fetched, then forget everything. Raises Wrong."""

    def call(method: str, **params: Any) -> Any:
        message = {"jsonrpc": "2.0", "id": "canary", "method": f"memory/{method}", "params": params}
        answer = ask(json.dumps(message).encode())
        if "result" not in answer:
            raise Wrong(f"after {report.messages:,} messages {method} fails: {answer}")
        return answer["result"]

    name = f"canary{report.messages}"
    call("remember", records=[{"id": name, "key": name, "content": f"the bird is called {name}"}])
    found = call("recall", query=name, where={"key": name})["records"]
    fetched = call("fetch", key=name)["record"]
    if [record["id"] for record in found] != [name] or fetched is None or fetched["id"] != name:
        raise Wrong(f"after {report.messages:,} messages a record that was written is not there: {found}, {fetched}")
    for tier in TIERS:
        call("forget", tier=tier)
