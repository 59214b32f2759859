"""Opens a memory over HTTP, or over the standard streams of a program.

Each function is a context manager. It yields a `Memory` whose server has answered `describe`, and closes everything at
its end. It may be entered in one task and left in another.
"""

import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from a2m_router.protocol.client.child import connect_process
from a2m_router.protocol.client.http_client import connect_http
from a2m_router.protocol.client.memory import TIMEOUT, Memory
from a2m_router.protocol.client.own_task import in_own_task
from a2m_router.protocol.wire.jsonrpc import Notification

# the valid values of a header (RFC 9110 §5.5), without characters outside ASCII
_TOKEN: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")

log = logging.getLogger(__name__)

OnNotification = Callable[[dict[str, Any]], None]


@in_own_task
@asynccontextmanager
async def connect(
    url: str,
    token: str | None = None,
    *,
    timeout: float = TIMEOUT,
    owner: str | None = None,
    ca_file: Path | None = None,
    few: bool = False,
) -> AsyncIterator[Memory]:
    """Connect to the memory at `url`, over HTTP (§8.3).

    Args:
        token: sent as `Authorization: Bearer` (§6.1).
        ca_file: certificates (PEM) to trust instead of the usual authorities.
        few: for only a few calls: the client starts faster, and keeps no connection open.

    Raises:
        ValueError: the URL or the token is not valid.

    It also raises what every call raises; see `Memory`.
    """
    headers = None
    if token is not None:
        # checked here, since the HTTP library's error would quote the token
        if not _TOKEN.fullmatch(token):
            raise ValueError("the token cannot be sent in an HTTP header: expected visible ASCII characters")
        headers = {"Authorization": f"Bearer {token}"}
    async with connect_http(_checked_url(url), headers=headers, ca_file=ca_file, few=few) as peer:
        yield await greeted(Memory(peer, timeout=timeout, owner=owner))


@in_own_task
@asynccontextmanager
async def connect_command(
    command: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    owner: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_stderr: Callable[[str], None] | None = None,
    on_notification: OnNotification | None = None,
) -> AsyncIterator[Memory]:
    """Start a program that speaks A2M on its standard streams (§8.2), and connect to it; it ends with the block.

    Args:
        env: the program's whole environment; None passes on this process's own.
        on_stderr: is called with each line of its stderr; by default, lines go to the log.
        on_notification: is called with each event after `Memory.subscribe`: `kind`, `at` and the fields of its kind.

    Raises:
        CannotStart: the program cannot be started.

    It also raises what every call raises; see `Memory`.
    """
    name = Path(command[0]).name if command else "server"

    def log_line(line: str) -> None:
        log.info("%s: %s", name, line)

    async with connect_process(
        command,
        name=name,
        on_stderr=on_stderr or log_line,
        env=env,
        cwd=cwd,
        on_notification=events_for(on_notification),
    ) as peer:
        yield await greeted(Memory(peer, timeout=timeout, owner=owner))


async def greeted(memory: Memory) -> Memory:
    """Return the memory after calling `describe`, so that a connection that cannot work fails at once."""
    await memory.describe()
    return memory


def events_for(on_notification: OnNotification | None) -> Callable[[Notification], None] | None:
    """Return a handler that passes on the events among notifications as plain values (§4.13)."""
    if on_notification is None:
        return None

    def pass_on(notification: Notification) -> None:
        if notification.method != "memory/event":
            return
        try:
            on_notification(msgspec.json.decode(notification.params, type=dict[str, Any]))
        except Exception:
            # this runs in the connection's own task, which must continue
            log.exception("event not delivered: on_notification failed")

    return pass_on


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        # without quoting it, since it may contain a password
        raise ValueError("expected a URL that begins with http:// or https://, such as http://127.0.0.1:8778/")
    return url
