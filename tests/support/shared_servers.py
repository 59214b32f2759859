"""A server that several federations use, one after the other or at once."""

from pathlib import Path
from typing import Any

import msgspec

from tests.servers.core_only import CoreOnly
from tests.support.federated import Foreign, Mix


class Shared(msgspec.Struct):
    """One server that outlives the federations that use it."""

    server: CoreOnly

    def mix(self) -> Mix:
        shared = self.server

        class Same(Foreign, frozen=True):
            def behind(self, tier: Any, path: Path | None) -> CoreOnly:
                return shared

        return {"semantic": Same()}
