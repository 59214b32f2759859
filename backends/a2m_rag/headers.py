"""Headers with values from the environment, so that no command line and no file contains a token. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from a2m_rag.service import SHORTEST_SECRET, CannotStart

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token, RFC 9110 §5.6.2
_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")
_PARTS: Final = re.compile(r"[\s;,=]+")
_SENSITIVE: Final = re.compile(r"authorization|cookie|token|secret|key|password", re.IGNORECASE)


def headers_from(lines: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of lines like `Authorization: Bearer ${TOKEN}`, with variables filled in.

    Raises:
        CannotStart: a line is not a header, a variable is not set, or a token is written literally. No message quotes
            a value.
    """
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise CannotStart("--header: expected NAME: VALUE, such as 'Authorization: Bearer ${TOKEN}'")
        if _SENSITIVE.search(name) and not _VARIABLE.search(value):
            raise CannotStart(
                f"--header {name}: a literal token can be read by other users of this machine; put it into an "
                f"environment variable, and write '{name}: ${{VARIABLE}}', in single quotes"
            )
        for variable in _VARIABLE.findall(value):
            if not environ.get(variable):
                state = "is empty" if variable in environ else "is not set"
                raise CannotStart(f"--header {name}: the environment variable {variable} {state}")
        filled = _VARIABLE.sub(lambda found: environ[found[1]], value).strip()
        if not _VALUE.fullmatch(filled):
            raise CannotStart(f"--header {name}: its value contains characters that are not valid in a header")
        headers[name] = filled
    return headers


def secrets_in(headers: Mapping[str, str]) -> list[str]:
    """Return the strings in header values that may be tokens, longest first: whole values, and parts after a scheme."""
    found: set[str] = set()
    for value in headers.values():
        found.add(value)
        found.update(_PARTS.split(value)[1:])
    return sorted((each for each in found if len(each) >= SHORTEST_SECRET), key=len, reverse=True)
