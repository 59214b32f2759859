"""The demonstration, run as a user runs it: real processes, and the conversation that is shipped with it."""

import json
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import demo
from tests.support.paths import ROOT

SCRIPTS = ROOT / "scripts"


def run(*arguments: str, temporary: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environment(temporary), **variables},
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "demo.py"), *arguments]


def environment(temporary: Path) -> dict[str, str]:
    return {"PATH": "", "TMPDIR": str(temporary), "PYTHONUTF8": "1"}


def conversation(turns: int) -> dict[str, Any]:
    """Return a session longer than a working tier holds, with the answer in its first turn, and a second session."""
    lines = [f"Plain remark number {number}." for number in range(turns)]
    lines[0] = "The anchor weighs forty pounds."
    return {
        "turns": [
            {
                "id": f"t{number}",
                "session": "one" if number < turns - 2 else "two",
                "at": "12:05 am on 1 January, 2024" if number < turns - 2 else "1:00 pm on 2 January, 2024",
                "speaker": ("Zoë", "Max")[number % 2],
                "text": text,
                **({"image": 'a "rusty" anchor'} if number == 1 else {}),
            }
            for number, text in enumerate(lines)
        ],
        "questions": [{"question": "What does the anchor weigh?", "answer": 40, "evidence": ["t0"]}],
    }


def test_a_conversation_is_replayed_checked_and_asked_about(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(conversation(30)), encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    done = run("--file", str(file), temporary=temporary)

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "30 of 30 turns written: working 26, episodic 4" in [line.strip() for line in lines]
    assert "checked: all 30 turns are there exactly once" in done.stdout
    assert "  * episodic   t0      Zoë: The anchor weighs forty pounds." in lines
    assert "turns      30 in 2 sessions" in lines
    assert "share among the first 10: 1.000 (mean over 1 questions)" in lines[-1]
    assert list(temporary.iterdir()) == []


# the same, but it never ends after the last write: an interruption can come as late as possible
UNENDING = """
import sys
import anyio
import demo

write = demo.write
async def unending(*arguments):
    await write(*arguments)
    await anyio.sleep_forever()
demo.write = unending
sys.exit(demo.main())
"""


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    file.write_text(json.dumps(conversation(500)), encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    with subprocess.Popen(
        [sys.executable, "-c", UNENDING, "--file", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=SCRIPTS,
        env=environment(temporary),
    ) as process:
        try:
            assert process.stdout is not None
            assert "turns written" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()  # it never ends by itself

    assert (process.returncode, stderr) == (130, "demo: interrupted; nothing is left behind\n")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"turns": [', "is not JSON: "),
        ('{"turns": []}', "is not a conversation: it has no turns"),
        ('{"turns": [{"id": 7}]}', "is not a conversation: Expected `str`, got `int` - at `$.turns[0].id`"),
        (
            '{"turns": [{"id": "a", "session": "s", "at": "noon", "speaker": "Z", "text": "x"}]}',
            "is not a conversation: turn 'a': at: expected \"7:12 pm on 4 March, 2025\", got 'noon'",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)

    done = run("--file", str(file), temporary=tmp_path)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"demo: {file} {complaint}")
    assert done.stderr.count("\n") == 1


def test_a_router_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = run("--http", "http://127.0.0.1:9/", temporary=tmp_path)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("demo: the router did not answer memory/describe: cannot be reached: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a router with one principal, alice, whose token is s3cret; its mount is down."""
    (tmp_path / "federation.toml").write_text(
        """
        [[serve.principals]]
        owner = "alice"
        token_env = "ALICE_TOKEN"
        [tiers.working]
        kind = "working"
        command = ["a2m-store", "working.db"]
        [tiers.handbook]
        kind = "semantic"
        url = "http://127.0.0.1:9/"
        mount = true
        """,
        encoding="utf-8",
    )
    options = ["--config", str(tmp_path / "federation.toml"), "--http", "127.0.0.1:0", "--log-level", "warning"]
    with subprocess.Popen(
        [sys.executable, "-m", "a2m_router.daemon.cli", *options],
        stderr=subprocess.PIPE,
        text=True,
        cwd=SCRIPTS.parent,
        env={**environment(tmp_path), "ALICE_TOKEN": "s3cret"},
    ) as process:
        assert process.stderr is not None
        yield next(line.split()[-1] for line in process.stderr if "listens on" in line)
        process.terminate()
        process.communicate(timeout=60)


def test_a_router_with_principals_is_shown_a_token(tmp_path: Path, guarded: str) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(conversation(5)), encoding="utf-8")
    arguments = ["--file", str(file), "--http", guarded]

    without = run(*arguments, temporary=tmp_path)
    shown = run(*arguments, "--token", "s3cret", temporary=tmp_path)
    from_environment = run(*arguments, temporary=tmp_path, A2M_TOKEN="s3cret")

    assert without.returncode == 1
    assert "HTTP 401 Unauthorized" in without.stderr
    for done in (shown, from_environment):
        assert (done.returncode, done.stderr) == (0, "")
        assert "checked: all 5 turns are there exactly once" in done.stdout
        assert "forgotten  5 records" in done.stdout
        assert "checked after the questions: all 5 turns" in done.stdout  # without the mount, which is down


@pytest.mark.parametrize("arguments", [["--token", "s3cret"], ["--http", "http://127.0.0.1:9/", "--token", "s3crét"]])
def test_a_token_that_is_of_no_use_is_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments, temporary=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("scripts/demo: error: ")
    assert "s3cr" not in done.stderr


def test_a_federation_with_memories_elsewhere_is_not_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "real"
    federation = tmp_path / "federation.toml"
    federation.write_text(
        f'[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "{elsewhere / "working.db"}"]\n', encoding="utf-8"
    )

    done = run("--federation", str(federation), temporary=tmp_path)

    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be used for a trial: tiers.working is outside of its folder" in done.stderr
    assert not elsewhere.exists()


def test_mounts_are_no_part_of_the_trial(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(conversation(5)), encoding="utf-8")
    federation = tmp_path / "federation.toml"
    shipped = (SCRIPTS.parent / "federation.toml").read_text(encoding="utf-8")
    # one beside a file that the trial's folder lacks, one at an address without a server, one whose token is not set
    federation.write_text(
        f"""{shipped}
        [tiers.handbook]
        kind = "semantic"
        command = ["a2m-rag", "http", "--config", "handbook.toml"]
        mount = true
        [tiers.manuals]
        kind = "semantic"
        url = "http://127.0.0.1:9/"
        mount = true
        weight = 0.5
        headers = {{ Authorization = "Bearer ${{NO_SUCH_TOKEN}}" }}
        """,
        encoding="utf-8",
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    done = run("--file", str(file), "--federation", str(federation), temporary=temporary)

    assert (done.returncode, done.stderr) == (0, "")
    assert "checked: all 5 turns are there exactly once" in done.stdout
    assert list(temporary.iterdir()) == []


VALUES = st.recursive(
    st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False) | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(rest=st.dictionaries(st.text().filter(lambda name: name != "tiers"), VALUES, max_size=4), kept=VALUES)
def test_what_is_left_without_mounts_is_as_it_was(rest: dict[str, Any], kept: Any) -> None:
    tiers = {"a": {"mount": True, "kind": "semantic"}, "b": {"mount": False, "some": kept}}
    federation = "".join(
        f"{demo._toml(key)} = {demo._toml(value)}\n" for key, value in {**rest, "tiers": tiers}.items()
    )
    assert tomllib.loads(federation) == {**rest, "tiers": tiers}
    left = demo.without_mounts(federation.encode())
    assert tomllib.loads(left.decode()) == {**rest, "tiers": {"b": tiers["b"]}}


@pytest.mark.parametrize("text", ["", "[tiers", "tiers = 7", "tiers = {a = 7}", "[tiers.a]\nmount = false", "\ufeff"])
def test_a_federation_without_mounts_is_left_as_it_is(text: str) -> None:
    assert demo.without_mounts(text.encode()) == text.encode()


def test_the_conversation_that_comes_along_is_well_formed() -> None:
    content = json.loads((SCRIPTS / "demo-conversation.json").read_text(encoding="utf-8"))
    turns = content["turns"]
    ids = [turn["id"] for turn in turns]
    assert len(set(ids)) == len(ids)
    assert len({turn["speaker"] for turn in turns}) == 2
    assert all(turn["text"] and datetime.strptime(turn["at"], "%I:%M %p on %d %B, %Y") for turn in turns)
    sessions = Counter(turn["session"] for turn in turns)
    assert len(sessions) == 3
    assert max(sessions.values()) > 24, "one session must be longer than the working tier holds of it"
    assert len(content["questions"]) == 8
    for question in content["questions"]:
        assert question["question"]
        assert question["answer"]
        assert question["evidence"]
        assert set(question["evidence"]) <= set(ids)
