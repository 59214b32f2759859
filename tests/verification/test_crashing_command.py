"""The command of the crash points: any number of processes gives the same result, and a finding can be repeated."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from a2m_router.catalog.catalog import Catalog
from tests.support.paths import ROOT
from tests.verification.crashing.command import Outcome, asked_for, main, parts_of, what_came_of
from tests.verification.crashing.points import KINDS, Tally, Way, carried_out, running, scenes


def found(*options: str) -> list[Outcome]:
    """Carry out in this process what the options select; return the outcomes."""
    return list(map(what_came_of, parts_of(asked_for(options))))


def stories(outcomes: list[Outcome]) -> list[str]:
    return [outcome.story for outcome in outcomes if outcome.story is not None]


@pytest.mark.process
def test_the_same_is_looked_into_on_any_number_of_processes() -> None:
    def printed(jobs: str) -> list[str]:
        options = ("--kind", "forget", "--way", "sync last", "--every", "40", "--jobs", jobs)
        command = [sys.executable, "-m", "tests.verification.crashing", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return sorted(re.sub(r"\d+ s\b|\d at a time", "", line) for line in done.stdout.splitlines())

    alone = printed("1")
    assert len(alone) == 2
    assert printed("2") == alone


@pytest.mark.process
def test_who_ends_it_is_told_how_far_it_came() -> None:
    # the first kind takes a moment, all kinds take more than a minute
    options = ("--way", "sync first", "--every", "4", "--jobs", "1")
    command = [sys.executable, "-m", "tests.verification.crashing", *options]
    # unbuffered, since `communicate` would miss lines that a buffer has read ahead
    with subprocess.Popen(
        command, bufsize=0, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        # like Ctrl-C in a terminal: all processes of the group get the signal
        os.killpg(process.pid, signal.SIGINT)
        rest, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, b"")
    assert re.search(rf"^\d+ of {len(KINDS)} kinds, interrupted: .*; nothing is broken$", rest.decode(), re.MULTILINE)


def test_what_is_broken_is_told_whole_and_seen_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Catalog.synced

    async def only_at_the_start(self: Catalog) -> None:
        if self.records.count("working") == 0:
            await synced(self)

    monkeypatch.setattr(Catalog, "synced", only_at_the_start)
    [story] = stories(found("--kind", "forget", "--way", "sync first", "--torn", "0"))
    assert re.match(r"BROKEN: forget: sync first: point \d, .*, power cut everywhere: found .* which should be ", story)
    assert re.search("^  point 0, at the beginning$", story, re.MULTILINE)
    again = story.splitlines()[-1].removeprefix("  again: ")
    python, _, module, *options = shlex.split(again)
    assert (python, module) == ("python", "tests.verification.crashing")
    outcomes = found(*options)
    assert stories(outcomes) == [story]
    assert sum(outcome.tally.looked + outcome.tally.deaths + outcome.tally.watched for outcome in outcomes) == 0


def tried(label: str) -> Tally:
    outcomes = found("--kind", "spill", "--way", "sync first", "--torn", "0", "--only", label)
    assert stories(outcomes) == []
    whole = Tally()
    for outcome in outcomes:
        whole.add(outcome.tally)
    return whole


def test_a_label_names_one_thing_to_try() -> None:
    assert tried("the tier dies before call 1, back later").deaths == 1
    assert tried("with a reader").watched == 1


def test_a_label_names_its_own_point_though_another_one_begins_like_it(tmp_path: Path) -> None:
    spill = KINDS["spill"]
    stage = running(lambda: carried_out(spill, Way(sync_last=False), tmp_path))
    labels = [scene.label for scene in scenes(stage.points, 0, spill).values()]
    short = next(label for label in labels if sum(label in other for other in labels) > 1)
    assert tried(short).looked == 1
    assert tried(f"{short},").looked == sum(f"{short}," in label for label in labels)


def test_a_way_that_there_is_not_is_answered_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--kind", "spill", "--way", "sync never", "--forgets", "1"])
    assert ended.value.code == 2
    assert "sync last, a forget at call 1\n" in capsys.readouterr().err
