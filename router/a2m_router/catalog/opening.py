"""The state in which the file was found, and what has to be checked because of it."""

from a2m_router.catalog.tables import Tables


class Opening:
    """How the last router left the file.

    - `was_closed`: it closed the file.
    - `ended_well`: no crash has left traces. The last router closed the file, and all tiers were compared with the
      catalog after the last unclean end. Otherwise this start checks more, and waits longer.
    - `uncounted`: tiers that may hold records of which a power cut has taken every note. A tier is removed from the set
      when its records were compared with the catalog.
    - `began_blank`: no record was ever written or adopted. False for a rebuilt catalog.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.was_closed = not tables.fact("opened", 0) or bool(tables.fact("clean", 0))
        self.ended_well = self.was_closed and bool(tables.fact("recovered", 1))
        self.uncounted = set[str]() if self.ended_well else set(tables.tiers)
        self.began_blank = False

    def begin(self, newest: int) -> None:
        """Note that the file is in use. `newest` is the last number in the order of writing."""
        fact, set_fact = self._tables.fact, self._tables.set_fact
        set_fact("clean", 0)
        set_fact("recovered", int(self.ended_well))
        set_fact("opened", fact("opened", 0) + 1)
        self.began_blank = newest == 0 and fact("clock", None) is None and not fact("federation_found", 0)

    def end_recovery(self) -> None:
        """Note that all tiers were compared with the catalog, and that no call of an earlier router can still land."""
        if not self._tables.fact("recovered", 1):
            with self._tables.transaction():
                self._tables.set_fact("recovered", 1)

    def end(self) -> None:
        """Note that the file is about to be closed."""
        self._tables.set_fact("clean", 1)
