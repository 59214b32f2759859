"""The records that a client knows to be its own, and the answers that it may therefore get.

A client makes one call at a time, and no other client touches its records. So its account is simple: for each record,
the contents that it may have now. After an answer this is one content. After a call without an answer it is the old one
and the new one, until a later answer decides. After an error it is what it was. None stands for no record.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.wire.records import Record, vector_bytes

FIELDS: Final = ("content", "role", "group", "session", "key", "uri", "media_type")


class Wrong(Exception):
    """A finding; the message is one sentence."""


class Version(msgspec.Struct, eq=False):
    """One content of one record, as it was written.

    Args:
        name: of the record: the id or the key that its client has chosen, else the number of the version.
        fields: as they were sent; the content begins with the number.
        batch: the call that wrote it.
    """

    number: str
    name: str
    fields: dict[str, Any]
    batch: str
    id: str | None = None
    created_at: str | None = None

    def __repr__(self) -> str:
        return self.number


class Found(msgspec.Struct):
    """The answer of a recall or a timeline."""

    records: list[Record]
    degraded: list[dict[str, Any]] = []


class Account:
    """The records of one client, who is their owner."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.versions: dict[str, Version] = {}
        self._possible: dict[str, frozenset[Version | None]] = {}
        self._in_doubt: dict[str, list[Version]] = {}  # by batch: the call got no answer, and no later one has decided

    # --- results of calls

    def begin_write(self, versions: Iterable[Version]) -> None:
        for version in versions:
            self.versions[version.number] = version
            self._possible.setdefault(version.name, frozenset({None}))

    def end_write(self, versions: Sequence[Version], ids: Sequence[str] | None) -> None:
        """Note the result of a write: the ids of the answer, or None if no answer came."""
        if ids is None:
            for version in versions:
                self._possible[version.name] |= {version}
                self._drop_doubt(version.name)  # of an earlier batch: reads no longer show whether it was carried out
            self._in_doubt[versions[0].batch] = list(versions)
            return
        for version, id in zip(versions, ids, strict=True):
            version.id = id
            self._decide(version.name, version)

    def end_forget(self, names: Iterable[str], *, answered: bool) -> None:
        for name in names:
            if answered:
                self._decide(name, None)
            else:
                self._possible[name] |= {None}
                self._drop_doubt(name)

    def _decide(self, name: str, version: Version | None) -> None:
        self._possible[name] = frozenset({version})
        self._drop_doubt(name)

    def _drop_doubt(self, name: str) -> None:
        for batch, versions in list(self._in_doubt.items()):
            versions[:] = [version for version in versions if version.name != name]
            if not versions:
                del self._in_doubt[batch]

    # --- what to do next

    @property
    def in_doubt(self) -> list[list[Version]]:
        """The writes in doubt: without an answer, and not decided since. A repetition must repeat the whole batch."""
        return [list(versions) for versions in self._in_doubt.values()]

    def certain(self) -> list[Version]:
        """Return the versions that certainly exist."""
        return [version for states in self._possible.values() if len(states) == 1 for version in states if version]

    # --- which answers are possible

    def check(self, found: Found, asked: Collection[str] | None = None, *, all_of_it: bool = False) -> None:
        """Raises Wrong for an impossible answer.

        Args:
            asked: the names that the call is about. Those that certainly exist must be shown if no tier was missing.
            all_of_it: the call asks for everything while nothing is under way, so that every batch in doubt must be
                decided, as a whole.
        """
        shown: dict[str, Version] = {}
        ids = [record.id for record in found.records]
        if len(set(ids)) != len(ids):
            raise Wrong(f"{self.owner}: an id comes twice in {sorted(ids)}")
        for record in found.records:
            version = self._check_record(record)
            if version.name in shown:
                raise Wrong(f"{self.owner}: {version.name} is there twice, as {shown[version.name]} and {version}")
            shown[version.name] = version
        if not found.degraded:
            names = self._possible if all_of_it else asked or ()
            missing = [name for name in names if name not in shown and None not in self._possible[name]]
            if missing:
                was = {name: sorted(map(repr, self._possible[name])) for name in missing}
                raise Wrong(f"{self.owner}: missing is what was acknowledged: {was}")
            self._check_groups(found.records)
        if all_of_it:
            if found.degraded:
                raise Wrong(f"{self.owner}: tiers are down though all has settled: {found.degraded}")
            self._check_batches(shown)

    def _check_record(self, record: Record) -> Version:
        number = record.content.partition(" ")[0]
        version = self.versions.get(number)
        if version is None:
            raise Wrong(f"{self.owner}: nobody wrote what is shown: {record}")
        possible = self._possible[version.name]
        if version not in possible:
            raise Wrong(f"{self.owner}: {version.name} is shown as {number}, and can only be {possible}: {record}")
        wrong = self._unlike(record, version)
        if wrong is not None:
            raise Wrong(f"{self.owner}: {wrong} is altered in {record}, written as {version.fields}")
        return version

    def _unlike(self, record: Record, version: Version) -> str | None:
        for name in FIELDS:
            if getattr(record, name) != version.fields.get(name):
                return name
        if record.owner != self.owner:
            return "owner"
        if version.id is not None and record.id != version.id:
            return "id"
        written: Raw | UnsetType = version.fields.get("metadata", UNSET)
        if _text(record.metadata) != _text(written):
            return "metadata"
        vector = version.fields.get("embedding")
        if record.embedding is not None and (vector is None or vector_bytes(record.embedding) != vector_bytes(vector)):
            return "embedding"
        # the router sets it, and nothing may change it later
        if version.created_at not in (None, record.created_at):
            return "created_at"
        version.created_at = record.created_at
        return None

    def _check_groups(self, records: Sequence[Record]) -> None:
        tiers: dict[str, set[str | None]] = {}
        for record in records:
            if record.group is not None:
                tiers.setdefault(record.group, set()).add(record.tier)
        torn = {group: where for group, where in tiers.items() if len(where) > 1}
        if torn:
            raise Wrong(f"{self.owner}: groups that are not whole: {torn}")

    def _check_batches(self, shown: dict[str, Version]) -> None:
        for versions in self._in_doubt.values():
            there = [version for version in versions if shown.get(version.name) is version]
            if there and len(there) != len(versions):
                raise Wrong(f"{self.owner}: of the batch {versions} only {there} became true")


def _text(metadata: Raw | UnsetType) -> bytes | None:
    return None if metadata is UNSET else bytes(metadata)
