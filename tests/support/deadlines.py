"""A call's deadline that passes when the test says so.

A real deadline of some tenths of a second may pass on a busy machine before the code under test is reached.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import anyio
import pytest


class Deadline:
    """Lets the deadline of calls with a timeout of `SECONDS` pass when the test says so, and never by itself."""

    SECONDS: Final = 98765.0  # no other timeout has this value

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scopes: list[anyio.CancelScope] = []
        for name in ("fail_after", "move_on_after"):
            monkeypatch.setattr(anyio, name, self._noting(getattr(anyio, name)))

    def passes(self) -> None:
        """Let the deadline of every such call in progress pass now."""
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
