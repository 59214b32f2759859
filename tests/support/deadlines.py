"""A call's deadline that passes when the test says so: one of some tenths of a second also passes while a busy machine
has not come to what the test is about."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import anyio
import pytest


class Deadline:
    """For calls that are given `SECONDS`, which pass when the test says so, and never by themselves."""

    SECONDS: Final = 98765.0  # nothing else has as many

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scopes: list[anyio.CancelScope] = []
        for name in ("fail_after", "move_on_after"):
            monkeypatch.setattr(anyio, name, self._noting(getattr(anyio, name)))

    def passes(self) -> None:
        """For every call that is under way by now."""
        assert self._scopes, f"no call was given {self.SECONDS:g} s"
        for scope in self._scopes:
            scope.deadline = anyio.current_time()

    def _noting(self, original: Callable[..., AbstractContextManager[anyio.CancelScope]]) -> Any:
        @contextmanager
        def after(delay: float | None, *arguments: Any, **options: Any) -> Iterator[anyio.CancelScope]:
            with original(delay, *arguments, **options) as scope:
                if delay != self.SECONDS:
                    yield scope
                    return
                self._scopes.append(scope)
                try:
                    yield scope
                finally:
                    self._scopes.remove(scope)

        return after
