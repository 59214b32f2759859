"""The text of the report: the outcomes by section, the counts, and the list of sentences."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from a2m_router.conformance.running import ALL_CHECKS, Outcome, State
from a2m_router.conformance.sentences import SENTENCES

# a server's own text, of several lines, is indented below the sentence that quotes it
_NEWLINE, _INDENTED = "\n", "\n        "


def lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a line for each outcome as it comes, with a heading at each new section."""
    section = ""
    for outcome in outcomes:
        if outcome.state is State.NOT_ASKED:
            continue
        if outcome.check.section != section:
            section = outcome.check.section
            yield f"\n{section}"
        title = _title(outcome)
        marks = ", ".join(f"§{sentence}" for sentence in outcome.check.sentences)
        match outcome.state:
            case State.PASSED:
                yield f"  ok    {title}"
            case State.FAILED:
                yield f"  FAIL  {title} ({marks})\n        {outcome.why.replace(_NEWLINE, _INDENTED)}"
            case State.SKIPPED | State.NOT_APPLICABLE:
                yield f"  -     {title}: {outcome.state.value}, {outcome.why}"


def failed(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a line for each failed check, with its section."""
    for outcome in outcomes:
        if outcome.state is State.FAILED:
            yield f"failed: {outcome.check.section}: {_title(outcome)}"


def counts(outcomes: Sequence[Outcome]) -> str:
    """Return the last line."""
    counted = Counter(outcome.state for outcome in outcomes)
    inapplicable = counted[State.NOT_APPLICABLE]
    before = f"{inapplicable} not applicable to this binding or profile; " if inapplicable else ""
    if counted[State.NOT_ASKED]:
        before += f"{counted[State.NOT_ASKED]} not run, since the server is gone; "
    return f"{before}{counted[State.PASSED]} passed, {counted[State.FAILED]} failed, {counted[State.SKIPPED]} skipped"


def _title(outcome: Outcome) -> str:
    return outcome.check.name.partition(".")[2].replace("_s_", "'s ").replace("_", " ")


def checks_of() -> dict[str, list[str]]:
    """Return the names of the checks that test each sentence."""
    found: dict[str, list[str]] = {sentence.id: [] for sentence in SENTENCES}
    for check in ALL_CHECKS:
        for sentence in check.sentences:
            found[sentence].append(check.name)
    return found


def sentence_lines(*, tested: bool) -> Iterator[str]:
    """Yield every sentence with its checks (if `tested`), or with the reason why there is none."""
    checks = checks_of()
    for sentence in SENTENCES:
        words = f"{', '.join(sentence.words)}: " if sentence.words else ""
        if tested and checks[sentence.id]:
            yield f"§{sentence.id} {words}{sentence.says}"
            yield from (f"      {name}" for name in checks[sentence.id])
        elif sentence.untested:
            yield f"§{sentence.id} {words}{sentence.says}\n      not tested: {sentence.untested}"
