"""Servers that do not do what they declare or acknowledge, each in one way; `LIES` has them by name.

    python tests/servers/lying.py NAME [options of core_only.py]

Tests use them to check that the router notices and reports a lie, and does not trust the server. In everything else
they are correct.
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
    """The base of all of them; the name in `describe` is the class's."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class HasNoTimeline(Lying):
    """Declares core, lists memory/timeline, and does not know that method."""

    def timeline(self, params: Params) -> Result:
        raise Refused(METHOD_NOT_FOUND, "there is no method 'memory/timeline'")


class DeclinesTimeline(Lying):
    """Declares core, lists memory/timeline, and answers that it lacks the capability."""

    def timeline(self, params: Params) -> Result:
        raise Refused(CAPABILITY_NOT_SUPPORTED, "memory/timeline: this server does not implement core")


class AnswersWithFewerIds(Lying):
    """Writes every record and leaves out the last one's id."""

    def remember(self, params: Params) -> Result:
        return {"ids": super().remember(params)["ids"][:-1]}


class ChoosesOtherIds(Lying):
    """Replaces every given id by one of its own, so that a repeated write makes a second record."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_record(params, lambda record: {**record, "id": None}))


class ScoresAscending(Lying):
    """Answers recall with the worst record first."""

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
    """Answers recall and timeline as if there were no `where`. Its forget is honest."""

    def recall(self, params: Params) -> Result:
        return super().recall({**params, "where": None})

    def timeline(self, params: Params) -> Result:
        return super().timeline({**params, "where": None})


class IgnoresLimit(Lying):
    """Answers recall and timeline with all records."""

    def recall(self, params: Params) -> Result:
        return super().recall({**params, "limit": 0})

    def timeline(self, params: Params) -> Result:
        return super().timeline({**params, "limit": 0})


class AnswersRecallWithAString(Lying):
    """Answers recall with a string in place of the records."""

    def recall(self, params: Params) -> Result:
        return {"records": f"{len(super().recall(params)['records'])} records"}


class ForgetsNothing(Lying):
    """Answers how many records it forgot, and keeps them."""

    def _commit(self, change: Change) -> None:
        super()._commit({what: done for what, done in change.items() if what != "drop"})


class LosesWrites(Lying):
    """Acknowledges every new record, and keeps every other one."""

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
    """Replaces white space in a content by one space, and removes it at the ends."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, lambda content: " ".join(content.split())))


class TrimsContent(Lying):
    """Removes white space from the end of every content."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, str.rstrip))


class ComposesContent(Lying):
    """Composes the characters of every content (NFC)."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_content(params, partial(unicodedata.normalize, "NFC")))


class DropsMetadata(Lying):
    """Keeps no metadata, and still acknowledges the write."""

    def remember(self, params: Params) -> Result:
        return super().remember(_each_record(params, lambda record: {**record, "metadata": None}))


class SpeaksAnotherVersion(Lying):
    """Describes itself as a server of a2m/0.2, whatever version was asked for."""

    def describe(self, params: Params) -> Result:
        return {**super().describe(params), "protocol": "a2m/0.2"}


class DeclaresNoCore(Lying):
    """Has every method of core, and does not declare it."""

    def describe(self, params: Params) -> Result:
        described = super().describe(params)
        return {**described, "capabilities": [name for name in described["capabilities"] if name != "core"]}


class IsReadOnlySometimes(Lying):
    """Takes the first of every two writes, and answers the second with READ_ONLY (§2.1)."""

    _asked = 0

    def call(self, method: str, params: Any) -> Result:
        self._asked += method not in READS
        if method not in READS and self._asked % 2 == 0:
            raise Refused(READ_ONLY, f"{method}: this server takes no writes")
        return super().call(method, params)


LIES: Final = {lying.__name__: lying for lying in Lying.__subclasses__()}


def _each_record(params: Params, change: Callable[[Record], Record]) -> Params:
    """Return the parameters of a remember with its records changed. The server refuses malformed ones."""
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
