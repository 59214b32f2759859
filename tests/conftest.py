"""What all tests share: they run on asyncio and on trio, and asynchronous ones are run by anyio."""

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend
