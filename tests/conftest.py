"""What all tests share: they run on asyncio and on trio, and asynchronous ones are run by anyio.

A test that goes from one call to the next, and would take seconds to do so twice, names one loop: its `anyio_backend`
is parametrized. What goes on at once is tried on both, since they take turns in different ways.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# The tests start hundreds of processes of ours. Where Python is told to write no bytecode, as container images like to,
# each of them would compile all that it imports anew, and that is a third of what it costs to start one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says nothing about the code on a machine that has other things to do.
settings.register_profile("here", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend
