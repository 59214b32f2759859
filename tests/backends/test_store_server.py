"""a2m-store's queue: order, batches, cancellation, and both ways of carrying out calls."""

from typing import Any

import anyio
import msgspec
import pytest

from a2m_router.protocol.server.server import Answering
from a2m_router.protocol.wire.errors import Code
from a2m_store.server import serving
from a2m_store.store import Store
from tests.support.store_calls import LOCAL, Clock

MODES = pytest.mark.parametrize(("backend", "threads"), [("asyncio", True), ("trio", False)])


async def ask(answer: Answering, method: str, **params: Any) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
    reply = await answer(msgspec.json.encode(message), LOCAL)
    assert reply is not None
    return msgspec.json.decode(reply)


@MODES
def test_calls_that_come_together_are_carried_out_in_order(backend: str, threads: bool) -> None:
    store = Store(None, clock=Clock())
    seen: dict[int, int] = {}

    async def write_and_count(server: Answering, number: int) -> None:
        await ask(server, "remember", records=[{"id": str(number), "content": "a"}])
        seen[number] = len((await ask(server, "timeline"))["result"]["records"])

    async def main() -> None:
        async with serving(store, threads=threads) as server, anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(write_and_count, server, number)

    anyio.run(main, backend=backend)
    assert sorted(seen) == list(range(50))
    # every call after an acknowledged write sees it
    assert all(count >= 1 for count in seen.values())
    store.close()


@MODES
def test_a_caller_that_is_cancelled_takes_nobody_along(backend: str, threads: bool) -> None:
    store = Store(None, clock=Clock())

    async def main() -> None:
        async with serving(store, threads=threads) as server:
            async with anyio.create_task_group() as tasks:
                impatient = anyio.CancelScope()

                async def give_up() -> None:
                    with impatient:
                        await ask(server, "remember", records=[{"id": "cancelled", "content": "a"}])

                async def stay() -> None:
                    impatient.cancel()
                    assert "result" in await ask(server, "remember", records=[{"id": "kept", "content": "b"}])

                tasks.start_soon(give_up)
                tasks.start_soon(stay)
            ids = {record["id"] for record in (await ask(server, "timeline"))["result"]["records"]}
            assert "kept" in ids

    anyio.run(main, backend=backend)
    store.close()


@MODES
def test_what_waits_at_the_end_is_still_carried_out(backend: str, threads: bool) -> None:
    store = Store(None, clock=Clock())
    answers: list[Any] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            async with serving(store, threads=threads) as server:

                async def write() -> None:
                    answers.append(await ask(server, "remember", records=[{"content": "a"}]))

                tasks.start_soon(write)
                await anyio.wait_all_tasks_blocked()
            answers.append(await ask(server, "timeline"))

    anyio.run(main, backend=backend)
    assert "result" in answers[0]
    assert answers[1]["error"]["code"] == Code.INTERNAL_ERROR
    store.close()


@MODES
def test_a_method_of_another_capability_is_not_supported(backend: str, threads: bool) -> None:
    store = Store(None, clock=Clock())

    async def main() -> None:
        async with serving(store, threads=threads) as server:
            for method in ("promote", "consolidate", "summarize"):
                assert (await ask(server, method))["error"]["code"] == Code.CAPABILITY_NOT_SUPPORTED
            assert (await ask(server, "dream"))["error"]["code"] == Code.METHOD_NOT_FOUND
            assert await server(b'{"jsonrpc":"2.0","method":"memory/timeline"}', LOCAL) is None

    anyio.run(main, backend=backend)
    store.close()
