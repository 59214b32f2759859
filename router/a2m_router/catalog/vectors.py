"""The vectors of tiers whose servers have no vector index, and the width of all vectors."""

from collections.abc import Mapping, Sequence
from typing import Final

from a2m_router.catalog.tables import Tables
from a2m_router.protocol.wire.vectors import MAX_WIDTH, indexed
from a2m_router.storage import nearest

# The vectors of records that are being added, by id; records without a vector are missing.
Vectors = Mapping[str, Sequence[float]]
NO_VECTORS: Final[Vectors] = {}


class VectorIndex:
    """The table `nearest`, which is created with the first vector."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._execute = tables.execute
        rows = self._execute("SELECT name FROM tiers WHERE indexed")
        self._indexed = {name for (name,) in rows if name in tables.tiers}

    def dimensions(self) -> int | None:
        """Return the width of the federation's vectors; None until the first vector has fixed it (§3.7)."""
        width: int | None = self._tables.fact("dimensions", None)
        return width

    def fix_dimensions(self, width: int) -> None:
        with self._tables.transaction():
            self._tables.set_fact("dimensions", width)

    def metric(self) -> str:
        """Return how vectors are compared in this federation (§3.7)."""
        metric: str = self._tables.fact("metric", "cosine")
        return metric

    def set_metric(self, metric: str) -> None:
        """Set how vectors are compared. If that changes, the indexed tiers are scanned again to rebuild the index."""
        with self._tables.transaction():
            if metric != self.metric() and self._width() is not None:
                self._execute("DROP TABLE nearest")
                self._tables.set_fact("nearest", None)
                self._execute("UPDATE tiers SET scanned = 0 WHERE indexed")
            self._tables.set_fact("metric", metric)

    def indexes(self, tier: str) -> bool:
        """Return whether the vectors of the records in `tier` are indexed here."""
        return tier in self._indexed

    def set_lifting(self, tier: str, *, lifted: bool, indexed: bool) -> None:
        """Set whether records are written to `tier` lifted, and whether their vectors are indexed here.

        A scan indexes the vectors of the records that are there already.
        """
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
        """Return the vector in the form of the index; None if no record can be near it."""
        is_askable = self._indexed and self._width() == len(vector)
        return indexed(vector, self.metric()) if is_askable else None

    def put(self, seq: int, home: str, vector: Sequence[float] | None) -> None:
        """Index the vector of a record in `home`, in place of its earlier one; None only removes that.

        The first vector of all fixes the width.
        """
        if vector is not None and self.dimensions() is None:
            self.fix_dimensions(len(vector))
        self.drop(seq)
        if home not in self._indexed or vector is None or not 1 <= len(vector) <= MAX_WIDTH:
            return
        width = self._width()
        if width != len(vector) == self.dimensions():
            # the first record's vector; vectors of another width in the index belong to writes that were given up
            nearest.create(self._tables.connection, len(vector), self.metric())
            self._tables.set_fact("nearest", len(vector))
            width = len(vector)
        packed = indexed(vector, self.metric())
        if packed is not None and len(vector) == width:
            self._execute("INSERT INTO nearest (rowid, vector) VALUES (?, ?)", (seq, packed))

    def drop(self, seq: int) -> None:
        """Remove the record's vector from the index."""
        if self._indexed and self._width() is not None:
            self._execute("DELETE FROM nearest WHERE rowid = ?", (seq,))

    def _width(self) -> int | None:
        """Return the width of the vectors in the index; None if there is no index yet."""
        width: int | None = self._tables.fact("nearest", None)
        return width
