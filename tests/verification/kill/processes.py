"""The processes of one federation: the router, the stores that it starts, and one store that is a server of its own.

All of them have the federation's mark in their environment, by which orphan processes are found. A router that ends is
started again until the federation ends. Each start is a *generation*; a router that has ended carries out no more
calls.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

import anyio
import anyio.abc
import psutil
from anyio.streams.text import TextReceiveStream

from a2m_router.protocol.client.child import connect_process
from a2m_router.protocol.client.client import Peer
from a2m_router.protocol.client.http_client import connect_http
from tests.verification.kill.account import Wrong

TIERS: Final = ("working", "episodic", "semantic")
CAPACITY: Final = {"working": 6, "episodic": 40}
MARK: Final = "A2M_KILL_FEDERATION"

# the seconds for anything here to happen; a hang becomes a finding
PATIENCE: Final = 60.0
# The seconds that an orphan process may live on. The next router's store waits two seconds for the file; the rest is
# for a busy machine with a busy disk.
ORPHANED: Final = 30.0

# A router with a store over HTTP runs unchanged except for its patience: a call without an answer counts as in doubt
# for so many seconds, more than a server hangs here, instead of half a minute.
_SETTLING: Final = 4.0
_HURRIED: Final = f"""
from a2m_router.daemon import app, cli
from a2m_router.protocol.client import http_client
app.SETTLING = {_SETTLING}
http_client.connect_http.__wrapped__.__kwdefaults__["settling"] = {_SETTLING}
raise SystemExit(cli.main())
"""

_LOOK: Final = 0.02  # seconds between two looks at a state that has no event

_FEDERATION: Final = """
state = "router.db"
{principals}
[tiers.working]
kind = "working"
{working}
capacity = {capacity[working]}
per_session = true
spill_to = "episodic"
half_life = "5m"
timeout = "1s"
[tiers.episodic]
kind = "episodic"
{episodic}
capacity = {capacity[episodic]}
spill_to = "semantic"
promote_to = "semantic"
promote_after = 3
half_life = "1d"
timeout = "1s"
[tiers.semantic]
kind = "semantic"
{semantic}
timeout = "1s"
"""

# The work left to the router: copies to delete, pending writes, writes to resolve, buckets to empty. A tier counts as
# not scanned while its scan runs.
_LEFT: Final = """
SELECT (SELECT count(*) FROM strays), (SELECT count(*) FROM redo),
    (SELECT count(*) FROM records WHERE home IS NULL), (SELECT count(*) FROM tiers WHERE NOT scanned),
    (SELECT count(*) FROM due)
"""
_REFUSAL: Final = r"(?m)^a2m-router: tiers\..*the catalog is older than the records there.*--rebuild$"

_OVERFULL: Final = "SELECT max(records) FROM buckets WHERE tier = (SELECT no FROM tiers WHERE name = ?)"


class Processes:
    """A federation on its files in `folder`.

    Args:
        owners: the callers; over HTTP each has a token of its own.
        http: whether clients reach the router over HTTP; else all of them share its pipes.
        remote: the tier whose store is a server of its own, over HTTP.
        before: is put before the command of each store that the router starts.
        tell: writes events into the history.
    """

    def __init__(
        self,
        folder: Path,
        owners: Sequence[str],
        *,
        http: bool,
        remote: str | None,
        tell: Callable[[str], None],
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.generation = 0  # of the router that answers, or is being started
        self.router: psutil.Process | None = None
        self.longest_orphan = 0.0
        self.tracebacks = 0
        self._owners = owners
        self._http = http
        self._remote = remote
        self._before = before
        self._tell = tell
        self._peers: dict[str, Peer] = {}
        self._up = anyio.Event()
        self._ending = False
        self._expected = False  # the end of the router is expected
        self._stopped: set[psutil.Process] = set()
        self._server: psutil.Process | None = None
        self._server_port = 0
        self._said: IO[str] | None = None
        # the generation of each router, and the files that it left, by the names of tiers and `router`
        self.copies: list[tuple[int, dict[str, Path]]] = []
        self._putting_back: tuple[str, Path] | None = None
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environment[MARK] = str(folder)

    # --- the clients' side

    async def door(self, owner: str) -> Peer:
        """Return the connection of an owner to the router; wait for one that is being started again."""
        while owner not in self._peers:
            await self._up.wait()
        return self._peers[owner]

    # --- running

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the federation within the block; kill it at the end of the block if `end` was not called."""
        self._said = (self.folder / "stderr").open("w", buffering=1)
        try:
            async with anyio.create_task_group() as tasks:
                if self._remote is not None:
                    await tasks.start(self._keep_server)
                (self.folder / "federation.toml").write_text(self._settings())
                tasks.start_soon(self._keep_running)
                yield
                self._ending = True
                tasks.cancel_scope.cancel()
        finally:
            for process in self.left_over():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._said.close()

    def _settings(self) -> str:
        store = [*self._before, _program("a2m-store")]
        commands = {tier: f"command = {json.dumps([*store, f'{tier}.db'])}" for tier in TIERS}
        if self._remote is not None:
            commands[self._remote] = f'url = "http://127.0.0.1:{self._server_port}/"'
        principals = "".join(
            f'[[serve.principals]]\nowner = "{each}"\ntoken_sha256 = "{_digest(each)}"\n' for each in self._owners
        )
        return _FEDERATION.format(principals=principals, capacity=CAPACITY, **commands)

    async def _keep_running(self) -> None:
        while not self._ending:
            if self._putting_back is not None:
                await self._take_place(*self._putting_back)
                self._putting_back = None
            async with AsyncExitStack() as stack:
                url = _Url()

                def relay(line: str, url: "_Url" = url) -> None:
                    self._note(line)
                    url.look_at(line)

                connection = await stack.enter_async_context(
                    connect_process(
                        self._command(),
                        name="router",
                        on_stderr=relay,
                        env=self._environment,
                        cwd=self.folder,
                    )
                )
                while self.router is None and not connection.lost.is_set():
                    self.router = self._find_router()
                    await anyio.sleep(_LOOK)  # a new process does not show its command at once
                if self._http:
                    async with anyio.create_task_group() as waiting:
                        waiting.start_soon(_first_of, waiting.cancel_scope, url.known.wait)
                        waiting.start_soon(_first_of, waiting.cancel_scope, connection.lost.wait)
                if not connection.lost.is_set():
                    for owner in self._owners:
                        self._peers[owner] = (
                            await stack.enter_async_context(
                                connect_http(url.text, headers={"Authorization": f"Bearer {_token(owner)}"})
                            )
                            if self._http
                            else connection
                        )
                    self._tell(f"router {self.generation} is process {self.router.pid if self.router else '?'}")
                    self._up.set()
                await connection.lost.wait()
                self._shut_door()
                if not self._expected and not self._ending:
                    raise Wrong(f"the router has ended by itself: {connection.reason}")
            self.router = None
            self._expected = False
            self._copy_files()
            self.generation += 1

    def _copy_files(self) -> None:
        """Copy the files that the router has left, possibly while a store is just ending."""
        copies: dict[str, Path] = {}
        for name in ("router", *(tier for tier in TIERS if tier != self._remote)):
            copies[name] = self.folder / f"{name}.db.copy-{self.generation}"
            with (
                closing(sqlite3.connect(f"file:{self.folder / name}.db?mode=ro", uri=True, timeout=PATIENCE)) as there,
                closing(sqlite3.connect(copies[name])) as copy,
            ):
                there.backup(copy)
        self.copies.append((self.generation, copies))

    async def put_back(self, name: str, copy: Path) -> None:
        """End the router in order, put a copy in the place of its catalog or of a tier's file, and start it again.

        Raises Wrong where an old catalog is not refused, or cannot be rebuilt.
        """
        self._tell(f"{copy.name} is put back")
        self._putting_back = name, copy
        await self.terminate()
        await self.door(self._owners[0])

    async def _take_place(self, name: str, copy: Path) -> None:
        await self._gone(self.stores().values() if self._remote is None else ())
        self._exchange(name, copy)
        if name != "router":
            return
        refused = await self._run("--check")
        if refused.returncode != 1 or not re.search(_REFUSAL, refused.stderr.decode()):
            raise Wrong(f"a catalog of earlier is not refused: {refused.returncode}, {refused.stderr.decode()}")
        made = await self._run("--rebuild")
        if made.returncode != 0:
            raise Wrong(f"the way out leads nowhere: {made.stderr.decode()}")

    def _exchange(self, name: str, copy: Path) -> None:
        for ending in ("", "-wal", "-shm"):
            Path(f"{self.folder / name}.db{ending}").unlink(missing_ok=True)
        shutil.copy(copy, self.folder / f"{name}.db")

    async def _run(self, what: str) -> "subprocess.CompletedProcess[bytes]":
        command = [_program("a2m-router"), "--config", "federation.toml", what]
        return await anyio.run_process(command, cwd=self.folder, env=self._environment, check=False)

    def _shut_door(self) -> None:
        """Drop the connections to a router that is gone; callers then wait for the next one."""
        self._peers.clear()
        if self._up.is_set():
            self._up = anyio.Event()

    def _command(self) -> list[str]:
        program = [_program("a2m-router")] if self._remote is None else [sys.executable, "-c", _HURRIED]
        return [*program, "--config", "federation.toml", *(["--http", "127.0.0.1:0"] if self._http else [])]

    def _find_router(self) -> psutil.Process | None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if child.environ().get(MARK) == str(self.folder) and "federation.toml" in child.cmdline():
                    return child
        return None

    async def _keep_server(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        while not self._ending:
            command = [_program("a2m-store"), f"{self._remote}.db", "--http", f"127.0.0.1:{self._server_port}"]
            async with await anyio.open_process(
                command, stdin=subprocess.DEVNULL, cwd=self.folder, env=self._environment
            ) as server:
                self._server = psutil.Process(server.pid)
                assert server.stderr is not None
                said = ""
                async for piece in TextReceiveStream(server.stderr, errors="replace"):
                    self._note(f"{self._remote}'s server: {piece.rstrip()}")
                    said += piece
                    found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
                    if found is not None and not self._server_port:
                        self._server_port = int(found[1])
                        task_status.started()
                if await server.wait() > 0:
                    raise Wrong(f"the server of {self._remote} has ended by itself: {said}")
                self._server = None

    def _note(self, line: str) -> None:
        self.tracebacks += line.startswith("Traceback")
        if self._said is not None and not self._said.closed:
            print(line, file=self._said)

    # --- faults

    def stores(self) -> dict[str, psutil.Process]:
        """Return the running stores by their tier."""
        running: dict[str, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for child in self.router.children() if self.router is not None else ():
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    line = child.cmdline()
                    running |= {tier: child for tier in TIERS if f"{tier}.db" in line}
        if self._remote is not None and self._server is not None:
            running[self._remote] = self._server
        return running

    async def kill(self, victims: Sequence[str]) -> None:
        """Send SIGKILL to the router (`router`) and to tiers' stores, in this order; wait for the end of orphan
        processes.

        Raises Wrong if one stays.
        """
        stores = self.stores()
        orphans: list[psutil.Process] = []
        for victim in victims:
            process = self.router if victim == "router" else stores.get(victim)
            if process is None:
                continue
            if victim == "router":
                self._expected = True
                self._shut_door()
                orphans = [store for tier, store in stores.items() if tier != self._remote]
            with suppress(psutil.NoSuchProcess):
                process.kill()
            self._tell(f"killed {victim}, process {process.pid}")
        await self._gone(process for process in orphans if process not in self._stopped)

    async def terminate(self) -> None:
        """Send SIGTERM to the router, which ends in order and is started again."""
        if self.router is not None:
            before = self.generation
            self._expected = True
            self._tell(f"SIGTERM to the router, process {self.router.pid}")
            with suppress(psutil.NoSuchProcess):
                self.router.terminate()
            await self._until(lambda: self.generation > before, "the router has not ended after SIGTERM")

    async def hang(self, victim: str, seconds: float) -> None:
        """Stop a store by SIGSTOP for a while: it hangs, keeps the calls that it gets, and carries them out later."""
        process = self.stores().get(victim)
        if process is None:
            return
        with suppress(psutil.NoSuchProcess):
            process.suspend()
        self._stopped.add(process)
        self._tell(f"stopped {victim}, process {process.pid}, for {seconds:.2f} s")
        await anyio.sleep(seconds)
        self._stopped.discard(process)
        with suppress(psutil.NoSuchProcess):
            process.resume()
        self._tell(f"{victim}, process {process.pid}, goes on")

    # --- the end

    async def settled(self) -> None:
        """Wait until the router has nothing left to do. Raises Wrong if that takes too long."""
        peer = await self.door(self._owners[0])
        # a router that has answered has opened its file; no other process should open it before
        await peer.call("memory/describe", {}, timeout=PATIENCE)
        left = ""

        def nothing_left() -> bool:
            nonlocal left
            left = self._left()
            return not left

        try:
            await self._until(nothing_left, "it does not settle")
        except Wrong as wrong:
            raise Wrong(f"{wrong}: {left}") from None

    def _left(self) -> str:
        path = self.folder / "router.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PATIENCE)) as catalog:
            counts = catalog.execute(_LEFT).fetchone()
            names = ("strays", "redone", "reserved", "tiers not accounted for", "promotions due")
            left = [f"{count} {name}" for count, name in zip(counts, names, strict=True) if count]
            for tier, capacity in CAPACITY.items():
                most = catalog.execute(_OVERFULL, (tier,)).fetchone()[0] or 0
                if most > capacity:
                    left.append(f"{most} in a bucket of {tier}, which takes {capacity}")
        return ", ".join(left)

    async def end(self) -> None:
        """End the router in order, and the separate server. Raises Wrong if a process is left."""
        self._ending = True
        if self.router is not None:
            with suppress(psutil.NoSuchProcess):
                self.router.terminate()
            await self._until(lambda: self.router is None, "the router does not end")
        if self._server is not None:
            with suppress(psutil.NoSuchProcess):
                self._server.terminate()
        await self._gone(self.left_over())

    def left_over(self) -> list[psutil.Process]:
        """Return every process that has this federation's mark."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.pid != os.getpid() and process.environ().get(MARK) == str(self.folder):
                    found.append(process)
        return found

    async def _gone(self, processes: Iterable[psutil.Process]) -> None:
        waited_for = list(processes)
        began = time.monotonic()
        while time.monotonic() - began < ORPHANED:
            waited_for = [process for process in waited_for if _lives(process)]
            if not waited_for:
                self.longest_orphan = max(self.longest_orphan, time.monotonic() - began)
                return
            await anyio.sleep(_LOOK)
        raise Wrong(f"{ORPHANED:g} s after its router there still is {_named(waited_for)}")

    async def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > PATIENCE:
                raise Wrong(f"{otherwise} within {PATIENCE:g} s")
            await anyio.sleep(_LOOK)


class _Url:
    """The address that a router listens on, from its stderr."""

    def __init__(self) -> None:
        self.text = ""
        self.known = anyio.Event()

    def look_at(self, line: str) -> None:
        found = re.search(r"a2m-router \S+ listens on (http://\S+)", line)
        if found is not None:
            self.text = found[1]
            self.known.set()


async def _first_of(scope: anyio.CancelScope, wait: Callable[[], Awaitable[None]]) -> None:
    await wait()
    scope.cancel()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _named(processes: Collection[psutil.Process]) -> str:
    named = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            named.append(f"{process.pid} ({process.status()}): {' '.join(process.cmdline())}")
    return "; ".join(named)


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _token(owner: str) -> str:
    return f"token-of-{owner}"


def _digest(owner: str) -> str:
    return sha256(_token(owner).encode()).hexdigest()
