"""The routers of a simulated federation, one after the other. Each starts on what the last one left, and may die.

A router that dies is cut off at that moment: no tier and no client receives anything from it any more. It leaves its
catalog as committed at that moment or, after a power cut, as last synced. Whatever it still does changes a catalog that
no router will open.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

import anyio
import apsw
import msgspec
import trio

import a2m_router.storage.nearest
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.config.settings import Settings
from a2m_router.config.settings import Tier as TierSettings
from a2m_router.daemon.app import Federation, running_federation
from a2m_router.placement.rebuilding import rebuild
from a2m_router.ranking.policy import strength
from a2m_router.summaries.summarizing import Extracts
from a2m_router.tiers.link import Link
from tests.support.federated import Clock
from tests.verification.simulation.tiers import Tier

# a moment that is not a call to a tier
COMMIT: Final = "commit"

# the seconds for calls under way when a router is stopped
_GRACE: Final = 2.0


@contextmanager
def restored(image: bytes | None) -> Iterator[None]:
    """Let the database that is opened in memory within the block begin as an image."""
    load = a2m_router.storage.nearest.load

    def loaded(connection: apsw.Connection) -> None:
        if image is not None:
            connection.deserialize("main", image)
        load(connection)

    with patch.object(a2m_router.storage.nearest, "load", loaded):
        yield


class KeptCatalog(Catalog):
    """A catalog in memory that begins as the image of an earlier one, and leaves an image when it is closed.

    Args:
        point: is called after every commit.
        loses_power: at its death it leaves only what was synced.
    """

    def __init__(
        self, image: bytes | None, tiers: list[TierSettings], point: Callable[[str], None], *, loses_power: bool
    ) -> None:
        with restored(image):
            super().__init__(None, tiers, strength, threads=False)
        self.left = image
        self._dead = False
        self._loses_power = loses_power
        self._synced = image
        if loses_power:
            self._syncing = GroupCommit(self._note_synced, threads=False)
        database = self.database
        begin = database.transaction

        @contextmanager
        def transaction() -> Iterator[apsw.Connection]:
            with begin() as connection:
                yield connection
            if database._depth == 0:
                point(COMMIT)

        database.transaction = transaction  # type: ignore[method-assign]  # watched

    def image(self) -> bytes:
        """Return the image of all that is committed."""
        return bytes(self.database.connection.serialize("main"))

    def die(self) -> None:
        """Fix the image that is left; later commits do not change it."""
        self._dead = True
        self.left = self._synced if self._loses_power else self.image()

    def _note_synced(self) -> None:
        self._synced = self.image()

    def close(self) -> None:
        """Close in good order. The catalog of a dead router stays open, since the router's tasks still use it."""
        if not self._dead:
            self.left = self.image()
            super().close()


@contextmanager
def stumbling(router: "Router") -> Iterator[None]:
    """Ignore the exceptions of a dead router, whose resources are closed around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        if not router.dead:
            raise
        cancelled = group.subgroup(trio.Cancelled)
        if cancelled is not None:
            raise cancelled from None
    except Exception:
        if not router.dead:
            raise


def is_redoing(image: bytes) -> bool:
    """Return whether the catalog has a pending write.

    If the record was forgotten later and this catalog is put back, the record is back, too: the router cannot
    distinguish it from one that its tier has lost.
    """
    with closing(apsw.Connection(":memory:")) as catalog:
        catalog.deserialize("main", image)
        return catalog.execute("SELECT 1 FROM redo LIMIT 1").get is not None


async def made_anew(settings: Settings, tiers: Mapping[str, Tier], clock: Clock, chance: Random, image: bytes) -> bytes:
    """Return the image of the catalog that a rebuild makes of an image and of the tiers' records."""
    # the links need a router that lives; this one never dies
    nobody = Router(settings, tiers, clock, chance, None, lambda: None, lambda what: None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "router.db"
        path.write_bytes(image)
        await rebuild(msgspec.structs.replace(settings, state=path), nobody.links, lambda tier, read, of: None)
        with closing(apsw.Connection(str(path))) as made:
            made.pragma("journal_mode", "delete")  # a database in memory has no write-ahead log
        return path.read_bytes()


class Router:
    """One router, from its start to its end.

    Args:
        image: the catalog that the last one left.
        changed: is called when the router becomes ready, and when it no longer is.
    """

    def __init__(
        self,
        settings: Settings,
        tiers: Mapping[str, Tier],
        clock: Clock,
        chance: Random,
        image: bytes | None,
        changed: Callable[[], None],
        point: Callable[[str], None],
    ) -> None:
        self.federation: Federation | None = None
        self.dead = False
        self.stopping = False
        self.left = image
        self.calls: dict[anyio.CancelScope, None] = {}  # in the order of their beginning
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._point = point
        self._scope = anyio.CancelScope()
        self._catalog: KeptCatalog | None = None
        self._image = image
        self.loses_power = chance.random() < 0.25
        self.links = {
            name: Link(name, tier.connect(self), timeout=settings.tier(name).timeout, random=chance.random)
            for name, tier in tiers.items()
        }

    def image(self) -> bytes:
        """Return a copy of the present catalog."""
        assert self._catalog is not None
        return self._catalog.image()

    @property
    def is_ready(self) -> bool:
        """Whether clients can reach it."""
        return self.federation is not None and not self.dead and not self.stopping

    def point(self, what: str) -> None:
        """See `Watched`."""
        if not self.dead:
            self._point(what)

    def homes(self, ids: Iterable[str]) -> list[str | None]:
        """See `Watched`."""
        assert self._catalog is not None
        found = self._catalog.records.find(ids)
        return [found[id].home if id in found else None for id in ids]

    async def run(self) -> None:
        """Run until the end, of any kind; afterwards `left` is the image that the next router starts on."""
        with self._scope:
            catalog = self._catalog = KeptCatalog(
                self._image, list(self._settings.managed), self.point, loses_power=self.loses_power
            )
            try:
                with stumbling(self):
                    async with running_federation(
                        self._settings,
                        self.links,
                        clock=self._clock,
                        catalog=catalog,
                        summarizer=Extracts(threads=False),
                    ) as federation:
                        self.federation = federation
                        self._changed()
                        try:
                            await anyio.sleep_forever()
                        finally:
                            # calls under way run in their clients' tasks, and need resources that are closed after this
                            with anyio.CancelScope(shield=True):
                                await self._let_go()
            finally:
                self.left = catalog.left

    def die(self) -> None:
        """Die at this moment."""
        assert self._catalog is not None
        self.dead = True
        self._catalog.die()
        self._scope.cancel()
        for call in list(self.calls):
            call.cancel()
        self._changed()

    async def stop(self) -> None:
        """Stop in good order: take no more calls, and give those under way a moment."""
        self.stopping = True
        self._changed()
        with anyio.move_on_after(_GRACE):
            await self._let_go()
        for call in list(self.calls):
            call.cancel()
        await self._let_go()
        self._scope.cancel()

    async def _let_go(self) -> None:
        while self.calls:  # noqa: ASYNC110 - a clock that jumps does not make this expensive
            await anyio.sleep(0.1)
