"""Calls to a store as a client makes them: JSON in, JSON out."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.jsonrpc import read_params
from a2m_store.batch import Call, carry_out
from a2m_store.drafts import StoreLimits
from a2m_store.server import METHODS
from a2m_store.store import Store

LOCAL = Caller(asserts_owner=True)
ANYBODY = Caller(asserts_owner=False)

START = 1_790_000_000_000


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now


class Asked:
    """A store and a clock; `asked("recall", query="x")` returns the decoded result, or raises A2MError."""

    def __init__(
        self, path: Path | None = None, *, metric: str | None = None, limits: StoreLimits | None = None
    ) -> None:
        self.clock = Clock()
        self.store = Store(path, clock=self.clock, metric=metric, limits=limits)

    def __call__(self, method: str, caller: Caller = LOCAL, **params: Any) -> Any:
        [outcome] = carry_out(self.store, [self.call(method, caller, **params)], durable=False)
        if isinstance(outcome, Exception):
            raise outcome
        return msgspec.json.decode(msgspec.json.encode(outcome))

    def call(self, method: str, caller: Caller = LOCAL, **params: Any) -> Call:
        served = METHODS[f"memory/{method}"]
        read = read_params(msgspec.Raw(msgspec.json.encode(params)), served.params)
        return Call(partial(served.carried_out_by, self.store, read, caller), served.writes)

    def remember(self, *records: Any, **params: Any) -> list[str]:
        ids: list[str] = self("remember", records=list(records), **params)["ids"]
        return ids

    def contents(self, method: str = "timeline", **params: Any) -> list[str]:
        return [record["content"] for record in self(method, **params)["records"]]

    def refused(self, method: str, **params: Any) -> A2MError:
        [outcome] = carry_out(self.store, [self.call(method, **params)], durable=False)
        assert isinstance(outcome, A2MError), outcome
        return outcome

    def everything(self) -> Iterator[tuple[Any, ...]]:
        """Yield everything that the file holds, table by table."""
        with self.store.transaction() as connection:
            tables = connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND rootpage > 0 ORDER BY name"
            )
            for (table,) in list(tables):
                yield (table,)
                yield from connection.execute(f'SELECT * FROM "{table}" ORDER BY 1, 2')
