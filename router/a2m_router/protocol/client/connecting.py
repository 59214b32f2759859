"""The ways to a memory: over HTTP, and behind a program on its standard streams.

Each is a block: inside it there is a `Memory` whose server has said what it is, and after it nothing is left behind. It
may be entered in one task and left in another.
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

# what a header's value may be (RFC 9110 §5.5), without the characters that only look like ASCII's
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
    """The memory at `url`, over HTTP (§8.3).

    Args:
        token: what an `Authorization: Bearer` header shows (§6.1).
        ca_file: certificates (PEM) to trust instead of the usual authorities.
        few: whether few calls will be made: it begins sooner, and keeps no connection.

    Raises ValueError for what is no such URL or token, and what all calls raise.
    """
    headers = None
    if token is not None:
        # the HTTP library's own complaint would quote it
        if not _TOKEN.fullmatch(token):
            raise ValueError("the token holds what no HTTP header can: expected visible ASCII characters")
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
    """The memory behind a program that speaks A2M on its standard streams (§8.2); it ends with the block.

    Args:
        env: the program's whole environment; None hands on this process's own.
        on_stderr: is told of each line of its stderr; by default the log is.
        on_notification: is told of each event after `Memory.subscribe`, as `kind`, `at` and what its kind has.

    Raises CannotStart, and what all calls raise.
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
    """The memory, after its server has said what it is; so a connection that cannot work fails when it is made."""
    await memory.describe()
    return memory


def events_for(on_notification: OnNotification | None) -> Callable[[Notification], None] | None:
    """Hands the events among a connection's notifications on, as plain values (§4.13)."""
    if on_notification is None:
        return None

    def hand_on(notification: Notification) -> None:
        if notification.method != "memory/event":
            return
        try:
            on_notification(msgspec.json.decode(notification.params, type=dict[str, Any]))
        except Exception:
            # it is called from the connection's own task, which must go on
            log.exception("an event could not be handed on")

    return hand_on


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        # without quoting it, since an address may hold a password
        raise ValueError("expected a URL that begins with http:// or https://, such as http://127.0.0.1:8778/")
    return url
