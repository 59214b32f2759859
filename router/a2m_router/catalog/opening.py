"""In what state the file was found, and what has to be looked at for that."""

from a2m_router.catalog.tables import Tables


class Opening:
    """How the last router left the file.

    - `was_closed`: it closed the file.
    - `ended_well`: nothing is left of a crash. It closed the file, and all tiers were taken into the account since the
      last router that did not. Otherwise more is looked at, and waited for.
    - `uncounted`: tiers that may hold what a power cut took every note of. Each stays until what it holds was compared
      with the account.
    - `began_blank`: no record was ever written or taken in. Not so of a catalog that was made anew.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.was_closed = not tables.fact("opened", 0) or bool(tables.fact("clean", 0))
        self.ended_well = self.was_closed and bool(tables.fact("recovered", 1))
        self.uncounted = set[str]() if self.ended_well else set(tables.tiers)
        self.began_blank = False

    def begin(self, newest: int) -> None:
        """The file is in use from now on. `newest`: the last number in the order of writing."""
        fact, set_fact = self._tables.fact, self._tables.set_fact
        set_fact("clean", 0)
        set_fact("recovered", int(self.ended_well))
        set_fact("opened", fact("opened", 0) + 1)
        self.began_blank = newest == 0 and fact("clock", None) is None and not fact("federation_found", 0)

    def end_recovery(self) -> None:
        """All tiers were taken into the account, and what an earlier router had under way there has landed."""
        if not self._tables.fact("recovered", 1):
            with self._tables.transaction():
                self._tables.set_fact("recovered", 1)

    def end(self) -> None:
        """The file is about to be closed."""
        self._tables.set_fact("clean", 1)
