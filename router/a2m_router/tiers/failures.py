"""What a caller is told of a tier that has not done its part: the errors that several rooms raise for it. Pure."""

from typing import Final

from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, Code

# Why a call came to nothing whose subject did not stand still.
CHANGING: Final = "changing"


def changing(sentence: str, retry_after: float = 1.0) -> A2MError:
    """INTERNAL_ERROR for a call whose subject did not stand still."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": CHANGING, "retry_after": retry_after})


def unaccounted(tier: str, reason: str) -> A2MError:
    """INTERNAL_ERROR for a call that could not do without knowing what a tier holds."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"what the tier {tier!r} holds is not known yet: {reason}",
        {"tier": tier, "reason": reason, "retry_after": 1.0},
    )


def untrue(tier: str, problem: str) -> A2MError:
    """INTERNAL_ERROR for a call about a record that its tier has lost, or holds otherwise than it was written. It has
    no `retry_after`: to repeat the call does not help, and `problem` says what does."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} has answered, but {problem}",
        {"tier": tier, "reason": NOT_AS_WRITTEN},
    )


def unanswered(tier: str, reason: str, retry_after: float) -> A2MError:
    """INTERNAL_ERROR for a call that could not do without a tier."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} does not answer: {reason}",
        {"tier": tier, "reason": reason, "retry_after": retry_after},
    )
