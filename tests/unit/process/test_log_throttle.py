"""A message that every call would log is logged once."""

import logging

import pytest

from a2m_router.process import log_throttle
from a2m_router.process.log_throttle import LogThrottle


class Clock:
    now = 5.0

    def monotonic(self) -> float:
        return self.now


def test_a_sentence_is_said_again_only_after_a_pause(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(log_throttle, "time", clock)
    log = LogThrottle(logging.getLogger("a2m_router.test"))
    for _ in range(200):
        clock.now += 1.0
        log.say(logging.WARNING, "it is full")
    log.say(logging.INFO, "another one")
    assert caplog.messages == ["it is full", "another one"]
    clock.now += log_throttle.QUIET
    log.say(logging.WARNING, "it is full")
    assert caplog.messages == ["it is full", "another one", "it is full"]


def test_what_is_remembered_does_not_grow_with_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(log_throttle, "time", clock)
    log = LogThrottle(logging.getLogger("a2m_router.test"))
    for number in range(10_000):
        clock.now += 1.0
        log.say(logging.DEBUG, f"sentence {number}")
    assert len(log._last) <= 1000
