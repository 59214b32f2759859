"""A reader for one table of a TOML file: the caller reads each key by name and type; all other keys are unknown.

Mistakes do not stop the reading: each is noted as one sentence after its place (`tiers.working.capacity: …`), and the
reader returns the default, so that one run reports everything. A sentence about a wrong type names types only: the
value may be a token.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from json import dumps
from pathlib import Path
from typing import TypeVar

from a2m_router.process.paths import expanded

_Default = TypeVar("_Default")
_Option = TypeVar("_Option", bound=str)

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_QUANTITY = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_LONGEST = 1000 * 365 * 86_400  # seconds; a moment that far away still has a date
_INT64 = range(-(2**63), 2**63)  # the integers of TOML and SQLite


def duration(text: str) -> float:
    """Return the seconds of a text such as "5m", "500ms" or "1.5h"; raise ValueError, as a sentence, otherwise."""
    amount, unit = _quantity(text, "duration", '"5m"')
    if not unit:
        raise ValueError(f'{quoted(text)} has no unit; write for example "{text.strip()}s"')
    if unit not in _MILLISECONDS:
        raise ValueError(f"{quoted(text)} has an unknown unit; the units are {', '.join(_MILLISECONDS)}")
    seconds = amount * _MILLISECONDS[unit] / 1000
    if seconds <= 0:
        raise ValueError(f"{quoted(text)} must be longer than zero")
    if seconds > _LONGEST:
        raise ValueError(f"{quoted(text)} is longer than 1000 years")
    return seconds


def size(text: str) -> int:
    """Return the bytes of a text such as "64MiB" or "500 kB"; raise ValueError, as a sentence, otherwise."""
    amount, unit = _quantity(text, "size", '"64MiB"')
    if not unit:
        raise ValueError(f'{quoted(text)} has no unit; write for example "64MiB", or the bytes without quotes')
    if unit.lower() not in _BYTES:
        raise ValueError(f"{quoted(text)} has an unknown unit; the units are B, KiB, MiB, GiB, kB, MB, GB")
    count = amount * _BYTES[unit.lower()]
    if not 1 <= count < _INT64.stop:
        raise ValueError(f"{quoted(text)} must be at least one byte, and less than 2^63")
    return int(count)


def _quantity(text: str, what: str, example: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{quoted(text)} is not a valid {what}; write for example {example}")
    return float(found[1]), found[2]


def place(*keys: str) -> str:
    """Return the dotted name of a key, quoted as TOML requires."""
    return ".".join(key if _BARE_KEY.fullmatch(key) else quoted(key) for key in keys)


def quoted(text: str) -> str:
    """Return the text on one line, in quotes, shortened if it is long."""
    return dumps(text if len(text) <= 80 else text[:79] + "…", ensure_ascii=False)


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a sentence about an unknown word: the nearest known one, else all of them after `otherwise`."""
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), by_lower, n=1)
    if near:
        return f"; did you mean {quoted(by_lower[near[0]])}?"
    return f"; {otherwise} {', '.join(map(quoted, by_lower.values()))}" if by_lower else ""


class Table:
    """A table and its place. Every reading method returns the default if the key is absent or its value is wrong."""

    def __init__(self, content: Mapping[str, object], mistakes: list[str], at: str = "") -> None:
        self._content = content
        self._mistakes = mistakes  # shared by all tables of a file
        self._at = at
        self._known: list[str] = []

    def note(self, key: str, sentence: str, *, item: int | None = None) -> None:
        """Note a mistake at one of this table's keys, or at an item of the list there."""
        self._mistakes.append(f"{self._place(key, item)}: {sentence}")

    def note_here(self, sentence: str) -> None:
        """Note a mistake of the table as a whole."""
        self._mistakes.append(f"{self._at}: {sentence}")

    def has(self, key: str) -> bool:
        return key in self._content

    def refuse_the_rest(self) -> None:
        """Note every key that was not read as unknown."""
        for key in self._content:
            if key not in self._known:
                self.note(key, "unknown key" + suggestion(key, self._known, "the keys here are"))

    def text(self, key: str, default: _Default) -> str | _Default:
        value = self._take(key, "a string", str)
        if not isinstance(value, str):
            return default
        if not value:
            self.note(key, "must not be empty")
            return default
        return value if self._is_clean(key, value) else default

    def path(self, key: str, default: _Default, base: Path) -> Path | _Default:
        """Return a path; a relative one starts at `base`, and a leading `~` is the home directory."""
        written = self.text(key, None)
        if written is None:
            return default
        try:
            return base / expanded(written)
        except ValueError as problem:
            self.note(key, str(problem))
            return default

    def texts(self, key: str, default: _Default) -> tuple[str, ...] | _Default:
        value = self._take(key, "a list of strings", list)
        if not isinstance(value, list):
            return default
        strings = tuple(item for item in value if isinstance(item, str))
        for position, item in enumerate(value):
            if not isinstance(item, str):
                self.note(key, f"expected a string, got {_type_of(item)}", item=position)
        if not all(self._is_clean(key, item) for item in strings):
            return default
        return strings if len(strings) == len(value) else default

    def flag(self, key: str, default: bool) -> bool:
        value = self._take(key, "true or false", bool)
        return value if isinstance(value, bool) else default

    def integer(self, key: str, default: _Default, *, least: int, most: int | None = None) -> int | _Default:
        value = self._take(key, "a whole number", int)
        if not isinstance(value, int):
            return default
        if value < least:
            self.note(key, f"must be at least {least}, got {value}")
            return default
        if most is not None and value > most:
            self.note(key, f"must be at most {most}, got {value}")
            return default
        return value

    def number(self, key: str, default: float) -> float:
        """Return a finite number that is not negative."""
        value = self._take(key, "a number", int, float)
        if not isinstance(value, int | float):
            return default
        if not 0 <= value < float("inf"):  # also rejects nan
            self.note(key, f"must be a number of at least 0, got {value}")
            return default
        return float(value)

    def choice(self, key: str, options: tuple[_Option, ...], default: _Option) -> _Option:
        value = self._take(key, f"one of {', '.join(map(quoted, options))}", str)
        return self._one_of(key, value, options, default) if isinstance(value, str) else default

    def choices(self, key: str, options: tuple[_Option, ...], default: tuple[_Option, ...]) -> tuple[_Option, ...]:
        """Return at least one of the options, none twice."""
        values = self.texts(key, None)
        if values is None:
            return default
        if not values:
            self.note(key, f"must name at least one of {', '.join(map(quoted, options))}")
            return default
        for value in sorted({value for value in values if values.count(value) > 1}):
            self.note(key, f"names {quoted(value)} more than once")
        return tuple(
            self._one_of(key, value, options, default[0], item=position) for position, value in enumerate(values)
        )

    def duration(self, key: str, default: _Default, *, example: str) -> float | _Default:
        """Return seconds."""
        value = self._take(key, f"a duration such as {quoted(example)}", str, int, float)
        if isinstance(value, int | float):
            self.note(key, f"{value} has no unit; write for example {quoted(example)}")
        if not isinstance(value, str):
            return default
        try:
            return duration(value)
        except ValueError as problem:
            self.note(key, str(problem))
            return default

    def size(self, key: str, default: int, *, least: int = 1) -> int:
        """Return bytes, from a number or a string with a unit."""
        if isinstance(self._content.get(key), int):
            return self.integer(key, default, least=least)
        value = self._take(key, 'a size such as "64MiB"', str)
        if not isinstance(value, str):
            return default
        try:
            count = size(value)
        except ValueError as problem:
            self.note(key, str(problem))
            return default
        if count < least:
            self.note(key, f"{quoted(value)} must be at least {least} bytes")
            return default
        return count

    def strings(self) -> dict[str, str]:
        """Return this table as a dict of strings; the user chooses its keys."""
        strings = {}
        for name, value in self._content.items():
            if not isinstance(value, str):
                self.note(name, f"expected a string, got {_type_of(value)}")
            elif self._is_clean(name, name) and self._is_clean(name, value):
                strings[name] = value
        return strings

    def table(self, key: str) -> "Table":
        """Return the table of that name; an empty one if it is absent."""
        value = self._take(key, "a table", dict)
        return Table(value if isinstance(value, dict) else {}, self._mistakes, self._place(key))

    def optional_table(self, key: str) -> "Table | None":
        """Return the table of that name; None if it is absent."""
        table = self.table(key)
        return table if isinstance(self._content.get(key), dict) else None

    def tables(self, key: str) -> list["Table"]:
        """Return a list of tables, written `[[name]]`; empty if it is absent."""
        value = self._take(key, f"a list of tables, written [[{self._place(key)}]]", list)
        found = []
        for position, item in enumerate(value if isinstance(value, list) else []):
            if isinstance(item, dict):
                found.append(Table(item, self._mistakes, self._place(key, position)))
            else:
                self.note(key, f"expected a table, got {_type_of(item)}", item=position)
        return found

    def named_tables(self) -> list[tuple[str, "Table"]]:
        """Return the tables inside this one with their names, in the file's order; the user chooses the names."""
        found = []
        for name, value in self._content.items():
            if isinstance(value, dict):
                found.append((name, Table(value, self._mistakes, self._place(name))))
            else:
                self.note(name, f"expected a table, got {_type_of(value)}")
        return found

    def _take(self, key: str, expected: str, *types: type) -> object:
        self._known.append(key)
        if key not in self._content:
            return None
        value = self._content[key]
        if type(value) not in types:  # not isinstance: bool is a subclass of int
            self.note(key, f"expected {expected}, got {_type_of(value)}")
            return None
        if isinstance(value, int) and value not in _INT64:
            self.note(key, "this number does not fit in 64 bits")
            return None
        return value

    def _one_of(
        self,
        key: str,
        value: str,
        options: tuple[_Option, ...],
        default: _Option,
        *,
        item: int | None = None,
    ) -> _Option:
        for option in options:
            if option == value:
                return option
        self.note(key, f"{quoted(value)} is not known" + suggestion(value, options, "expected"), item=item)
        return default

    def _is_clean(self, key: str, value: str) -> bool:
        if "\0" in value:  # invalid in a path, an argument, a variable and a name
            self.note(key, "must not contain a NUL character")
            return False
        return True

    def _place(self, key: str, item: int | None = None) -> str:
        own = place(key) if item is None else f"{place(key)}[{item}]"
        return f"{self._at}.{own}" if self._at else own


def _type_of(value: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")
