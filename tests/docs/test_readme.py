"""What README shows to be copied works as it stands there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from a2m_router.conformance.client import Stdio
from a2m_router.conformance.running import State, judged
from tests.support.paths import ROOT
from tests.support.router_process import PATIENCE, federation, on_http, post

README = (ROOT / "README.md").read_text()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The server of "Write a tier in any language"."""
    [shown] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if code.startswith('"""tier.py')]
    path = tmp_path / "tier.py"
    path.write_text(shown)
    return path


def test_the_tier_that_is_shown_keeps_to_the_protocol(program: Path, tmp_path: Path) -> None:
    came = judged(Stdio([sys.executable, str(program), str(tmp_path / "some.journal")], 20))
    assert [(each.check.name, each.why) for each in came if each.state is State.FAILED] == []
    assert sum(each.state is State.PASSED for each in came) > 50


def test_the_tier_that_is_shown_keeps_what_it_has_acknowledged(program: Path, tmp_path: Path) -> None:
    journal = tmp_path / "some.journal"
    [kept, gone] = asked(program, journal, "memory/remember", {"records": [{"content": "kept"}, {"content": "gone"}]})[
        "ids"
    ]
    asked(program, journal, "memory/forget", {"ids": [gone]})
    with journal.open("a") as torn:
        torn.write('{"written": [{"id": "never acknowl')
    [later] = asked(program, journal, "memory/remember", {"records": [{"content": "later"}]})["ids"]
    assert [each["id"] for each in asked(program, journal, "memory/timeline", {})["records"]] == [kept, later]


def asked(program: Path, journal: Path, method: str, params: dict[str, Any]) -> Any:
    """One call to a server that is started for it."""
    client = Stdio([sys.executable, str(program), str(journal)], 20)
    try:
        return client.request(method, params)["result"]
    finally:
        client.close()


@pytest.mark.process
def test_the_page_that_is_edited_from_python_has_every_edit(tmp_path: Path) -> None:
    [shown] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "if_revision" in code]
    with on_http(federation(tmp_path)) as (_, client, _):
        program = shown.replace("http://127.0.0.1:8778/", str(client.base_url))
        names = ["Ada", "Ben", "Cleo"]
        editors = [subprocess.Popen([sys.executable, "-c", program.replace("Ada", name)]) for name in names]
        assert [editor.wait(PATIENCE) for editor in editors] == [0, 0, 0]
        record = post(client, "fetch", key="garden/pears")["record"]
        assert sorted(record["content"].split("\n")) == ["", *(f"{name}: one bears fruit." for name in names)]
        assert record["revision"] == 2


@pytest.mark.process
def test_the_check_that_is_shown_is_what_comes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "federation.toml", tmp_path)
    command = [sys.executable, "-m", "a2m_router.daemon.cli", "--config", str(tmp_path / "federation.toml"), "--check"]
    done = subprocess.run([*command, "--log-level", "warning"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [shown] = re.findall(r"^\$ a2m-router --check --log-level warning\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)

    def words(report: str) -> list[str]:
        # a terminal is not as wide as a pipe; how many records, and how fast, is different each time
        report = re.sub(r"^(home: )\S*(/memories/router.db)$", r"\1…\2", report, flags=re.MULTILINE)
        return sorted(re.sub(r"─+|\d+ +[\d.]+ ms", "", report).split())

    assert words(shown) == words(done.stdout)
