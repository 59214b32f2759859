"""Every command of README and of docs/ does what is shown there, and an error in a page is found."""

from pathlib import Path

import pytest

from tests.support.pages import PAGES, follow
from tests.support.paths import ROOT


# one test for each page: the blocks of a page depend on each other, and on one folder
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_is_what_comes(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)


def console(text: str) -> str:
    return f"```console\n{text}\n```\n"


FINE = {
    "output": console("$ echo one two\none\n  two"),
    "output that is left out": console("$ echo one two three\none … three"),
    "output that varies": console("$ echo 01a22a04cc6e3fb49f1d1f923dfe1385 in 3.2 ms\n" + "b" * 32 + " in 17 ms"),
    "two commands": console("$ cd docs\n$ export A=1\n$ pwd; echo $A\n…/docs\n1"),
    "a command of two lines": console("$ echo one \\\n> two\none two"),
    "a file": "<!-- file: a/b.txt -->\n```text\none\n```\n<!-- append: a/b.txt -->\n\n```\ntwo\n```\n"
    + console("$ cat a/b.txt\none\ntwo"),
    "a program": "```python\nprint(1 + 1)  # 2\n```\n",
    "a part of a federation file": "```toml\n[recall]\nk = 7\n```\n",
    "what cannot be run": "<!-- not run: no systemd -->\n```console\n$ systemctl status\n```\n",
    "a server": "<!-- serve -->\n"
    + console("$ a2m-store notes.db --http 127.0.0.1:9000\n…listening on http://127.0.0.1:9000/…")
    + console("$ a2m --http http://127.0.0.1:9000/ remember pears --json\n{…}")
    + "<!-- stop -->\n"
    + console("$ a2m --http http://127.0.0.1:9000/ recall pears\na2m: …127.0.0.1:9000…"),
}
WRONG = {
    "another output": console("$ echo one\ntwo"),
    "an output that is not shown": console("$ echo one"),
    "an output that does not come": console("$ true\none"),
    "a block without a command": console("one"),
    "a command that fails": "```sh\nfalse\ntrue\n```\n",
    "a program that fails": "```python\nassert False\n```\n",
    "a program that prints something else": "```python\nprint(1 + 1)  # 3\n```\n",
    "a setting that is not known": "```toml\n[recall]\nkk = 7\n```\n",
    "a file that is not the example": "<!-- example: architecture.md -->\n```\none\n```\n",
    "a directive that is not known": "<!-- srve -->\n" + console("$ true"),
    "a directive without a block": "<!-- stop -->\n\nSome text.\n",
    "a language that is not known": "```bash\ntrue\n```\n",
    "a server that ends": "<!-- serve -->\n" + console("$ a2m-store --listens-on\n…listens on…"),
}


@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_a_page_that_is_right_passes(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    follow(page, tmp_path)


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_page_is_found(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError):
        follow(page, tmp_path)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
