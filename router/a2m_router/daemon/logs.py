"""The log on stderr: one readable line for each event, or one JSON object a line for machines."""

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import orjson

from a2m_router.process.log_text import TextFormatter


def log_to_stderr(level: str, form: str) -> None:
    """Send every record at `level` and above to stderr. `form` is `text` or `json`."""
    handler = _ToStderr()
    handler.setFormatter(_Json() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # their lines repeat ours, and at debug they show headers, which may hold tokens
    for library in ("httpx", "httpcore", "hpack", "aiohttp"):
        logging.getLogger(library).setLevel(logging.WARNING)


class _ToStderr(logging.StreamHandler[TextIO]):
    """A handler that looks up `sys.stderr` for each record: a progress bar replaces it, to stay below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


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
        # a file name may contain bytes that are not valid UTF-8
        clean = {key: text.encode(errors="backslashreplace").decode() for key, text in event.items()}
        return orjson.dumps(clean).decode()
