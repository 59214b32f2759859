"""CONTRIBUTING names paths, names in files, and commands with options that exist. The other pages link to it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from a2m_router import __version__
from tests.support.paths import ROOT

ROUTER: Final = ROOT / "router/a2m_router"
PAGES: Final = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
CONTRIBUTING: Final = (ROOT / "CONTRIBUTING.md").read_text()

PROSE: Final = re.sub(r"```.*?```", "", CONTRIBUTING, flags=re.DOTALL)
COMMANDS: Final = [
    line.partition(" #")[0].split()
    for block in re.findall(r"```sh\n(.*?)```", CONTRIBUTING, re.DOTALL)
    for line in block.splitlines()
]
MODULES: Final = [words[2:] for words in COMMANDS if words[:2] == [".venv/bin/python", "-m"]]


def found(path: str) -> Path | None:
    """Return what a path of the page leads to: in the repository, else in the router's package; None if nothing."""
    return next((root / path for root in (ROOT, ROUTER) if (root / path).exists()), None)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_path(span: str) -> bool:
    """Return whether a span is a path: not a method, a URL, a command with arguments, or a path in `.venv`."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span)) and (
        span.endswith((".md", ".py", ".toml", "/")) or span.startswith(("scripts/", ".ci/"))
    )


def names() -> list[tuple[str, str]]:
    """Return each name in the first column of a table, with the path before it in the same cell."""
    found = []
    for cell in re.findall(r"^\| ([^|]+) \|", PROSE, re.MULTILINE):
        path = None
        for span in spans(cell):
            if is_path(span):
                path = span
            elif path is not None:
                found.append((path, span))
    return found


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_path_that_is_named_is_there() -> None:
    paths = [span for span in spans(PROSE) if is_path(span)]
    assert len(paths) > 40
    assert [path for path in paths if found(path) is None] == []


def test_every_name_is_in_the_file_that_it_stands_beside() -> None:
    assert len(names()) > 30

    def missing(path: str, name: str) -> bool:
        file = found(path)
        # the name must be a whole word in the file
        return file is None or not re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", file.read_text())

    assert [(path, name) for path, name in names() if missing(path, name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, wanted = target.partition("#")
        if "://" in target:
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
        assert not wanted or wanted in map(anchor, headings), target


def test_every_command_of_the_repository_is_there_and_is_named() -> None:
    programs = {words[0] for words in COMMANDS}
    ours = {f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix}
    assert {".ci/run", *ours} <= programs
    assert programs - {".ci/run", *ours} == {"export", ".venv/bin/python"}
    for words in COMMANDS:
        for word in words[1:]:
            assert not is_path(word) or found(word) is not None, word


@pytest.mark.parametrize("words", MODULES, ids=lambda words: words[0])
def test_every_module_runs_and_has_the_options_that_are_shown(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", words[0], "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [word for word in words if word.startswith("--") and word not in done.stdout] == []


def test_a_commit_is_checked_as_the_script_checks() -> None:
    checks = re.findall(r"^\.venv/bin/.+$", (ROOT / "scripts/check").read_text(), re.MULTILINE)
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert len(checks) > 3
    assert hooks == checks


def test_the_table_of_rooms_names_modules_that_are_there() -> None:
    architecture = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| (.+) \|$", architecture, re.MULTILINE)
    assert len(rows) > 15
    folders = {room: [ROUTER / room.replace(".", "/"), ROOT / "backends" / room] for room, _ in rows}
    names = [(room, name.rstrip("/")) for room, modules in rows for name in spans(modules) if "*" not in name]
    missing = [
        (room, name)
        for room, name in names
        if not any((folder / f"{name}.py").exists() or (folder / name).is_dir() for folder in folders[room])
    ]
    assert missing == []


def test_the_table_of_decisions_lists_every_page() -> None:
    pages = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    architecture = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| \[\d{4}\]\(decisions/([^)]+)\)", architecture, re.MULTILINE)
    assert listed == pages


def test_the_changelog_knows_the_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
