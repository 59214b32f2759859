"""The text form of a log line, which the router and its backends share: time, level, message."""

import logging
from datetime import datetime


class TextFormatter(logging.Formatter):
    """A formatter of log records in the text form; the traceback of an exception follows on further lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = text_line(record.created, record.levelname, record.getMessage())
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


def text_line(created: float, level: str, message: str) -> str:
    """Return a log line. `created` is the time in seconds since 1970."""
    moment = datetime.fromtimestamp(created).isoformat(sep=" ", timespec="milliseconds")
    # a tier or a caller may have put line breaks into the message; the log stays one line for each event
    escaped = message.replace("\n", "\\n").replace("\r", "\\r")
    return f"{moment} {level.lower():7} {escaped}"
