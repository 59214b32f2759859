"""Servers that keep to A2M 0.1 and add to a record, or drop from it, each in one way; `HABITS` has them by name.

    python tests/servers/habits.py NAME [options of core_only.py]

Every one keeps the id, the content, and the members of metadata that it was given, or at least those whose names begin
with `a2m-`. In everything else it is correct.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])

from tests.servers.core_only import CoreOnly, Result, main
from tests.servers.protocol import Params, Record


class Habitual(CoreOnly):
    """The base of all of them; the name in `describe` is the class's."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    def filed(self, record: Record) -> Record:
        """Return a record as it is stored when it is written."""
        return record

    def told(self, record: Record) -> Record:
        """Return a record as it is answered."""
        return record

    def _placed(self, fields: Record, known: Mapping[str, Record]) -> Record:
        record = super()._placed(fields, known)
        return record if record is known.get(record["id"]) else self.filed(record)

    def _shown(self, scored: Iterable[tuple[float, Record]], params: Params) -> list[tuple[float, Record]]:
        return [(score, self.told(record)) for score, record in super()._shown(scored, params)]


class FillsInARole(Habitual):
    """Stores a record without a role as a user's, and one without metadata with empty metadata."""

    def filed(self, record: Record) -> Record:
        return {"role": "user", "metadata": {}, **record}


class InventsGroups(Habitual):
    """Answers a record without a group in a group of its own, with defaults for further fields."""

    def told(self, record: Record) -> Record:
        defaults = {"group": record["id"], "salience": 1.0, "owner": None, "key": None, "uri": None, "tier": "main"}
        return {**defaults, **record}


class AddsMetadata(Habitual):
    """Adds members of its own to the metadata of every record, also of one without metadata."""

    def filed(self, record: Record) -> Record:
        seen = {"length": len(record["content"]), "tags": [], "source": None, "chunk": {"of": 1}}
        return {**record, "metadata": {**seen, **(record.get("metadata") or {})}}


class KeepsOurMetadataAlone(Habitual):
    """Has a schema for metadata, and drops members that are not in it."""

    def filed(self, record: Record) -> Record:
        metadata = record.get("metadata") or {}
        return {**record, "metadata": {name: metadata[name] for name in metadata if name.startswith("a2m-")}}


class FlattensMetadata(Habitual):
    """Converts every member of metadata to a string."""

    def filed(self, record: Record) -> Record:
        members = (record.get("metadata") or {}).items()
        flat = {name: each if isinstance(each, str) else json.dumps(each) for name, each in members}
        return {**record, "metadata": flat}


class SortsMetadata(Habitual):
    """Answers metadata sorted, and with extra white space."""

    def told(self, record: Record) -> Record:
        metadata = record.get("metadata")
        return record if metadata is None else {**record, "metadata": _sorted(metadata)}

    def _written(self, response: Result) -> bytes:
        written = super()._written(response)
        return json.dumps(json.loads(written), separators=(" ,  ", " :\t")).encode()


class AnswersNulls(Habitual):
    """Answers null for every field of every capability for which a record has no value."""

    def told(self, record: Record) -> Record:
        return {**dict.fromkeys(_ALL_FIELDS), **record}


class AnswersOffsets(Habitual):
    """Answers timestamps with an offset."""

    def told(self, record: Record) -> Record:
        return _with_moments(record, lambda moment: moment.removesuffix("Z") + "+00:00")


class AnswersWholeSeconds(Habitual):
    """Answers timestamps without a fraction of a second."""

    def told(self, record: Record) -> Record:
        return _with_moments(record, lambda moment: moment.partition(".")[0] + "Z")


class AnswersNanoseconds(Habitual):
    """Answers timestamps to the nanosecond."""

    def told(self, record: Record) -> Record:
        return _with_moments(record, lambda moment: moment.removesuffix("Z") + "456789Z")


class AnswersFloats(Habitual):
    """Has no integers: writes 1.0 for 1 everywhere."""

    def _written(self, response: Result) -> bytes:
        return json.dumps(json.loads(super()._written(response), parse_int=float)).encode()


class AddsFields(Habitual):
    """Adds its own fields to records, results and descriptions."""

    def told(self, record: Record) -> Record:
        return {**record, "embedding_model": "none", "tenant": {"id": 1}, "hash": [1, 2], "is_deleted": False}

    def call(self, method: str, params: Any) -> Result:
        return {**super().call(method, params), "took_ms": 0.25, "version": "7", "next": {"page": None}}


HABITS: Final[Mapping[str, type[CoreOnly]]] = {habit.__name__: habit for habit in Habitual.__subclasses__()}
"""The kinds, by their names."""

_ALL_FIELDS: Final = (
    *("role", "metadata", "group", "tier", "salience", "accessed_at", "access_count", "owner", "session", "key"),
    *("revision", "embedding", "uri", "media_type"),
)


def _sorted(value: Any) -> Any:
    if isinstance(value, list):
        return [_sorted(each) for each in value]
    return {name: _sorted(value[name]) for name in sorted(value)} if isinstance(value, dict) else value


def _with_moments(record: Record, rewrite: Callable[[str], str]) -> Record:
    moments = {name: record[name] for name in ("created_at", "accessed_at") if record.get(name) is not None}
    return {**record, **{name: rewrite(moment) for name, moment in moments.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("name", choices=HABITS)
    chosen, rest = parser.parse_known_args()
    main(HABITS[chosen.name], rest)
