"""Facts about the managed tiers and their servers."""

import contextlib

from a2m_router.catalog.tables import Tables


class TierFacts:
    """The table `tiers`, except the columns of the vector index and of the lineage."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._no = tables.no
        self._hiding: set[str] = set()  # lifted tiers whose servers were seen to change metadata

    def identity(self, tier: str) -> str | None:
        """Return the identity of the tier's server when it was last greeted; None before the first greeting."""
        known: str | None = self._execute("SELECT identity FROM tiers WHERE no = ?", (self._no[tier],)).get
        return known

    def set_identity(self, tier: str, identity: str) -> None:
        """Set the identity of the tier's server. A new identity means other contents, so the tier must be scanned."""
        with self._tables.transaction():
            self._execute(
                "UPDATE tiers SET scanned = scanned AND identity IS ?1, identity = ?1,"
                " shows_metadata = CASE WHEN identity IS ?1 THEN shows_metadata END,"
                " epoch = CASE WHEN identity IS ?1 THEN epoch END, set_back = set_back AND identity IS ?1,"
                " strange = CASE WHEN identity IS ?1 THEN strange ELSE 0 END"
                " WHERE no = ?2",
                (identity, self._no[tier]),
            )

    def is_scanned(self, tier: str) -> bool:
        """Return whether the catalog has all records that `tier` holds."""
        return bool(self._execute("SELECT scanned FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def unscanned(self) -> list[str]:
        """Return the tiers that may hold records that the catalog does not have."""
        return [tier for tier in self._tables.tiers if not self.is_scanned(tier)]

    def set_scanned(self, tier: str, scanned: bool) -> None:
        self._set("scanned", tier, scanned)

    def strange(self, tier: str) -> int:
        """Return how many records of other federations `tier` was last seen to hold."""
        return self._execute("SELECT strange FROM tiers WHERE no = ?", (self._no[tier],)).get or 0

    def set_strange(self, tier: str, records: int) -> None:
        if records != self.strange(tier):
            self._set("strange", tier, records)

    def shows_metadata(self, tier: str) -> bool:
        """Return whether the server of a lifted tier was seen to keep the plain metadata of all records unchanged."""
        shown = self._execute("SELECT shows_metadata FROM tiers WHERE no = ?", (self._no[tier],)).get
        return bool(shown) and tier not in self._hiding

    def note_metadata(self, tier: str, shown: bool) -> None:
        """Note whether the server of a lifted tier has kept the plain metadata of a record (`shown`) unchanged.

        One changed record is enough: a condition that the server applies could miss it. A read may note this, so a disk
        failure does not fail the call: the fact then stays in memory until this process ends.
        """
        noted: int | None = self._execute("SELECT shows_metadata FROM tiers WHERE no = ?", (self._no[tier],)).get
        if noted is None or (noted and not shown):
            if not shown:
                self._hiding.add(tier)
            with contextlib.suppress(OSError):
                self._set("shows_metadata", tier, shown)

    def _set(self, column: str, tier: str, value: int) -> None:
        with self._tables.transaction():
            self._execute(f"UPDATE tiers SET {column} = ? WHERE no = ?", (value, self._no[tier]))
