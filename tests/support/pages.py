"""Do what a page of the documentation says, as a reader would: every block, in order, in one folder.

A `console` block shows commands (`$ command`, continued by `> …`), each with its output. An `sh` block shows commands
that succeed. A `python` block is a program; a comment behind its `print(…)` shows what that prints. A `toml` block is a
federation file, or a part of one that is valid together with the shipped file. `…` stands for any text.

What a reader does besides stands in HTML comments directly before the block:

    <!-- file: NAME -->         the block is the content of that file
    <!-- append: NAME -->       the block is added to that file
    <!-- example: PATH -->      the block equals that file of docs/, byte for byte
    <!-- serve -->              the last command runs in another terminal until the page ends, or until `stop`
    <!-- stop -->               Ctrl-C in these terminals, before the block
    <!-- not run: REASON -->    the block cannot be run here

The folder has what a clone of the repository has: `scripts/`, `docs/examples/`, `federation.toml` and `.venv`. A port
of 127.0.0.1 that a page shows is another one here, so that pages can run at the same time.
"""

import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Self

from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from a2m_router.config import loading
from tests.support.addresses import reserved_port
from tests.support.paths import ROOT

PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

EXAMPLES: Final = ROOT / "docs/examples"

# far more than any command takes; a hang becomes a failure
PATIENCE: Final = 60

_COMMENT: Final = re.compile(r"<!-- (file|append|example|serve|stop|not run)(?:: ([^\n]+?))? -->\n+")
_SHOWN_ONLY: Final = {"", "ini", "json", "mermaid", "nginx", "text"}
_ADDRESS: Final = re.compile(r"(?<=127\.0\.0\.1:)[1-9]\d+")
# what differs in each run: ids, times, and measured figures
_VARIABLE: Final = [
    (re.compile(r"\b[0-9a-f]{32}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\.\d{3}Z?"), "<time>"),
    (re.compile(r"\b[\d.,]+ (?=ms\b|bytes\b)"), "<number>"),
    (re.compile("─+"), "─"),
]


def manual() -> str:
    """Return all pages as one text."""
    return "\n".join(page.read_text() for page in PAGES)


class Block(NamedTuple):
    """One fenced block of a page, with its comments."""

    language: str
    text: str
    comments: dict[str, str]


def blocks(document: Document) -> Iterator[Region]:
    """Parse the fenced blocks of a page, for Sybil."""
    attached = 0
    for region in FencedCodeBlockLexer(r"[^\n]*")(document):
        before = re.search(rf"(?:{_COMMENT.pattern})*\Z", document.text[: region.start])
        assert before is not None
        comments = dict(_COMMENT.findall(before[0]))
        attached += len(comments)
        block = Block(region.lexemes["language"], str(region.lexemes["source"]), comments)
        yield Region(region.start, region.end, block, _evaluate)
    written = document.text.count("<!--")
    assert attached == written, f"{written} comments, of which {attached} are directives directly before a block"


def follow(page: Path, folder: Path) -> None:
    """Do everything that a page says, in an empty folder.

    Raises:
        AssertionError: the outcome differs from what the page shows; the message has the line of the block.
    """
    with Reader(folder) as reader:
        document = Sybil([blocks]).parse(page)
        document.namespace["reader"] = reader
        for example in document.examples():
            example.evaluate()


def _evaluate(example: Example) -> str | None:
    """Run a block; return the error message or None, for Sybil, which adds the block's place."""
    reader: Reader = example.namespace["reader"]
    try:
        reader.do(example.parsed)
    except AssertionError as wrong:
        return str(wrong)
    return None


class Reader:
    """A reader with a folder, terminals and an editor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a2m-router"
        self._state = folder / "shell"  # the variables and the folder that a command leaves to the next one
        self._ports: dict[str, str] = {}
        self._servers: list[Server] = []
        self._until_the_end = ExitStack()

    def __enter__(self) -> Self:
        for part in ("scripts", "docs/examples"):
            shutil.copytree(ROOT / part, self.folder / part)
        (self.folder / "federation.toml").write_text((ROOT / "federation.toml").read_text())
        (self.folder / ".venv").symlink_to(sys.prefix)
        (self.folder / "scripts/environment").write_text("#!/bin/sh\n")  # it exists, and does nothing here
        run = self.folder / "scripts/run"
        run.write_text(self._here(run.read_text()))
        self._state.write_text(f"cd {shlex.quote(str(self.folder))}\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._until_the_end.close()

    def do(self, block: Block) -> None:
        """Do what one block says."""
        language, text, comments = block
        if "stop" in comments:
            self._stop()
        if "example" in comments:
            wanted = (ROOT / "docs" / comments["example"]).read_text()
            assert text == wanted, f"this is not docs/{comments['example']}:\n{text}"
        if "not run" in comments:
            assert comments["not run"], "not run: the reason is missing"
        elif name := comments.get("file") or comments.get("append"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if "file" in comments else "a") as file:
                file.write(self._here(text if "file" in comments else f"\n{text}"))
        elif "serve" in comments:
            *before, (command, shown) = commands(text) if language == "console" else [(text, "…listen…")]
            self._follow(before)
            server = Server(self._popen(f"exec {self._here(command)}"))
            self._servers.append(server)
            came = server.output_until(lambda output: self._is(shown, output))
            assert self._is(shown, came), _difference(command, shown, came)
        elif language == "console":
            self._follow(commands(text))
        elif language == "sh":
            code, came = self._run(f"set -e\n{text}")
            assert code == 0, f"{text}ended with {code}:\n{came}"
        elif language == "python":
            code, came = self._run(f"python -c {shlex.quote(text)}")
            assert code == 0, f"ended with {code}:\n{came}"
            shown = "…".join(["", *re.findall(r"^ *print\(.*\) +# (.+)$", text, re.MULTILINE), ""])
            assert self._is(shown, came), _difference("python", shown, came)
        elif language == "toml":
            self._load_part(text)
        elif "example" not in comments:
            assert language in _SHOWN_ONLY, f"expected a block that is run, or one of {sorted(_SHOWN_ONLY)}"

    def _follow(self, commands: list[tuple[str, str]]) -> None:
        for command, shown in commands:
            _, came = self._run(command)
            assert self._is(shown, came), _difference(command, shown, came)

    def _load_part(self, text: str) -> None:
        """Let the router read a federation file, or a part of one whose tables replace the shipped ones."""
        try:
            self._load(text, self.folder)
        except AssertionError:
            shipped = (ROOT / "federation.toml").read_text()
            for table in re.findall(r"^\[[\w.]+\]", text, re.MULTILINE):
                shipped = re.sub(rf"^{re.escape(table)}.*?(?=^\[|\Z)", "", shipped, flags=re.MULTILINE | re.DOTALL)
            self._load(f"{shipped}\n{text}", self.folder)

    @staticmethod
    def _load(text: str, folder: Path) -> None:
        names = re.findall(r'\$\{(\w+)\}|token_env *= *"(\w+)"', text)
        try:
            loading.parse(text, base=folder, environ={name: "x" * 40 for pair in names for name in pair})
        except ValueError as refused:
            raise AssertionError(f"the router does not accept this:\n{refused}") from None

    def _run(self, command: str) -> tuple[int, str]:
        """Return the exit code of a command, and its output on the terminal."""
        keep = f'{{ export -p; printf "cd %q\\n" "$PWD"; }} >{shlex.quote(str(self._state))}'
        popen = self._popen(f"trap '{keep}' EXIT\n{self._here(command)}")
        try:
            output = popen.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"$ {command}\nhas not ended within {PATIENCE} s") from None
        finally:
            _kill(popen)
        return popen.returncode, self._shown(output)

    def _popen(self, command: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("A2M_")}
        return subprocess.Popen(
            ["bash", "-c", f". {shlex.quote(str(self._state))}\n{command}"],
            env={
                **environment,
                "PATH": f"{Path(sys.prefix, 'bin')}:{environment['PATH']}",
                "HOME": str(self.folder),
                "COLUMNS": "120",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()

    def _here(self, text: str) -> str:
        """Replace the ports that a page shows by those of this run."""

        def port(shown: re.Match[str]) -> str:
            if shown[0] not in self._ports:
                self._ports[shown[0]] = str(self._until_the_end.enter_context(reserved_port()))
            return self._ports[shown[0]]

        return _ADDRESS.sub(port, text)

    def _shown(self, text: str) -> str:
        shown = {here: port for port, here in self._ports.items()}
        return _ADDRESS.sub(lambda port: shown.get(port[0], port[0]), text)

    def _is(self, shown: str, came: str) -> bool:
        """Return whether an output is what a page shows, regardless of line breaks."""
        parts = [re.escape(_comparable(part)) for part in shown.split("…")]
        return re.fullmatch(".*".join(parts), _comparable(self._shown(came)), re.DOTALL) is not None


class Server:
    """A program in another terminal."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put("")

    def output_until(self, is_all: Callable[[str], bool]) -> str:
        """Return the output on the terminal up to the line that completes it, or up to the end."""
        output = ""
        while not is_all(output):
            try:
                line = self._lines.get(timeout=PATIENCE)
            except queue.Empty:
                break
            if not line:
                break
            output += line
        return output

    def stop(self) -> None:
        """Press Ctrl-C, and wait for the end."""
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGINT)
        try:
            self._popen.wait(PATIENCE)
        finally:
            _kill(self._popen)
            self._reading.join()


def commands(text: str) -> list[tuple[str, str]]:
    """Return each command of a `console` block, with the output that is shown."""
    assert text.startswith("$ "), "expected a command (`$ …`) in the first line"
    found = re.findall(r"^\$ (.*\n(?:> .*\n)*)((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    return [(re.sub(r"^> ", "", command, flags=re.MULTILINE), shown) for command, shown in found]


def _comparable(text: str) -> str:
    for pattern, name in _VARIABLE:
        text = pattern.sub(name, text)
    return "".join(text.split())


def _difference(command: str, shown: str, came: str) -> str:
    return f"$ {command.strip()}\nshown:\n{shown}\ncame:\n{came}"


def _kill(popen: subprocess.Popen[str]) -> None:
    if popen.poll() is None:
        os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
