"""Runs the checks on one server, in their order, and yields their outcomes."""

from collections.abc import Collection, Iterator
from enum import Enum
from typing import NamedTuple

from a2m_router.conformance import (
    checks_core,
    checks_embeddings,
    checks_errors,
    checks_events,
    checks_external,
    checks_http,
    checks_keys,
    checks_prompt,
    checks_read_only,
    checks_records,
    checks_salience,
    checks_scopes,
    checks_sessions,
    checks_stdio,
    checks_summarize,
    checks_tiers,
)
from a2m_router.conformance.checking import CHECKS, Check, Failure, NotApplicable, Skipped, Target
from a2m_router.conformance.client import NoAnswer, Stdio

# last of all stdio, whose last checks end the server
_ORDER = (
    *(checks_core, checks_records, checks_read_only, checks_errors, checks_tiers, checks_salience, checks_scopes),
    *(checks_sessions, checks_keys, checks_embeddings, checks_external, checks_events, checks_summarize),
    *(checks_prompt, checks_http, checks_stdio),
)
SECTIONS = tuple(module.__name__.rpartition("checks_")[2] for module in _ORDER)
ALL_CHECKS = tuple(sorted(CHECKS, key=lambda check: SECTIONS.index(check.section)))


class State(Enum):
    PASSED = "ok"
    FAILED = "FAIL"
    SKIPPED = "skipped"
    NOT_APPLICABLE = "not applicable"
    NOT_ASKED = "not asked"  # the server was gone


class Outcome(NamedTuple):
    """The outcome of a check; `why` is the reason if it did not pass."""

    check: Check
    state: State
    why: str = ""


def outcomes(target: Target, sections: Collection[str] = SECTIONS) -> Iterator[Outcome]:
    """Yield the outcome of every check in these sections. Call `target.meet()` before."""
    for check in ALL_CHECKS:
        if check.section in sections:
            yield Outcome(check, State.NOT_ASKED) if target.gone else outcome(check, target)


def judged(client: Stdio) -> list[Outcome]:
    """Return the outcomes of all checks of the server that `client` has started, and end the server."""
    try:
        target = Target(client, None)
        target.meet()
        return list(outcomes(target))
    finally:
        client.close()


def outcome(check: Check, target: Target) -> Outcome:
    """Run one check, and forget its records. Call `target.meet()` before.

    If the server died before or during the check, the check fails, and the server is restarted for the next one.
    """
    inapplicable = _not_for(check, target)
    if inapplicable:
        return Outcome(check, State.NOT_APPLICABLE, inapplicable)
    missing = [capability for capability in check.needs if capability not in target.capabilities]
    if missing:
        return Outcome(check, State.SKIPPED, f"{' and '.join(missing)} is not declared")
    before = target.recovered(doubtful=False)
    if target.gone:
        return Outcome(check, State.FAILED, f"This check was not run: {before}")
    came, unanswered = _asked(check, target)
    cleaned = target.clean()
    after = target.recovered(doubtful=unanswered or not cleaned)
    if not before and not after:
        return came
    passed = "" if came.state is State.FAILED else "The calls of this check were answered."
    first = f"Before this check: {before}" if before else ""
    return Outcome(check, State.FAILED, "\n".join(filter(None, [first, came.why or passed, after])))


def _asked(check: Check, target: Target) -> tuple[Outcome, bool]:
    """Run a check on a running server; return its outcome, and whether a call was not answered at all."""
    target.begin()
    try:
        check.run(target)
    except NotApplicable as reason:
        return Outcome(check, State.NOT_APPLICABLE, str(reason)), False
    except Skipped as reason:
        return Outcome(check, State.SKIPPED, str(reason)), False
    except (Failure, NoAnswer) as failure:
        return Outcome(check, State.FAILED, str(failure)), isinstance(failure, NoAnswer)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as surprise:
        # a check relies on the structure of answers in the protocol; another structure raises these
        why = f"an answer did not have the expected structure: {type(surprise).__name__}: {surprise}"
        return Outcome(check, State.FAILED, why), False
    return Outcome(check, State.PASSED), False


def _not_for(check: Check, target: Target) -> str:
    if check.binding not in (None, target.client.binding):
        return f"this is the {target.client.binding} binding"
    if check.read_only and not target.read_only:
        return "the server accepts writes"
    if check.writes and target.read_only:
        return "the server is read-only"
    if check.unless in target.capabilities:
        return f"{check.unless} is declared"
    return ""
