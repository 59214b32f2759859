"""The vectors of tiers whose servers have no index of their own, and how wide all vectors are."""

from collections.abc import Mapping, Sequence
from typing import Final

from a2m_router.catalog.tables import Tables
from a2m_router.protocol.wire.vectors import MAX_WIDTH, indexed
from a2m_router.storage import nearest

# The vectors of records on their way in, by id, as far as they have any.
Vectors = Mapping[str, Sequence[float]]
NO_VECTORS: Final[Vectors] = {}


class VectorIndex:
    """The table `nearest`, which is made with the first vector."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._execute = tables.execute
        rows = self._execute("SELECT name FROM tiers WHERE indexed")
        self._indexed = {name for (name,) in rows if name in tables.tiers}

    def dimensions(self) -> int | None:
        """The width of the federation's vectors; None until the first has fixed it (§3.7)."""
        width: int | None = self._tables.fact("dimensions", None)
        return width

    def fix_dimensions(self, width: int) -> None:
        with self._tables.transaction():
            self._tables.set_fact("dimensions", width)

    def metric(self) -> str:
        """How vectors are compared in this federation (§3.7)."""
        metric: str = self._tables.fact("metric", "cosine")
        return metric

    def set_metric(self, metric: str) -> None:
        """Vectors compared in another way than so far have to be indexed anew, by a scan."""
        with self._tables.transaction():
            if metric != self.metric() and self._width() is not None:
                self._execute("DROP TABLE nearest")
                self._tables.set_fact("nearest", None)
                self._execute("UPDATE tiers SET scanned = 0 WHERE indexed")
            self._tables.set_fact("metric", metric)

    def indexes(self, tier: str) -> bool:
        """Whether the vectors of the records in `tier` are indexed here."""
        return tier in self._indexed

    def set_lifting(self, tier: str, *, lifted: bool, indexed: bool) -> None:
        """Whether records are written to `tier` lifted from now on, and whether their vectors are indexed here. Those
        of the records that are there already are indexed by a scan."""
        no = self._tables.no[tier]
        was_lifted = bool(self._execute("SELECT lifted FROM tiers WHERE no = ?", (no,)).get)
        if (lifted, indexed) == (was_lifted, tier in self._indexed):
            return
        with self._tables.transaction():
            self._execute(
                "UPDATE tiers SET lifted = ?1, indexed = ?2, scanned = scanned AND (indexed OR NOT ?2) WHERE no = ?3",
                (lifted, indexed, no),
            )
        (self._indexed.add if indexed else self._indexed.discard)(tier)

    def probe(self, vector: Sequence[float]) -> bytes | None:
        """The vector as the index is asked with it; None where nothing can be near it."""
        is_askable = self._indexed and self._width() == len(vector)
        return indexed(vector, self.metric()) if is_askable else None

    def put(self, seq: int, home: str, vector: Sequence[float] | None) -> None:
        """The vector of a record that has come to live in `home`, or none, in place of what was there. The first vector
        of all fixes the width."""
        if vector is not None and self.dimensions() is None:
            self.fix_dimensions(len(vector))
        self.drop(seq)
        if home not in self._indexed or vector is None or not 1 <= len(vector) <= MAX_WIDTH:
            return
        width = self._width()
        if width != len(vector) == self.dimensions():
            # the first there is; what was indexed by another width was of a copy that came to nothing
            nearest.create(self._tables.connection, len(vector), self.metric())
            self._tables.set_fact("nearest", len(vector))
            width = len(vector)
        packed = indexed(vector, self.metric())
        if packed is not None and len(vector) == width:
            self._execute("INSERT INTO nearest (rowid, vector) VALUES (?, ?)", (seq, packed))

    def drop(self, seq: int) -> None:
        """The record has no vector here any more."""
        if self._indexed and self._width() is not None:
            self._execute("DELETE FROM nearest WHERE rowid = ?", (seq,))

    def _width(self) -> int | None:
        """The width of the vectors in the index; None as long as there is none."""
        width: int | None = self._tables.fact("nearest", None)
        return width
