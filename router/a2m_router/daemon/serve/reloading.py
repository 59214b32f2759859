"""Authentication by the principals of the file, which can be reloaded while the router runs.

A reload does not affect connections or running calls: a call keeps the principal that it was accepted with.
"""

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


class Authentication:
    """The rules of authentication, and their reload.

    Args:
        settings: the settings of the running router. A reload replaces only the principals.
        read: loads the file; raises ConfigError. It is called on a thread.
    """

    def __init__(self, settings: Settings, read: Callable[[], Settings]) -> None:
        self._settings = settings
        self._read = read
        self._wanted = anyio.Event()
        self._admit = self._admission(settings.serve.principals)

    def admit(self, headers: Mapping[str, str]) -> Caller | Refusal:
        """Return the caller of a request with these headers, or why it is rejected; see `admission`."""
        return self._admit(headers)

    def log_rights(self) -> None:
        """Log which principal may write into which tiers, and a warning if that is too much."""
        principals, tiers = self._settings.serve.principals, self._settings.tiers
        for sentence in rights.write_rights(principals, tiers):
            log.info("%s", sentence)
        warning = rights.warning(principals, tiers)
        if warning is not None:
            log.warning("%s", warning)

    def reload_soon(self) -> None:
        """Make `run` reload the file. Several calls before it does so cause one reload."""
        self._wanted.set()

    async def run(self) -> None:
        """Reload the file after each `reload_soon`, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()  # set during the reload, it causes another one: the file may have changed
            await self._reload()

    async def _reload(self) -> None:
        before = self._settings
        try:
            file = await anyio.to_thread.run_sync(self._read)
            mistakes = self._mistakes(file.serve.principals)
        except ConfigError as problem:
            mistakes = str(problem).splitlines()
        except Exception:
            log.exception("principals not reloaded, the old ones stay in force")
            return
        if mistakes:
            for sentence in mistakes:
                log.error("principals not reloaded, the old ones stay in force: %s: %s", before.path, sentence)
            return
        principals = file.serve.principals
        self._admit = self._admission(principals)
        self._settings = _with_principals(before, principals)
        log.info("principals reloaded: %s", _changes(before.serve.principals, principals))
        if _with_principals(file, principals, http=before.serve.http) != self._settings:
            log.warning("%s: settings other than the principals have changed too; they need a restart", before.path)
        self.log_rights()

    def _mistakes(self, principals: Sequence[Principal]) -> list[str]:
        """Return why these principals cannot be used by the running router."""
        if self._settings.serve.principals and not principals:
            return ["serve.principals: all principals are removed, which would admit any caller; this needs a restart"]
        # checked against the running router's tiers: those of the file may differ
        return list(mistaken_rights(principals, self._settings.tiers))

    def _admission(self, principals: Sequence[Principal]) -> Callable[[Mapping[str, str]], Caller | Refusal]:
        caller = partial(rights.caller, principals=principals, tiers=self._settings.tiers)
        return admission(self._settings.serve.origins, principals, caller)


def _with_principals(settings: Settings, principals: tuple[Principal, ...], *, http: str | None = None) -> Settings:
    serve = msgspec.structs.replace(settings.serve, principals=principals, http=http or settings.serve.http)
    return msgspec.structs.replace(settings, serve=serve, token_variables=frozenset())


def _changes(before: Sequence[Principal], after: Sequence[Principal]) -> str:
    """Return what a reload changed, in words, by the owners of the principals; several may have the same owner."""
    had, has = ({(p.owner, p.token_sha256): p for p in principals} for principals in (before, after))
    new = [owner for owner, token in has if (owner, token) not in had]
    removed = [owner for owner, token in had if (owner, token) not in has]
    rights = [owner for owner, token in has if (owner, token) in had and has[owner, token] != had[owner, token]]
    parts = (("new tokens of", new), ("removed tokens of", removed), ("changed rights of", rights))
    changes = [f"{what} {', '.join(map(repr, dict.fromkeys(owners)))}" for what, owners in parts if owners]
    return "; ".join(changes) or "no changes"
