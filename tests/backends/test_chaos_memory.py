"""The files that a2m-chaos treats as a server's memory: those it saves, restores and moves, and those of its own."""

import errno
import shutil
from pathlib import Path

import pytest

from a2m_chaos import memory_files
from a2m_chaos.memory_files import CannotCarry, MemoryFiles

FOLDER = "plan"


def files(folder: Path) -> dict[str, str]:
    """Return the contents of a folder's files by their paths in it; a link is an arrow."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a plan's folder with a server's file in it; a folder beside it has an unrelated file."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "theirs.db").write_text("theirs")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "notes.db").write_text("before")
    return tmp_path / FOLDER


def memory_in(folder: Path, *patterns: str, without: tuple[Path, ...] = ()) -> MemoryFiles:
    return MemoryFiles(folder, patterns, "faults", without=without)


def untouched(folder: Path) -> bool:
    """Return whether the folder beside this one is unchanged."""
    return files(folder.parent / "elsewhere") == {"theirs.db": "theirs"}


def test_what_was_kept_aside_comes_back_and_what_came_later_goes(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "more.db").write_text("before")
    before = files(folder)
    memory = memory_in(folder, "**/*.db")
    memory.keep()
    for name in ("notes.db", "deep/er/more.db", "later.db"):
        (folder / name).write_text("after")
    assert memory.put_back()
    assert files(folder) == before
    assert not memory.put_back()


def test_what_is_moved_away_is_somewhere_else_and_whole(folder: Path) -> None:
    memory = memory_in(folder, "*.db")
    memory.keep()
    into = memory.move_away()
    assert files(folder) == {f"{into.name}/notes.db": "before"}
    (folder / "notes.db").write_text("new")
    assert memory.move_away() != into


def test_what_the_plan_needs_for_itself_is_not_memory(folder: Path) -> None:
    own = tuple(folder / name for name in ("faults.toml", "faults.counts", "full"))
    for path in own:
        path.write_text("ours")
    memory = memory_in(folder, "*", "**/*", without=own)
    memory.keep()
    for path in own:
        path.write_text("ours, later")
    memory.put_back()
    assert {path.read_text() for path in own} == {"ours, later"}
    into = memory.move_away()
    assert set(files(folder)) == {"faults.toml", "faults.counts", "full", f"{into.name}/notes.db"}


def test_a_file_of_the_plan_is_known_however_it_is_written(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "counts").write_text("ours")
    memory_in(folder, "*", without=(folder / "deep" / ".." / "counts",)).move_away()
    assert (folder / "counts").read_text() == "ours"


def test_what_was_made_here_is_not_memory_even_if_it_was_not_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_in(folder, "**/*")
    memory.move_away()
    (folder / "notes.db").write_text("again")
    copy = memory_files._copy

    def copy_and_die(path: Path, there: Path) -> None:
        copy(path, there)
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_files, "_copy", copy_and_die)
    with pytest.raises(KeyboardInterrupt):
        memory.keep()
    before = files(folder)
    assert len(before) == 3
    into = memory.move_away()
    moved = {f"{into.name}/notes.db" if name == "notes.db" else name: text for name, text in before.items()}
    assert files(folder) == moved


# --- operations that the system refuses


def refused(*_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "notes.db")


def test_what_cannot_be_kept_aside_is_a_sentence_and_is_not_taken_for_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_in(folder, "*.db")
    with monkeypatch.context() as patch:
        patch.setattr(memory_files, "_copy", refused)
        with pytest.raises(CannotCarry, match=r"memory cannot be saved: notes\.db: Permission denied"):
            memory.keep()
    assert not memory.put_back()
    memory.keep()
    (folder / "notes.db").write_text("after")
    assert memory.put_back()
    assert files(folder) == {"notes.db": "before"}


def test_what_cannot_be_put_back_stays_kept_for_the_next_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder)
    memory = memory_in(folder, "*.db")
    memory.keep()
    (folder / "notes.db").write_text("after")
    with monkeypatch.context() as patch:
        patch.setattr(memory_files, "_copy", refused)
        with pytest.raises(CannotCarry, match=r"memory cannot be restored: notes\.db: Permission denied"):
            memory.put_back()
    assert memory_in(folder, "*.db").put_back()
    assert files(folder) == before


def test_of_what_is_kept_half_is_never_put_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_in(folder, "*.db")
    memory.keep()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)  # killed before it begins
        memory.release()
    (folder / "notes.db").write_text("after")
    assert not memory.put_back()
    memory.keep()
    assert memory.put_back()
    assert files(folder) == {"notes.db": "after"}


def test_what_cannot_be_moved_away_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "move", refused)
        with pytest.raises(CannotCarry, match=r"memory cannot be moved away: notes\.db: Permission denied"):
            memory_in(folder, "*.db").move_away()
    assert files(folder) == before


# --- links


def test_a_link_to_a_file_elsewhere_is_carried_as_a_link(folder: Path) -> None:
    (folder / "linked.db").symlink_to("../elsewhere/theirs.db")
    before = files(folder)
    memory = memory_in(folder, "*.db")
    memory.keep()
    (folder / "linked.db").unlink()
    memory.put_back()
    assert files(folder) == before
    into = memory.move_away()
    assert files(folder) == {f"{into.name}/{name}": text for name, text in before.items()}
    assert untouched(folder)


def test_what_is_behind_a_link_to_a_folder_is_left_there(folder: Path) -> None:
    (folder / "linked").symlink_to("../elsewhere")
    memory = memory_in(folder, "linked/*", "linked/**/*")
    memory.keep()
    memory.put_back()
    into = memory.move_away()
    assert files(into) == {}
    assert untouched(folder)


def test_nothing_is_put_back_through_a_link_that_came_later(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "theirs.db").write_text("before")
    before = files(folder)
    memory = memory_in(folder, "notes.db", "deep/*")
    memory.keep()
    (folder / "notes.db").unlink()
    (folder / "notes.db").symlink_to("../elsewhere/theirs.db")
    (folder / "deep" / "theirs.db").unlink()
    (folder / "deep").rmdir()
    (folder / "deep").symlink_to("../elsewhere")
    memory.put_back()
    assert files(folder) == before
    assert untouched(folder)
