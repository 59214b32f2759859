"""Notes that ids were forgotten, so that nothing late brings their records back."""

from a2m_router.catalog.entries import Entry, present
from a2m_router.catalog.tables import Tables


class Tombstones:
    """The table `forgotten`."""

    def __init__(self, tables: Tables) -> None:
        self._execute = tables.execute

    def is_forgotten(self, id: str) -> bool:
        """Whether a note says that `id` was forgotten."""
        return self._execute("SELECT 1 FROM forgotten WHERE id = ? LIMIT 1", (id,)).get is not None

    def hold(self, entry: Entry) -> bool:
        """Whether a note says that the record was forgotten, by a caller who might forget it."""
        said = {by for (by,) in self._execute("SELECT by FROM forgotten WHERE id = ?", (entry.id,))}
        return bool(said) and (entry.owner is None or not said.isdisjoint({"", present(entry.owner)}))

    def note(self, id: str, by: str | None, now: int) -> None:
        """`id` was forgotten. `by` is the owner of its record; of an unknown one it is the owner who named the id, None
        for a caller who sees all."""
        self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (id, present(by), now))

    def drop(self, id: str) -> None:
        self._execute("DELETE FROM forgotten WHERE id = ?", (id,))

    def drop_living(self) -> None:
        """Drop the notes of ids that were written anew."""
        self._execute(
            "DELETE FROM forgotten"
            " WHERE EXISTS (SELECT 1 FROM records WHERE records.id = forgotten.id AND home IS NOT NULL)"
        )

    def drop_before(self, moment: int) -> None:
        """Drop the notes that are older, where no copy can be left."""
        self._execute("DELETE FROM forgotten WHERE at < ? AND id NOT IN (SELECT id FROM strays)", (moment,))
