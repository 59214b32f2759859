"""Authentication over HTTP: tokens as they are made, kept and shown; and when a federation is ready."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.config.loading import parse
from a2m_router.config.settings import Principal, Settings, Tier
from a2m_router.daemon.cli import main
from a2m_router.daemon.serve.authentication import admission
from a2m_router.daemon.serve.readiness import unready
from a2m_router.daemon.tokens import checked_owner, fresh_token, principal
from a2m_router.protocol.server.server import Caller, Refusal
from a2m_router.storage.database import announced

COMMAND: Final = str(Path(sys.executable).with_name("a2m-router"))
STORE: Final = str(Path(sys.executable).with_name("a2m-store"))
HERE: Final = Path("/federation")

# far more than anything here takes; a hang becomes a failure
PATIENCE: Final = 60

# the bytes of a header's value; blanks at its ends would not be a part of it
SHOWN: Final = st.binary(min_size=1).filter(
    lambda shown: not set(shown) & set(b"\r\n\0") and shown.strip(b" \t") == shown
)
OWNERS: Final = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)


def known(owner: str, token: bytes) -> Principal:
    return Principal(owner=owner, token_sha256=sha256(token).hexdigest())


@given(token=SHOWN, other=SHOWN, scheme=st.sampled_from(["Bearer", "bearer", "BEARER"]))
def test_whatever_bytes_a_token_has_it_is_known_and_no_other(token: bytes, other: bytes, scheme: str) -> None:
    admit = admission((), [known("alice", token), known("bob", b"another")])
    assert admit({"authorization": f"{scheme} {token.decode('latin-1')}"}) == Caller(False, "alice")
    if other not in (token, b"another"):
        refused = admit({"authorization": f"{scheme} {other.decode('latin-1')}"})
        assert refused == admit({"authorization": "Bearer nobody's"})
        assert isinstance(refused, Refusal)
        assert (refused.status, refused == admit({})) == (401, False)


@pytest.mark.parametrize("token", ["voilà", "\u0120", "geöffnet", "開けゴマ", "x\u00a0"])
def test_a_token_may_end_in_any_character(token: str) -> None:
    admit = admission((), [known("alice", token.encode())])
    assert admit({"authorization": "Bearer " + token.encode().decode("latin-1")}) == Caller(False, "alice")


@given(owner=OWNERS, token=st.text())
def test_the_lines_for_the_file_say_whose_token_it_is(owner: str, token: str) -> None:
    lines = principal(checked_owner(owner), token)
    assert lines.isascii()
    assert tomllib.loads(lines)["serve"]["principals"] == [
        {"owner": owner, "token_sha256": sha256(token.encode()).hexdigest()}
    ]
    read = parse(
        lines + '[tiers.a]\nkind = "working"\ncommand = ["a2m-store", "a.db"]\n', base=HERE, environ={}
    ).serve.principals
    assert read == (known(owner, token.encode()),)


@given(shown=SHOWN)
def test_nothing_of_what_is_shown_is_in_a_refusal(shown: bytes) -> None:
    admit = admission((), [known("alice", b"open sesame")])
    assert admit({"authorization": shown.decode("latin-1")}) in [
        admit({"authorization": other}) for other in ("", "Bearer", "Bearer x", "x")
    ]


def test_no_token_is_made_twice_and_all_can_be_shown() -> None:
    tokens = {fresh_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", token) for token in tokens)


@pytest.mark.parametrize(("owner", "sentence"), [("", "empty"), (" \n", "empty"), ("a\0b", "NUL"), ("\udcff", "UTF-8")])
def test_an_owner_that_the_file_cannot_name_is_refused(
    owner: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["token", owner])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert re.search(f"a2m-router token: error: argument OWNER: .*{sentence}", err)


def test_the_command_prints_a_token_once_and_the_digest_of_that_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "alice"]) == 0
    out, err = capsys.readouterr()
    tokens = re.findall(r"(?<![\w-])[A-Za-z0-9_-]{43}(?![\w-])", out)
    assert (len(tokens), err) == (1, "")
    assert f'token_sha256 = "{sha256(tokens[0].encode()).hexdigest()}"' in out
    assert "Authorization: Bearer" in out
    assert "A2M_TOKEN" in out


# --- ready or not


class Link(msgspec.Struct):
    status: str = "up"
    reason: str | None = None


def federation(*tiers: tuple[str, str], required: str = "", mount: str = "") -> Settings:
    return Settings(
        state=HERE / "router.db",
        tiers=tuple(
            Tier(
                name=name,
                kind=kind,  # type: ignore[arg-type]  # a literal, in the parameters too
                command=("a2m-store",),
                cwd=HERE,
                required=name == required,
                mount=name == mount,
            )
            for name, kind in tiers
        ),
    )


WORKING, SEMANTIC = ("working", "working"), ("semantic", "semantic")


def why(settings: Settings, *, scanned: bool = True, **links: Link) -> str | None:
    up: Any = {tier.name: Link() for tier in settings.tiers} | links
    return unready(settings, up, lambda _: scanned)


def test_it_is_ready_when_the_tier_that_takes_writes_is_up() -> None:
    settings = federation(SEMANTIC, WORKING)
    assert why(settings, semantic=Link("down", "gone")) is None
    assert why(settings, working=Link("down", "exit code 1")) == "working is down"
    assert why(settings, working=Link("starting")) == "working is starting"


def test_it_is_ready_when_the_tiers_are_up_that_it_requires() -> None:
    settings = federation(WORKING, SEMANTIC, required="semantic")
    assert why(settings, working=Link("down")) is None
    assert why(settings, semantic=Link("down")) == "semantic is down"


def test_it_is_not_ready_before_what_a_tier_holds_is_known() -> None:
    assert "working" in (why(federation(WORKING), scanned=False) or "")
    assert why(federation(WORKING, SEMANTIC, required="semantic", mount="semantic"), scanned=False) is None


def test_a_federation_of_mounts_alone_is_ready() -> None:
    assert why(federation(SEMANTIC, mount="semantic"), semantic=Link("down")) is None


# --- the process


@contextmanager
def running(*command: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server; yield its address, which it logs on stderr, and the process."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while (found := re.search(r"listen\w* on (http://\S+/)", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


def test_a_router_with_a_made_token_says_when_it_is_ready_and_where_it_is(tmp_path: Path) -> None:
    made = subprocess.run([COMMAND, "token", 'Zoë "x"'], capture_output=True, text=True, check=True).stdout
    found = re.search(r"^the token.*: (\S+)$", made, re.MULTILINE)
    assert found is not None
    lines = "".join(line + "\n" for line in made.splitlines() if line.startswith(("[[serve", "owner", "token_sha256")))
    tier = f'[tiers.working]\nkind = "working"\ncommand = {json.dumps([STORE, "working.db"])}\n'
    config = tmp_path / "federation.toml"
    config.write_text(f'state = "router.db"\n{lines}[serve]\nmax_header = "1KiB"\n{tier}')
    command = (COMMAND, "--config", str(config), "--http", "127.0.0.1:0")
    with running(*command) as (url, _), httpx.Client(timeout=PATIENCE, verify=False) as client:
        assert client.get(url + "healthz").text == "alive"
        assert client.get(url + "readyz").text == "ready"
        assert announced(tmp_path / "router.db") == url
        call = {"jsonrpc": "2.0", "id": 1, "method": "memory/describe"}
        bearer = {"Authorization": f"Bearer {found[1]}"}
        assert client.post(url, json=call).status_code == 401
        assert "scopes" in client.post(url, json=call, headers=bearer).json()["result"]["capabilities"]
        assert client.post(url, json=call, headers={**bearer, "X": "x" * 2000}).status_code == 431


def test_a_store_is_alive_and_ready(tmp_path: Path) -> None:
    command = (STORE, str(tmp_path / "a.db"), "--http", "127.0.0.1:0")
    with running(*command) as (url, _), httpx.Client(timeout=PATIENCE, verify=False) as client:
        assert client.get(url + "healthz").text == "alive"
        assert client.get(url + "readyz").text == "ready"
        assert client.get(url + "readyz", headers={"Origin": "https://evil.example"}).status_code == 403
        for path in ("", "healthz", "readyz"):
            assert client.get(url + path, headers={"Host": "evil.example"}).status_code == 421


def test_a_router_says_who_may_write_where(tmp_path: Path) -> None:
    lines = principal("alice", "a") + 'write = ["private", "pool"]\n' + principal("bob", "b")
    tiers = [
        f'[tiers.{name}]\nkind = "{kind}"\ncommand = {json.dumps([STORE, f"{name}.db"])}\n'
        for name, kind in (("working", "working"), ("pool", "semantic"))
    ]
    config = tmp_path / "federation.toml"
    config.write_text(f'state = "router.db"\n{lines}{"".join(tiers)}shared = true\n')
    checking = [COMMAND, "--config", str(config), "--check", "--log-level", "warning"]
    checked = subprocess.run(checking, capture_output=True, text=True, timeout=PATIENCE, check=True)
    sentences = [
        "principal 'alice' may write: its own records in working and the shared pool",
        "principal 'bob' may write: its own records in working",
    ]
    assert [line for line in checked.stdout.splitlines() if line.startswith("principal")] == sentences
    config.write_text(config.read_text().replace('write = ["private", "pool"]\n', ""))
    checked = subprocess.run(checking, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "every principal may write into the shared tiers (pool), which all principals read" in checked.stdout
