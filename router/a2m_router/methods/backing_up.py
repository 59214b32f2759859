"""store/backup: an extension, which a2m-store offers too."""

from collections.abc import Mapping

from a2m_router.backup.backing_up import Backups, State
from a2m_router.methods.context import sees_all
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Backup
from a2m_router.storage.backup_jobs import METHOD


class BackingUp:
    """Takes requests for backups."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    def methods(self) -> Mapping[str, Method]:
        return {METHOD: Method(Backup, self.backup)}

    async def backup(self, params: Backup, caller: Caller) -> State:
        if not sees_all(caller):
            raise A2MError(
                Code.SCOPE_DENIED, "a backup holds what belongs to others: only who may see all may have one"
            )
        if not self._backups.offered:
            raise A2MError(Code.METHOD_NOT_FOUND, f"{METHOD!r}: this federation is kept in memory, without files")
        return await self._backups.backup(params)
