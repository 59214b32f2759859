"""Overload: a call above a limit is refused at once with a clear error and has no effect. Also the timeout of a
request.
"""

import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest

from a2m_router.protocol.client.client import connect_local
from a2m_router.protocol.client.http_client import connect_http
from a2m_router.protocol.server.http import application, serve_http
from a2m_router.protocol.server.server import Caller, Gate
from a2m_router.protocol.server.stdio import serve_lines
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import parse_request, render_result
from tests.support.clocks import simulated
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    settings_of,
    trial,
)


class Slow:
    """A server that answers its calls once `go` is set. `begun` counts the calls that it has taken."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = anyio.Event()

    async def __call__(self, message: bytes, _: Caller) -> bytes | None:
        self.begun += 1
        await self.go.wait()
        id = parse_request(message).id
        return None if id is None else render_result(id, {})


def call(id: int | None) -> bytes:
    message = {"jsonrpc": "2.0", "method": "memory/describe"}
    return json.dumps(message if id is None else {**message, "id": id}).encode()


async def begun(slow: Slow, calls: int) -> None:
    with anyio.fail_after(30):
        while slow.begun < calls:
            await anyio.lowlevel.checkpoint()


# --- the gate, in front of any server


@pytest.mark.anyio
async def test_on_a_pipe_a_call_too_many_is_rejected_at_once() -> None:
    """The calls within the limit are answered later."""
    slow = Slow()
    to_server, requests = anyio.create_memory_object_stream[bytes](10)
    replies, from_server = anyio.create_memory_object_stream[bytes](10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(functools.partial(serve_lines, Gate(slow, 2), requests, replies, max_underway=4))
        for id in (1, 2):
            await to_server.send(call(id) + b"\n")
        await begun(slow, 2)
        await to_server.send(call(3) + b"\n" + call(None) + b"\n")
        refused = json.loads(await from_server.receive())
        assert refused["id"] == 3
        assert refused["error"] == {
            "code": -32603,
            "message": "overloaded: 2 calls are in progress, which is the limit of this server; try again in a while",
            "data": {"reason": "overloaded", "retry_after": 1},
        }
        slow.go.set()
        answered: set[int] = set()
        while answered < {1, 2}:
            answered |= {json.loads(line)["id"] for line in (await from_server.receive()).splitlines()}
        assert answered == {1, 2}
        await to_server.send(call(4) + b"\n")
        assert json.loads(await from_server.receive()) == {"jsonrpc": "2.0", "id": 4, "result": {}}
        assert slow.begun == 3  # the refused call and the notification were not begun
        to_server.close()
    for stream in (requests, replies, from_server):
        stream.close()


@pytest.mark.anyio
async def test_on_a_pipe_no_more_bytes_are_held_than_may_be() -> None:
    slow = Slow()
    to_server, requests = anyio.create_memory_object_stream[bytes](10)
    replies, from_server = anyio.create_memory_object_stream[bytes](10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(functools.partial(serve_lines, slow, requests, replies, max_held=1000))
        large = b" " * 900
        await to_server.send(call(1) + large + b"\n" + call(2) + large + b"\n")
        await begun(slow, 1)
        await anyio.wait_all_tasks_blocked()
        assert slow.begun == 1
        slow.go.set()
        ids: list[int] = []
        while len(ids) < 2:
            ids += [json.loads(line)["id"] for line in (await from_server.receive()).splitlines()]
        assert ids == [1, 2]
        await to_server.send(call(3) + large + large + b"\n")  # a single message is taken, however large
        assert json.loads(await from_server.receive())["id"] == 3
        to_server.close()
    for stream in (requests, replies, from_server):
        stream.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_over_http_a_call_too_many_has_the_status_that_says_so() -> None:
    slow = Slow()

    async def profile(_: Caller) -> dict[str, Any]:
        return {}

    app = application(Gate(slow, 1), admit=lambda _: LOCAL, profile=profile)
    async with anyio.create_task_group() as tasks, httpx.AsyncClient(verify=False) as http:
        _, port = await tasks.start(serve_http, app, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{port}/"
        headers = {"Content-Type": "application/json"}
        tasks.start_soon(functools.partial(http.post, url, content=call(1), headers=headers))
        await begun(slow, 1)
        refused = await http.post(url, content=call(2), headers=headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["content-type"] == "application/json"
        assert (refused.json()["id"], refused.json()["error"]["data"]["reason"]) == (2, "overloaded")
        async with connect_http(url) as peer:
            with pytest.raises(A2MError, match="overloaded: ") as failure:
                await peer.call("memory/describe", {}, timeout=30)
            assert failure.value.data == {"reason": "overloaded", "retry_after": 1}
        slow.go.set()
        assert (await http.post(url, content=call(3), headers=headers)).status_code == 200
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_what_cannot_be_read_is_told_so_even_where_there_is_no_room() -> None:
    gate = Gate(Slow(), 0)
    answer = json.loads(await gate(b"{", LOCAL) or b"")
    assert (answer["id"], answer["error"]["code"]) == (None, Code.PARSE_ERROR)


# --- the federation


def crowded(max_calls: int = 1, **serve: Any) -> Any:
    """Return settings of four tiers. Semantic takes `max_calls` calls at once, and as many more may wait."""
    tier = '[tiers.semantic]\nkind = "semantic"'
    text = FOUR_TIERS.replace(tier, f"{tier}\nmax_calls = {max_calls}")
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in serve.items())
    return settings_of(f"[serve]\n{lines}{text}", policy="explicit")


async def occupied(fed: Trial, steer: Steered, tasks: Any) -> Task:
    """Fill the semantic tier with calls until it takes no more. They end when `fed.release` is called."""
    hold = steer.hold("semantic", "recall")
    first = Task(tasks, lambda: fed.call("recall", query="x", tier="semantic"))
    await hold.reached.wait()
    Task(tasks, lambda: fed.call("recall", query="x", tier="semantic"))
    await anyio.wait_all_tasks_blocked()
    fed.release = hold.release  # type: ignore[attr-defined]
    return first


@pytest.mark.rule(n=12)
@pytest.mark.anyio
async def test_a_tier_with_too_many_calls_is_left_out_and_the_answer_says_so() -> None:
    steer = Steered()
    async with trial(crowded(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("x here")
        await fed.remember("x there", id="s", tier="semantic")
        first = await occupied(fed, steer, tasks)
        answer = await fed.call("recall", query="x")
        assert [r["content"] for r in answer["records"]] == ["x here"]
        assert answer["degraded"] == [{"tier": "semantic", "reason": "overloaded"}]
        with pytest.raises(A2MError, match="does not answer: overloaded") as failure:
            await fed.call("recall", query="x", tier="semantic")
        assert failure.value.data == {"tier": "semantic", "reason": "overloaded", "retry_after": 1.0}
        with pytest.raises(A2MError, match="the tier 'semantic' has reached its concurrency limit") as failure:
            await fed.remember("y", id="y", tier="semantic")
        assert failure.value.data == {"reason": "overloaded", "retry_after": 1, "tier": "semantic"}
        fed.release()  # type: ignore[attr-defined]
        await first.settled()
        assert (await fed.call("recall", query="x", tier="semantic"))["records"]
        assert [r["id"] for r in await fed.timeline(tier="semantic")] == ["s"]  # the refused write had no effect
        await fed.settled()
        assert_nothing_under_way(fed)


@pytest.mark.anyio
async def test_work_in_the_background_goes_on_where_clients_are_refused() -> None:
    steer = Steered()
    async with trial(crowded(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("x", tier="semantic")
        hold = steer.hold("semantic", "recall", after=True)
        first = Task(tasks, lambda: fed.call("recall", query="x", tier="semantic"))
        second = Task(tasks, lambda: fed.call("recall", query="x", tier="semantic"))
        await hold.reached.wait()
        await fed.call("forget", ids=ids)
        hold.release()
        await first.settled()
        await second.settled()
        await fed.settled()
        assert fed.copies() == {}


@pytest.mark.anyio
async def test_the_federation_takes_so_many_requests_at_once() -> None:
    steer = Steered()
    async with trial(crowded(8, max_requests=1), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("x", tier="semantic")
        hold = steer.hold("semantic", "recall")
        first = Task(tasks, lambda: fed.call("recall", query="x", tier="semantic"))
        await hold.reached.wait()
        async with connect_local(fed.federation.answer) as another:
            with pytest.raises(A2MError, match="1 calls are in progress"):
                await another.call("memory/timeline", {}, timeout=None)
            hold.release()
            assert (await first.ended())["records"]
            await another.call("memory/timeline", {}, timeout=None)


# --- the time of a request


@simulated
async def test_a_write_gives_up_waiting_for_others_when_its_time_is_over() -> None:
    steer = Steered()
    async with trial(crowded(8, timeout="3s"), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("old", key="k", tier="semantic")
        hold = steer.hold("semantic", "remember")
        stuck = Task(tasks, lambda: fed.remember("new", key="k"))
        await hold.reached.wait()
        began = anyio.current_time()
        with pytest.raises(A2MError, match="is still in doubt") as failure:
            await fed.remember("newer", key="k")
        assert failure.value.data is not None
        assert failure.value.data["reason"] == "unsettled"
        assert anyio.current_time() - began == pytest.approx(3)
        hold.release()
        await stuck.settled()
        await fed.settled()
        assert_nothing_under_way(fed)


@simulated
async def test_the_parts_of_a_read_share_its_time() -> None:
    async def slow(tier: str, message: bytes, go: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if b"memory/recall" in message:
            await anyio.sleep(3)
        return await go()

    async with trial(crowded(8, timeout="7s"), weather=slow) as fed:
        # The timeline reads a hundred records at a time, one part after the other. Each part takes 3 s.
        ids = [f"r{n}" for n in range(400)]
        await fed.call("remember", records=[{"id": id, "content": id, "tier": "semantic"} for id in ids])
        began = anyio.current_time()
        with pytest.raises(A2MError, match="semantic"):
            await fed.timeline(tier="semantic")
        assert anyio.current_time() - began == pytest.approx(7)
        link = fed.federation.links["semantic"]
        assert link.status == "up"  # a deadline that ran out is no evidence of a failing tier
        assert len(await fed.timeline(limit=200)) == 200


# --- why a tier is inactive


@pytest.mark.anyio
async def test_answers_say_why_a_tier_that_is_up_takes_no_part(tmp_path: Path) -> None:
    settings = settings_of(policy="explicit")
    async with trial(settings, folder=tmp_path) as fed:
        await fed.remember("x")
        await fed.remember("y", tier="semantic")
    (tmp_path / "semantic.db").unlink()  # the tier gets another store
    down = {"semantic"}
    async with trial(settings, folder=tmp_path, down=down) as fed:
        down.clear()
        link = fed.federation.links["semantic"]
        with anyio.fail_after(30):
            await link.wait_up()
            while link.inactive_reason is None:
                await anyio.lowlevel.checkpoint()
        [down_tier] = (await fed.call("timeline"))["degraded"]
        assert down_tier["tier"] == "semantic"
        assert "another store is behind this tier than last time" in down_tier["reason"]
        described = {tier["name"]: tier for tier in (await fed.call("describe"))["tiers"]}
        assert (described["semantic"]["status"], described["working"].get("reason")) == ("up", None)
        assert described["semantic"]["reason"] == down_tier["reason"]
        with pytest.raises(A2MError, match="another store is behind this tier"):
            await fed.remember("z", tier="semantic")


def test_the_bounds_are_read_from_the_file() -> None:
    settings = crowded(3, max_requests=7, timeout="90s")
    assert (settings.serve.max_requests, settings.serve.timeout, settings.tier("semantic").max_calls) == (7, 90.0, 3)
    assert settings.tier("working").max_calls == 256
    assert msgspec.structs.replace(settings) == settings
