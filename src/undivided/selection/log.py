"""The logger "undivided", and the handler behind UNDIVIDED_LOG: one record for each new Decision.

A record has level INFO and the Decision as its attribute ``decision``. Its text is one line, or the whole table if
DEBUG is enabled. Decisions are cached, so a repeated problem makes no second record.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("undivided")


class _Record(logging.LogRecord):
    """Keeps ``decision`` out of ``__dict__``, because formatters that write ``__dict__`` as JSON could not serialise
    it."""

    __slots__ = ("decision",)
    decision: object


class _StandardError(logging.Handler):
    """Prints to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"undivided: {self.format(record)}", file=sys.stderr)


_standard_error = _StandardError()


def log(decision: object, summary: str, level: str) -> None:
    """Log a new Decision. level: that of `Policy.log`; "info" and "debug" print it, whatever the logger's own level."""
    is_enabled = logger.isEnabledFor(logging.INFO)
    if not is_enabled and not level:
        return
    in_full = level == "debug" or logger.isEnabledFor(logging.DEBUG)
    text = str(decision) if in_full else summary
    plain_record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None)
    record = _Record(
        plain_record.name, plain_record.levelno, plain_record.pathname, plain_record.lineno, text, (), None
    )
    record.__dict__.update(plain_record.__dict__)  # with what the program's own factory of records has added
    record.decision = decision
    if is_enabled:
        logger.handle(record)
    if level:  # not attached to the logger, because its level would have to be changed and restored
        _standard_error.handle(record)
