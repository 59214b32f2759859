"""Servers that are not what they say, each of them in one way; `LIES` has them by name.

    python tests/servers/lying.py NAME [options of core_only.py]

They are for seeing that the router notices, says so, and does not believe them. All else about each is in order.
"""

import argparse
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])

from tests.servers.core_only import CoreOnly, Result, main
from tests.servers.journal import Change
from tests.servers.protocol import (
    CAPABILITY_NOT_SUPPORTED,
    METHOD_NOT_FOUND,
    READ_ONLY,
    READS,
    Params,
    Record,
    Refused,
)


class Lying(CoreOnly):
    """What all of them are; each is named in `describe` as its class is here."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class HasNoTimeline(Lying):
    """Declares core, lists memory/timeline and does not know it."""

    def timeline(self, params: Params) -> Result:
        raise Refused(METHOD_NOT_FOUND, "there is no method 'memory/timeline'")


class DeclinesTimeline(Lying):
    """Declares core, lists memory/timeline and says that it lacks the capability."""

    def timeline(self, params: Params) -> Result:
        raise Refused(CAPABILITY_NOT_SUPPORTED, "memory/timeline: this server does not implement core")


class AnswersWithFewerIds(Lying):
    """Writes every record and leaves out the last one's id."""

    def remember(self, params: Params) -> Result:
        return {"ids": super().remember(params)["ids"][:-1]}


class ChoosesOtherIds(Lying):
    """Writes under ids of its own whatever id is given, so that a write that is repeated is there twice."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_record(params, lambda record: {**record, "id": None}))


class ScoresAscending(Lying):
    """Answers recall with the worst first."""

    def recall(self, params: Params) -> Result:
        return {"records": super().recall(params)["records"][::-1]}


class LeavesOutAnId(Lying):
    """Answers recall and timeline with a first record that has no id."""

    def recall(self, params: Params) -> Result:
        return _first_without_an_id(super().recall(params))

    def timeline(self, params: Params) -> Result:
        return _first_without_an_id(super().timeline(params))


class RepeatsARecord(Lying):
    """Answers recall with its first record twice."""

    def recall(self, params: Params) -> Result:
        records = super().recall(params)["records"]
        return {"records": records[:1] + records}


class IgnoresWhere(Lying):
    """Answers recall and timeline as if no `where` had come. To forget it is honest."""

    def recall(self, params: Params) -> Result:
        return super().recall({**params, "where": None})

    def timeline(self, params: Params) -> Result:
        return super().timeline({**params, "where": None})


class IgnoresLimit(Lying):
    """Answers recall and timeline with all there is."""

    def recall(self, params: Params) -> Result:
        return super().recall({**params, "limit": 0})

    def timeline(self, params: Params) -> Result:
        return super().timeline({**params, "limit": 0})


class AnswersRecallWithAString(Lying):
    """Has a string where the records of a recall should be."""

    def recall(self, params: Params) -> Result:
        return {"records": f"{len(super().recall(params)['records'])} records"}


class ForgetsNothing(Lying):
    """Says how many records it forgot, and has them still."""

    def _commit(self, change: Change) -> None:
        super()._commit({what: done for what, done in change.items() if what != "drop"})


class LosesWrites(Lying):
    """Acknowledges every new record and keeps the first of every two."""

    _taken = 0

    def _commit(self, change: Change) -> None:
        kept = []
        for record in change.get("put", ()):
            is_new = record["id"] not in self._records
            self._taken += is_new
            if not is_new or self._taken % 2:
                kept.append(record)
        super()._commit({**change, "put": kept})


class TruncatesContent(Lying):
    """Keeps the first 20 characters of every content."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, lambda content: content[:20]))


class RewritesContent(Lying):
    """Makes one space of all white space in a content, and none at its ends."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, lambda content: " ".join(content.split())))


class TrimsContent(Lying):
    """Takes white space from the end of every content."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, str.rstrip))


class ComposesContent(Lying):
    """Spells every letter in one way."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, partial(unicodedata.normalize, "NFC")))


class DropsMetadata(Lying):
    """Keeps no metadata, and does not say so."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_record(params, lambda record: {**record, "metadata": None}))


class SpeaksAnotherVersion(Lying):
    """Describes itself as a server of a2m/0.2, whatever version it was asked for."""

    def describe(self, params: Params) -> Result:
        return {**super().describe(params), "protocol": "a2m/0.2"}


class DeclaresNoCore(Lying):
    """Has every method of core, and does not declare it."""

    def describe(self, params: Params) -> Result:
        described = super().describe(params)
        return {**described, "capabilities": [name for name in described["capabilities"] if name != "core"]}


class IsReadOnlySometimes(Lying):
    """Takes the first write of every two, and says of the second that it takes none (§2.1)."""

    _asked = 0

    def call(self, method: str, params: Any) -> Result:
        self._asked += method not in READS
        if method not in READS and self._asked % 2 == 0:
            raise Refused(READ_ONLY, f"{method}: this server takes no writes")
        return super().call(method, params)


LIES: Final = {lying.__name__: lying for lying in Lying.__subclasses__()}


def _each_record(params: Params, change: Callable[[Record], Record]) -> Params:
    """The parameters of a remember with its records changed. What is malformed is left for others to refuse."""
    records = params.get("records")
    if not isinstance(records, list):
        return params
    return {**params, "records": [change(record) if isinstance(record, dict) else record for record in records]}


def _each_content(params: Params, change: Callable[[str], str]) -> Params:
    def changed(record: Record) -> Record:
        content = record.get("content")
        return {**record, "content": change(content)} if isinstance(content, str) else record

    return _each_record(params, changed)


def _first_without_an_id(found: Result) -> Result:
    records = found["records"]
    stripped = [{name: value for name, value in record.items() if name != "id"} for record in records[:1]]
    return {"records": stripped + records[1:]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server that lies in one way.", add_help=False)
    parser.add_argument("lie", choices=LIES, metavar="NAME", help=f"one of {', '.join(LIES)}")
    chosen, others = parser.parse_known_args()
    main(LIES[chosen.lie], others)
