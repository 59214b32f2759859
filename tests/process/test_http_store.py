"""An a2m-store on HTTP as a tier's server, which is killed and started again."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from a2m_router.tiers.link import TierDown
from tests.support.addresses import reserved_port
from tests.support.links import linked
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    # as the router runs
    return ("asyncio", {"use_uvloop": True}) if request.param == "asyncio" else request.param


@contextmanager
def store(file: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run an a2m-store on HTTP; yield it, and its address."""
    command = [str(PROGRAMS / "a2m-store"), str(file), "--http", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found is not None, line + process.stderr.read()
            yield process, found[0]
        finally:
            process.kill()


async def test_a_store_behind_http_is_a_tier_and_back_after_its_end(tmp_path: Path) -> None:
    async def content() -> list[str]:
        found = msgspec.json.decode(await link.call("memory/timeline", {}))["records"]
        return [record["content"] for record in found]

    file = tmp_path / "remote.db"
    with reserved_port() as port, store(file, port) as (process, url):
        async with linked(f'url = "{url}"', tmp_path) as link:
            await link.wait_up()
            await link.call("memory/remember", {"records": [{"content": "a pear tree"}]})
            assert await content() == ["a pear tree"]
            process.kill()
            process.wait()
            while link.status == "up":
                with pytest.raises(TierDown, match=r"cannot be reached|the connection broke"):
                    await link.call("memory/remember", {"records": []})
            assert "cannot be reached: Connection refused" in str(link.reason)
            with store(file, port):
                await link.wait_up()
                assert await content() == ["a pear tree"]
