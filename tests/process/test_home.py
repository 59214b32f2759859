"""`~` at the beginning of a path is the home directory, wherever a path is written; no folder of that name is made."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from a2m_chaos.plan import PlanError, read_plan
from a2m_router.config.loading import ConfigError, load
from a2m_router.daemon.opening import open_federation
from a2m_router.process.paths import expanded
from a2m_router.protocol.client.child import executable

pytestmark = pytest.mark.anyio

# seconds, and far more than anything here takes
PATIENCE: Final = 60

# a user that no system has
NOBODY: Final = "~no-such-user-here"

REMEMBER: Final = (
    '{"jsonrpc":"2.0","id":1,"method":"memory/remember","params":{"records":[{"id":"1","content":"a turn"}]}}\n'
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a home directory; the working directory is another folder."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("~")]


def run(*command: str, given: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
        input=given,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        env={**os.environ, **environ},
    )


def federation(home: Path, text: str = "") -> Path:
    path = home / "federation.toml"
    tier = '[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "~/memories/working.db"]\n'
    path.write_text(f'state = "~/memories/router.db"\n{tier}{text}')
    return path


def test_a_path_is_filled_in_at_its_head_only(home: Path) -> None:
    assert expanded("~") == home
    assert expanded("~/a/~/b") == home / "a" / "~" / "b"
    assert expanded("a/~") == Path("a/~")
    assert expanded("./~") == Path("~")
    assert expanded("~root") == Path("~root").expanduser()
    with pytest.raises(ValueError, match=f"there is no home directory {NOBODY}; write ./{NOBODY}"):
        expanded(f"{NOBODY}/x")


def test_every_path_of_a_federation_file_is_filled_in(home: Path) -> None:
    path = federation(home, 'cwd = "~/work"\n')
    settings = load(path, {})
    assert settings.state == home / "memories" / "router.db"
    assert settings.tiers[0].cwd == home / "work"
    assert load(Path("~/federation.toml"), {}).path == path
    path.write_text(path.read_text() + '[tiers.far]\nkind = "semantic"\nurl = "https://h/"\nca_file = "~/ca.pem"\n')
    with pytest.raises(ConfigError, match=f'tiers.far.ca_file: "{str(home)[:50]}.* cannot be read'):
        load(path, {})


def test_a_token_file_at_home_is_read(home: Path) -> None:
    path = federation(home, "")
    (home / "ann.token").write_text("a-token-of-some-length-for-ann\n")
    path.write_text(path.read_text() + '[[serve.principals]]\nowner = "ann"\ntoken_file = "~/ann.token"\n')
    assert [principal.owner for principal in load(path, {}).serve.principals] == ["ann"]


@pytest.mark.parametrize("key", ["state", "tiers.working.cwd", "tiers.far.ca_file"])
def test_a_home_that_nobody_has_is_named_by_its_place(home: Path, key: str) -> None:
    path = home / "federation.toml"
    *tables, name = key.split(".")
    table = ".".join(tables)
    lines = {"": [], "tiers.working": ['kind = "working"', 'command = ["a2m-store"]'], "tiers.far": []}
    lines["tiers.far"] = ['kind = "semantic"', 'url = "https://h/"']
    lines[table].append(f'{name} = "{NOBODY}/x"')
    path.write_text(
        "\n".join(line for table, each in lines.items() for line in ([f"[{table}]"] if table else []) + each)
    )
    with pytest.raises(ConfigError, match=f"^{key}: .*there is no home directory {NOBODY}"):
        load(path, {})


def test_a_program_is_looked_for_at_home(home: Path) -> None:
    assert executable("~/bin/server", Path("/elsewhere")) == str(home / "bin" / "server")
    assert executable(f"{NOBODY}/server", Path("/elsewhere")) == f"/elsewhere/{NOBODY}/server"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_federation_lives_at_home(home: Path) -> None:
    federation(home)
    async with open_federation("~/federation.toml") as memory:
        await memory.remember("a turn")
    assert {path.name for path in (home / "memories").glob("*.db")} == {"router.db", "working.db"}


def test_the_programs_take_it_in_their_arguments(home: Path) -> None:
    federation(home)
    (home / "faults.toml").write_text('counts = "~/counts"\n[[fault]]\ndo = "disk-full"\nwhile = "~/full"\n')
    for command in (
        ("a2m-store", "~/notes/notes.db"),
        ("a2m-router", "--config=~/federation.toml"),
        ("a2m-chaos", "--plan=~/faults.toml", "--", "a2m-store", "~/other.db"),
    ):
        ended = run(*command, given=REMEMBER)
        assert json.loads(ended.stdout)["result"]["ids"] == ["1"], ended.stderr
    assert (home / "notes" / "notes.db").exists()
    assert (home / "memories" / "router.db").exists()
    assert (home / "other.db").exists()
    assert (home / "counts").exists()
    assert run("a2m", "--config=~/federation.toml", "export", "~/export.jsonl").returncode == 0
    assert run("a2m", "--stdio", "a2m-store ~/again.db", "import", "~/export.jsonl", "--drop", "tier").returncode == 0
    assert (home / "again.db").exists()
    told = run("a2m", "--http", "https://127.0.0.1:1/", "describe", A2M_CA_FILE="~/ca.pem").stderr
    assert f"there is no file '{home}/ca.pem'" in told


@pytest.mark.parametrize("kind", [("chroma", "~/folder"), ("qdrant", "~/folder")])
def test_a_retrieval_services_folder_is_at_home(home: Path, kind: tuple[str, str]) -> None:
    (home / "folder").mkdir()
    ended = run("a2m-rag", *kind, "--collection", "c")
    assert f"{home}/folder: " in ended.stderr
    assert ended.returncode == 1


@pytest.mark.parametrize(
    "command",
    [
        ("a2m-store", f"{NOBODY}/notes.db"),
        ("a2m-router", "--config", f"{NOBODY}/federation.toml"),
        ("a2m-chaos", "--plan", f"{NOBODY}/faults.toml", "--", "cat"),
        ("a2m-rag", "chroma", f"{NOBODY}/folder", "--collection", "c"),
        ("a2m-rag", "http", "--config", f"{NOBODY}/options.toml"),
        ("a2m", "--config", f"{NOBODY}/federation.toml", "describe"),
        ("a2m", "--http", "https://127.0.0.1:1/", "--ca-file", f"{NOBODY}/ca.pem", "describe"),
        ("a2m", "--stdio", "a2m-store n.db", "import", f"{NOBODY}/export.jsonl"),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_home_that_nobody_has_is_refused_in_a_sentence(command: tuple[str, ...]) -> None:
    ended = run(*command)
    assert ended.returncode in (1, 2)
    assert f"there is no home directory {NOBODY}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_files_of_a_plan_stay_in_its_folder(home: Path) -> None:
    (home / "faults.toml").write_text('memory = ["~/notes.db*"]\n')
    with pytest.raises(PlanError, match="leads out of this file's folder"):
        read_plan(home / "faults.toml", front="stdio", behind="command")
