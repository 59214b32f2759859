"""The routers of a simulated federation, one after the other: each starts on what the last one left, and may die.

A router that dies is cut off at that moment: no tier hears of it any more, and no client. What it leaves is its catalog
as it was committed then; or, if it is the power that fails, as it was when it was last synced.
What it still does is done to a catalog that nobody will open.
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

# calls under way when a router is stopped are given so long
_GRACE: Final = 2.0


@contextmanager
def restored(image: bytes | None) -> Iterator[None]:
    """What is opened in memory within this block begins as an image."""
    load = a2m_router.storage.nearest.load

    def loaded(connection: apsw.Connection) -> None:
        if image is not None:
            connection.deserialize("main", image)
        load(connection)

    with patch.object(a2m_router.storage.nearest, "load", loaded):
        yield


class KeptCatalog(Catalog):
    """A catalog in memory that begins as an image of an earlier one, and leaves one when it is closed.

    Args:
        point: is called after every commit.
        loses_power: what it leaves when it dies is what was synced.
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
        """All that is committed."""
        return bytes(self.database.connection.serialize("main"))

    def die(self) -> None:
        """Nothing that is committed after this is left."""
        self._dead = True
        self.left = self._synced if self._loses_power else self.image()

    def _note_synced(self) -> None:
        self._synced = self.image()

    def close(self) -> None:
        """In good order; one that was left by a death stays open, since the dead still stumble about in it."""
        if not self._dead:
            self.left = self.image()
            super().close()


@contextmanager
def stumbling(router: "Router") -> Iterator[None]:
    """The dead stumble over what is closed around them, and nobody listens."""
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
    """Whether a tier has yet to catch up with something in this catalog. If that was forgotten since, and the catalog
    is put back, it is there again: nobody can tell it from what its tier has lost."""
    with closing(apsw.Connection(":memory:")) as catalog:
        catalog.deserialize("main", image)
        return catalog.execute("SELECT 1 FROM redo LIMIT 1").get is not None


async def made_anew(settings: Settings, tiers: Mapping[str, Tier], clock: Clock, chance: Random, image: bytes) -> bytes:
    """The image of the catalog that a rebuild makes, of an image and of what the tiers hold."""
    # it needs somebody to be alive, and nobody dies here
    nobody = Router(settings, tiers, clock, chance, None, lambda: None, lambda what: None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "router.db"
        path.write_bytes(image)
        await rebuild(msgspec.structs.replace(settings, state=path), nobody.links, lambda tier, read, of: None)
        with closing(apsw.Connection(str(path))) as made:
            made.pragma("journal_mode", "delete")  # memory knows no log
        return path.read_bytes()


class Router:
    """One router, from its start to its end. `loses_power`: if it dies, what was not synced goes with it.

    Args:
        image: what the last one left.
        changed: is called when it is ready, and when it is not any more.
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
        self.calls: dict[anyio.CancelScope, None] = {}  # in the order in which they came
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
        """A copy of its catalog, as it is now."""
        assert self._catalog is not None
        return self._catalog.image()

    @property
    def is_ready(self) -> bool:
        """Whether clients reach it."""
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
        """Returns when it has ended, in whichever way; `left` is what the next one starts on."""
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
                            # calls under way run in their clients' tasks, and need what is closed after this
                            with anyio.CancelScope(shield=True):
                                await self._let_go()
            finally:
                self.left = catalog.left

    def die(self) -> None:
        """Right here."""
        assert self._catalog is not None
        self.dead = True
        self._catalog.die()
        self._scope.cancel()
        for call in list(self.calls):
            call.cancel()
        self._changed()

    async def stop(self) -> None:
        """In good order: it takes no calls any more, and those under way are given a moment."""
        self.stopping = True
        self._changed()
        with anyio.move_on_after(_GRACE):
            await self._let_go()
        for call in list(self.calls):
            call.cancel()
        await self._let_go()
        self._scope.cancel()

    async def _let_go(self) -> None:
        while self.calls:  # noqa: ASYNC110 - a clock that jumps waits for nothing
            await anyio.sleep(0.1)
