"""The programs of docs/examples, which the pages show, do what the pages say of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from a2m_router.conformance.client import Stdio
from a2m_router.conformance.running import State, judged
from tests.support.pages import EXAMPLES
from tests.support.router_process import PATIENCE, federation, on_http, post

TIER = EXAMPLES / "tier.py"


def test_the_tier_that_is_shown_keeps_to_the_protocol(tmp_path: Path) -> None:
    came = judged(Stdio([sys.executable, str(TIER), str(tmp_path / "some.journal")], 20))
    assert [(each.check.name, each.why) for each in came if each.state is State.FAILED] == []
    assert sum(each.state is State.PASSED for each in came) > 50


def test_the_tier_that_is_shown_keeps_what_it_has_acknowledged(tmp_path: Path) -> None:
    journal = tmp_path / "some.journal"
    [kept, gone] = asked(journal, "memory/remember", {"records": [{"content": "kept"}, {"content": "gone"}]})["ids"]
    asked(journal, "memory/forget", {"ids": [gone]})
    with journal.open("a") as torn:
        torn.write('{"written": [{"id": "never acknowl')
    [later] = asked(journal, "memory/remember", {"records": [{"content": "later"}]})["ids"]
    assert [each["id"] for each in asked(journal, "memory/timeline", {})["records"]] == [kept, later]


def asked(journal: Path, method: str, params: dict[str, Any]) -> Any:
    """Start a server, and return its result of one call."""
    client = Stdio([sys.executable, str(TIER), str(journal)], 20)
    try:
        return client.request(method, params)["result"]
    finally:
        client.close()


def test_the_page_that_is_edited_from_python_has_every_edit(tmp_path: Path) -> None:
    shown = (EXAMPLES / "edit.py").read_text()
    with on_http(federation(tmp_path)) as (_, client, _):
        program = shown.replace("http://127.0.0.1:8778/", str(client.base_url))
        names = ["Ada", "Ben", "Cleo"]
        editors = [subprocess.Popen([sys.executable, "-c", program.replace("Ada", name)]) for name in names]
        assert [editor.wait(PATIENCE) for editor in editors] == [0, 0, 0]
        record = post(client, "fetch", key="garden/pears")["record"]
        assert sorted(record["content"].split("\n")) == ["", *(f"{name}: one bears fruit." for name in names)]
        assert record["revision"] == 2
