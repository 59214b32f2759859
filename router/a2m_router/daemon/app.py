"""One running federation: builds the objects, owns the tasks, recovers, and shuts down in order.

The shutdown is the reverse of the start. The server that clients call (stdio or HTTP) stops before the block of
`running_federation` ends. Then the background work finishes its current move, the links end their child processes, and
the catalog is closed.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.abc

from a2m_router.backup.backing_up import Backups
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.findings import Torn
from a2m_router.config.settings import Settings
from a2m_router.methods.backing_up import BackingUp
from a2m_router.methods.context import Context, scope_of
from a2m_router.methods.describing import CAPABILITIES, Describing
from a2m_router.methods.dispatch import table
from a2m_router.methods.forgetting import Forgetting
from a2m_router.methods.reading import Readings
from a2m_router.methods.summaries import Summaries
from a2m_router.methods.upkeep import Upkeep
from a2m_router.methods.writing import Writing
from a2m_router.placement.admission import Admission
from a2m_router.placement.core import core_of
from a2m_router.placement.delivering import Delivering
from a2m_router.placement.distilling import Distilling, Rewriter
from a2m_router.placement.moves import Moves
from a2m_router.placement.passes import Passes
from a2m_router.placement.planning import Planner, new_id
from a2m_router.placement.recovery import Recovery
from a2m_router.placement.scanning import Intake, Scanner
from a2m_router.placement.writing import Writes
from a2m_router.process.budget import budget
from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.client.http_client import SETTLING
from a2m_router.protocol.server.event_log import EventLog
from a2m_router.protocol.server.server import Dispatcher, Gate
from a2m_router.protocol.server.watching import Watching
from a2m_router.ranking.policy import strength
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import Homes
from a2m_router.reading.recalls import Recalls
from a2m_router.reading.resolving import Resolving
from a2m_router.reading.timelines import Timelines
from a2m_router.summaries.model import Model, connect_model
from a2m_router.summaries.prompting import Prompting
from a2m_router.summaries.summarizing import Extracts, ModelSummaries, Summarizer
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.link import Link
from a2m_router.tiers.mode import Modes
from a2m_router.tiers.mounts import Mounts

log = logging.getLogger(__name__)

# How often old tombstones are deleted.
_HOUSEKEEPING_SECONDS: Final = 3600.0

# How long background work pauses after a failure.
_RESTART_SECONDS: Final = 5.0

# How long running calls may take after a shutdown begins. Then the router stops waiting for the tiers; after the second
# period every call that is still running is answered with its state so far. The server waits longer than both together
# for its last answers.
_LAST_CALLS_SECONDS: Final = 7.0
_LAST_ANSWERS_SECONDS: Final = 1.0


def now() -> int:
    """Return the time, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Federation:
    """A running federation. `answer` handles the messages of stdio and HTTP; the rest is for the daemon and tests."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        links: Mapping[str, Link],
        tasks: anyio.abc.TaskGroup,
        clock: Callable[[], int],
        summarizer: Summarizer,
        model: Model | None,
        *,
        adopt: bool,
        threads: bool,
    ) -> None:
        self.settings = settings
        self.catalog = catalog
        self.links = links
        self._tasks = tasks
        self._clock = clock
        modes = Modes(settings.tiers, links, catalog.queries.lifting)
        self.mounts = mounts = Mounts(modes)
        gateway = TierGateway(links, modes, settings.limits.max_message, catalog.tiers.note_metadata, catalog.lineage)
        core = core_of(catalog, gateway, settings.managed, self._spawn)
        self.reconciler = core.reconciler
        self.moves = Moves(core)
        events = EventLog(settings.events.retained)
        rewriter = Rewriter(summarizer, settings.limits.max_content_length, new_id)
        distilling = Distilling(core, self.moves, rewriter, clock)
        self.passes = Passes(settings, core, distilling, events.append, clock)
        intake = Intake(changed=events.break_off, adopt=adopt, gather=self._gather)
        self.recovery = Recovery(settings, core, modes, Scanner(settings, core, intake))
        self.admission = Admission(settings, core, self.recovery, self._spawn, self.passes.tier_changed)
        planner = Planner(settings, catalog, gateway, mounts, clock)
        writes = Writes(core, planner, Delivering(core, self.moves))
        fan_out = FanOut(catalog, gateway, mounts)
        homes = Homes(catalog, gateway, mounts)
        context = Context(settings, catalog, gateway, mounts, clock, events.append, self.passes.wake)
        prompting = Prompting(model, settings.summarizer.max_input if settings.summarizer else 0)
        readings = Readings(
            context,
            Recalls(settings, catalog, fan_out, homes),
            Timelines(catalog, fan_out, homes, mounts),
            prompting,
        )
        writing = Writing(context, writes)
        backups = Backups(settings, catalog, links, self._spawn, clock, threads=threads)
        describing = Describing(context, summarizer, prompting, backup=backups.offered)
        families = (
            describing,
            writing,
            Forgetting(context, Resolving(catalog, fan_out), self.reconciler),
            readings,
            Upkeep(context, self.moves, self.passes),
            Summaries(context, readings, writing, summarizer),
            Watching(events, lambda caller, owner: context.sight(scope_of(caller, owner))),
            BackingUp(backups),
        )
        self.describe = describing.describe
        self.methods = table(families, catalog, settings.serve.timeout)
        self.answer = Gate(Dispatcher(self.methods, CAPABILITIES), settings.serve.max_requests)
        self._ending = False

    @property
    def problems(self) -> dict[str, str]:
        """Why tiers that are up are inactive, by their names."""
        return {name: link.inactive_reason for name, link in self.links.items() if link.inactive_reason is not None}

    async def start(self) -> None:
        """Recover, start the background work, and wait for the tiers, for a limited time.

        Tiers that are not up by then join later.

        Raises:
            CannotServe: a tier that is up cannot be part of the federation.
        """
        self.catalog.begin_recovery()
        with_work = self.catalog.queries.tiers_with_work()
        for tier in self.settings.managed:
            # A call of the last run may still be carried out at a remote server; a child process of that run is dead.
            # After an unclean stop the catalog may have lost the note of such a call, so hold the tier in any case.
            if tier.url is not None and (not self.catalog.opening.ended_well or tier.name in with_work):
                self.reconciler.hold(tier.name, SETTLING)
        await self.admission.start()
        self._tasks.start_soon(_kept_running, self.reconciler.run)
        if self.settings.policy.background:
            self._tasks.start_soon(_kept_running, self.passes.run)
        self._tasks.start_soon(_kept_running, self._keep_house)

    def end_calls(self) -> None:
        """Begin the shutdown. Running calls get a few seconds to finish; then they are answered with their state so
        far."""
        if not self._ending:
            self._ending = True
            self._tasks.start_soon(self._cut_short)

    async def _cut_short(self) -> None:
        await anyio.sleep(_LAST_CALLS_SECONDS)
        self.passes.stop()
        for link in self.links.values():
            link.give_up()
        await anyio.sleep(_LAST_ANSWERS_SECONDS)
        self.answer.end()

    async def _gather(self, torn: Torn) -> None:
        """Move the part of a torn group that is in one tier to the tier of the rest."""
        await self.moves.carry_out([torn.unit], torn.source, torn.target)

    def _spawn(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start work that outlives the call that started it, and that call's deadline. A failure is logged."""

        async def guarded() -> None:
            try:
                with budget(None):
                    await function()
            except Exception:
                log.exception("background work failed; unfinished work is recorded in the catalog and is retried")

        self._tasks.start_soon(guarded)

    async def _keep_house(self) -> None:
        while True:
            kept = int(self.settings.policy.forgotten_for * 1000)
            self.catalog.drop_notes_before(self._clock() - kept)
            await anyio.sleep(_HOUSEKEEPING_SECONDS)


async def _kept_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run background work, again after each failure. Failures are logged, with a traceback unless it is an OSError."""
    throttled = LogThrottle(log)
    while True:
        try:
            await work()
        except OSError as problem:
            throttled.say(logging.ERROR, f"background work failed, retried every {_RESTART_SECONDS:g} s: {problem}")
            await anyio.sleep(_RESTART_SECONDS)
        except Exception:
            # unfinished work is recorded in the catalog, so that the next run finds it
            log.exception("background work failed, retry in %g s", _RESTART_SECONDS)
            await anyio.sleep(_RESTART_SECONDS)


@asynccontextmanager
async def running_federation(
    settings: Settings,
    links: Mapping[str, Link],
    *,
    clock: Callable[[], int] = now,
    threads: bool = True,
    adopt: bool = False,
    catalog: Catalog | None = None,
    summarizer: Summarizer | None = None,
) -> AsyncIterator[Federation]:
    """Start a federation, and yield it when it has recovered and is ready to answer. Shut it down at the end.

    Args:
        settings: the federation file, checked.
        links: one for each tier, by its name; not started yet.
        clock: returns the time in milliseconds since 1970.
        threads: wait for the disk on worker threads; False for tests with a virtual clock.
        adopt: accept that a tier has another store than at the last start, with all its records.
        catalog: an open catalog, used instead of the state file of the settings; closed at the end, too.
        summarizer: writes summaries, instead of the one that the settings name.

    Raises:
        DatabaseError: the catalog cannot be used.
        CannotServe: a tier cannot be part of the federation.
    """
    if catalog is None:
        catalog = Catalog(settings.state, settings.managed, strength, threads=threads)
    try:
        async with _model_of(settings) as model, anyio.create_task_group() as connections:
            for link in links.values():
                connections.start_soon(link.run)
            async with anyio.create_task_group() as tasks:
                summarizer = summarizer or _summarizer_of(settings, model, threads=threads)
                federation = Federation(
                    settings, catalog, links, tasks, clock, summarizer, model, adopt=adopt, threads=threads
                )
                await federation.start()
                yield federation
                tasks.cancel_scope.cancel()
            connections.cancel_scope.cancel()
    finally:
        catalog.close()


@asynccontextmanager
async def _model_of(settings: Settings) -> AsyncIterator[Model | None]:
    """Connect to the model that the settings name; yield None if they name none."""
    if settings.summarizer is None:
        yield None
    else:
        async with connect_model(settings.summarizer) as model:
            yield model


def _summarizer_of(settings: Settings, model: Model | None, *, threads: bool) -> Summarizer:
    if settings.summarizer is None or model is None:
        return Extracts(threads=threads)
    return ModelSummaries(model, settings.summarizer.max_input)
