"""store/backup: an extension of the protocol, which a2m-store has, too."""

from collections.abc import Mapping

from a2m_router.backup.backing_up import Backups, State
from a2m_router.methods.context import sees_all
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Backup
from a2m_router.storage.backup_jobs import METHOD


class BackingUp:
    """Handles backup calls."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    def methods(self) -> Mapping[str, Method]:
        return {METHOD: Method(Backup, self.backup)}

    async def backup(self, params: Backup, caller: Caller) -> State:
        if not sees_all(caller):
            raise A2MError(
                Code.SCOPE_DENIED, "a backup holds records of all owners: only a caller that may see all can make one"
            )
        if not self._backups.offered:
            raise A2MError(Code.METHOD_NOT_FOUND, f"{METHOD!r}: this federation has no files, it is in memory only")
        return await self._backups.backup(params)
