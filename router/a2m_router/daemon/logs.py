"""The log: one readable line an event on stderr, or one JSON object a line for machines."""

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import orjson


def log_to_stderr(level: str, form: str) -> None:
    """Sends everything at `level` and above to stderr, as `text` or `json`."""
    handler = _ToStderr()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # their own lines say nothing that ours do not, and at debug they show headers, which may hold tokens
    for library in ("httpx", "httpcore", "hpack", "aiohttp"):
        logging.getLogger(library).setLevel(logging.WARNING)


class _ToStderr(logging.StreamHandler[TextIO]):
    """To what stderr is when something is said: a progress bar puts another in its place, to stay below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        # one line an event, whatever a tier or a caller has put into it
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        line = f"{moment} {record.levelname.lower():7} {message}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            event["exception"] = self.formatException(record.exc_info)
        # the name of a file may be none that UTF-8 can hold
        clean = {key: text.encode(errors="backslashreplace").decode() for key, text in event.items()}
        return orjson.dumps(clean).decode()
