"""What is known of the managed tiers and of the servers behind them."""

import contextlib

from a2m_router.catalog.tables import Tables


class TierFacts:
    """The table `tiers`, but for what the vector index and the lineage keep there."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._no = tables.no
        self._hiding: set[str] = set()  # lifted tiers whose servers were seen not to show metadata as it is

    def identity(self, tier: str) -> str | None:
        """Who was behind `tier` when it was last greeted; None before the first time."""
        known: str | None = self._execute("SELECT identity FROM tiers WHERE no = ?", (self._no[tier],)).get
        return known

    def set_identity(self, tier: str, identity: str) -> None:
        """Another identity means other contents: they have to be scanned."""
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
        """Whether all that `tier` holds is accounted for."""
        return bool(self._execute("SELECT scanned FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def unscanned(self) -> list[str]:
        """The tiers that hold, or may hold, what is not accounted for."""
        return [tier for tier in self._tables.tiers if not self.is_scanned(tier)]

    def set_scanned(self, tier: str, scanned: bool) -> None:
        self._set("scanned", tier, scanned)

    def strange(self, tier: str) -> int:
        """How many records of other federations `tier` was last seen to hold beside ours."""
        return self._execute("SELECT strange FROM tiers WHERE no = ?", (self._no[tier],)).get or 0

    def set_strange(self, tier: str, records: int) -> None:
        if records != self.strange(tier):
            self._set("strange", tier, records)

    def shows_metadata(self, tier: str) -> bool:
        """Whether the server behind a lifted tier was seen to keep the metadata of all records as it was shown it."""
        shown = self._execute("SELECT shows_metadata FROM tiers WHERE no = ?", (self._no[tier],)).get
        return bool(shown) and tier not in self._hiding

    def note_metadata(self, tier: str, shown: bool) -> None:
        """The server behind a lifted tier has, or has not, kept the metadata of a record as it was shown it. One that
        was not kept is enough: a condition that the server applies could miss that record.

        A read may note this, so a disk that does not take it is no failure: it is remembered until this process ends.
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
