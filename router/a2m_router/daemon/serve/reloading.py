"""Who comes in over HTTP, by the principals of the file as it was last read: at the start, and whenever that is asked
for. Connections and calls under way are not touched: a call is its principal's who was let in with it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from a2m_router.config.loading import ConfigError, mistaken_rights
from a2m_router.config.settings import Principal, Settings
from a2m_router.daemon.serve import rights
from a2m_router.daemon.serve.authentication import admission
from a2m_router.protocol.server.server import Caller, Refusal

log = logging.getLogger(__name__)


class Door:
    """The door's rules, and what reads them anew.

    Args:
        settings: those that the router runs by; of what is read later, only the principals count.
        read: the file's settings as they are now; raises ConfigError. It is called on a thread.
    """

    def __init__(self, settings: Settings, read: Callable[[], Settings]) -> None:
        self._settings = settings
        self._read = read
        self._wanted = anyio.Event()
        self._admit = self._admission(settings.serve.principals)

    def admit(self, headers: Mapping[str, str]) -> Caller | Refusal:
        """Who a request with these headers comes from, or why it is refused; see `admission`."""
        return self._admit(headers)

    def say_who_may_write(self) -> None:
        """Logs who may write where, and what is to be said against it."""
        principals, tiers = self._settings.serve.principals, self._settings.tiers
        for sentence in rights.told(principals, tiers):
            log.info("%s", sentence)
        warning = rights.warning(principals, tiers)
        if warning is not None:
            log.warning("%s", warning)

    def read_soon(self) -> None:
        """Has the file read anew by `run`; once, however often this is called before it is."""
        self._wanted.set()

    async def run(self) -> None:
        """Reads the file anew whenever that is wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()  # a file that is changed while it is read is read once more
            await self._reload()

    async def _reload(self) -> None:
        before = self._settings
        try:
            file = await anyio.to_thread.run_sync(self._read)
            mistakes = self._mistakes(file.serve.principals)
        except ConfigError as problem:
            mistakes = str(problem).splitlines()
        except Exception:
            log.exception("the principals could not be read anew; they are as they were")
            return
        if mistakes:
            for sentence in mistakes:
                log.error("the principals are as they were, %s cannot be used: %s", before.path, sentence)
            return
        principals = file.serve.principals
        self._admit = self._admission(principals)
        self._settings = _with_principals(before, principals)
        log.info("principals read anew: %s", _changes(before.serve.principals, principals))
        if _with_principals(file, principals, http=before.serve.http) != self._settings:
            log.warning("%s: what has changed in it beside the principals takes a restart", before.path)
        self.say_who_may_write()

    def _mistakes(self, principals: Sequence[Principal]) -> list[str]:
        """Why these principals cannot be those of a router that runs."""
        if self._settings.serve.principals and not principals:
            return ["serve.principals: there is none any more, so that everybody would be let in; that takes a restart"]
        return list(mistaken_rights(principals, self._settings.tiers))  # the file's tiers may be others

    def _admission(self, principals: Sequence[Principal]) -> Callable[[Mapping[str, str]], Caller | Refusal]:
        caller = partial(rights.caller, principals=principals, tiers=self._settings.tiers)
        return admission(self._settings.serve.origins, principals, caller)


def _with_principals(settings: Settings, principals: tuple[Principal, ...], *, http: str | None = None) -> Settings:
    serve = msgspec.structs.replace(settings.serve, principals=principals, http=http or settings.serve.http)
    return msgspec.structs.replace(settings, serve=serve, token_variables=frozenset())


def _changes(before: Sequence[Principal], after: Sequence[Principal]) -> str:
    """What has become of the principals, by their owners; several may have one owner."""
    had, has = ({(p.owner, p.token_sha256): p for p in principals} for principals in (before, after))
    new = [owner for owner, token in has if (owner, token) not in had]
    gone = [owner for owner, token in had if (owner, token) not in has]
    rights = [owner for owner, token in has if (owner, token) in had and has[owner, token] != had[owner, token]]
    parts = (("new tokens of", new), ("no longer valid: tokens of", gone), ("other rights for", rights))
    said = [f"{what} {', '.join(map(repr, dict.fromkeys(owners)))}" for what, owners in parts if owners]
    return "; ".join(said) or "nothing has changed"
