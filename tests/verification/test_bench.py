"""The benchmarks of bad conditions start, and evaluate their observations correctly. Their measurements do not
matter."""

import pytest

from bench import hanging, overload
from bench.hanging import Seen, Wide
from bench.overload import Came, Figures, Watched
from tests.support.processes import INTERRUPTED, end_with


@pytest.mark.parametrize("bench", [hanging, overload])
def test_a_bench_explains_itself(bench: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])  # type: ignore[attr-defined]  # both have it
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (1, 1), (None, None)])
def test_a_bench_ends_with_its_exit_code(code: int | None, ended: int | None) -> None:
    with pytest.raises(SystemExit) as end:
        end_with(lambda: code)
    assert end.value.code == ended


def test_a_bench_that_is_interrupted_ends_without_a_traceback() -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        end_with(main)
    assert end.value.code == INTERRUPTED == 130


# --- one tier hangs


def seen(narrow: float, *wide: Wide) -> Seen:
    return Seen([0.01] * 98 + [narrow] * 2, list(wide))


WELL = seen(0.02, Wide(0.02, []))
WAITED = Wide(1.01, ["semantic"])
AT_ONCE = Wide(0.01, ["semantic"])


@pytest.mark.parametrize(
    ("while_it_hangs", "said"),
    [
        (seen(0.029, WAITED, AT_ONCE), ""),
        (seen(0.031, WAITED, AT_ONCE), "the p99 is 1.55 times"),
        (seen(0.02, WAITED, Wide(0.01, [])), "1 recalls of all tiers do not report"),
        (seen(0.02, Wide(1.6, ["semantic"])), "took 1.60 s"),
    ],
)
def test_a_tier_that_hangs_must_cost_the_others_little(
    while_it_hangs: Seen, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = hanging.report({"all tiers work": WELL, "semantic hangs": while_it_hangs})
    printed = capsys.readouterr().out
    assert (missed, "MISSED" in printed) == (int(bool(said)), bool(said))
    assert said in printed


# --- overload


@pytest.mark.parametrize(
    ("status", "head", "body", "kind"),
    [
        (200, b"", b'{"result": {"records": []}}', "good"),
        (200, b"", b'{"result": {"records": [], "degraded": [{"tier": "all"}]}}', "degraded"),
        (503, b"\r\nRetry-After: 1", b"busy", overload.REFUSALS[0]),
        (200, b"", b'{"error": {"code": -32603, "data": {"reason": "overloaded"}}}', overload.REFUSALS[1]),
        (503, b"", b"busy", "503 without Retry-After"),
        (200, b"", b'{"error": {"code": -32603, "message": "x"}}', "error -32603, reason None"),
        (502, b"", b"", "HTTP 502"),
    ],
)
def test_an_answer_is_good_or_an_explicit_refusal_or_neither(status: int, head: bytes, body: bytes, kind: str) -> None:
    assert overload.kind_of(status, head, body) == kind


def came(good: int, **others: int) -> list[Came]:
    kinds = {"good": good, **{name.replace("_", " "): count for name, count in others.items()}}
    return [Came(kind, place % 2, 0.1) for kind, count in kinds.items() for place in range(count)]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (Figures(peak=10, begun=80, seconds=2, came=came(16)), ""),
        (Figures(peak=10, begun=80, seconds=2, came=came(15)), "good answers at 75%"),
        (Figures(peak=10, begun=80, seconds=2, came=came(20, HTTP_502=1)), "{'HTTP 502': 1}"),
        (Figures(peak=10, begun=80, seconds=2, came=came(20), silent=3), "{'no answer': 3}"),
    ],
)
def test_overload_must_be_refused_in_so_many_words(
    figures: Figures, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = [Came(kind, 0.5, 0.01) for kind in overload.REFUSALS]
    figures.came += refused
    missed = overload.report(figures, Watched())
    printed = capsys.readouterr().out
    assert (missed, "MISSED" in printed) == (int(bool(said)), bool(said))
    assert said in printed
