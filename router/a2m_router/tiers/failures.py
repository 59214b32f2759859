"""The errors that several rooms raise for a tier that failed. Pure."""

from typing import Final

from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, Code

# The reason of a call that failed because its records kept changing.
CHANGING: Final = "changing"


def changing(sentence: str, retry_after: float = 1.0) -> A2MError:
    """Return INTERNAL_ERROR for a call whose records kept changing."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": CHANGING, "retry_after": retry_after})


def unaccounted(tier: str, reason: str) -> A2MError:
    """Return INTERNAL_ERROR for a call that needs to know all that a tier holds."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"not all records of the tier {tier!r} are known yet: {reason}",
        {"tier": tier, "reason": reason, "retry_after": 1.0},
    )


def untrue(tier: str, problem: str) -> A2MError:
    """Return INTERNAL_ERROR for a call about a record that its tier has lost or changed.

    It has no `retry_after`: a retry does not help. `problem` says what does.
    """
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} has answered, but {problem}",
        {"tier": tier, "reason": NOT_AS_WRITTEN},
    )


def unanswered(tier: str, reason: str, retry_after: float) -> A2MError:
    """Return INTERNAL_ERROR for a call that needs a tier which does not answer."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} does not answer: {reason}",
        {"tier": tier, "reason": reason, "retry_after": retry_after},
    )
