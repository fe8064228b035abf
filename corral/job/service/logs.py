"""Structured log of the service: one JSON object a line on stderr. No tokens, env values, bodies or query strings."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any

from corral.job.service.gate import StreamCut

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    """A record with whatever was passed as `extra`; an exception becomes its type and the places of its traceback, but
    not its text, which may hold what a client sent."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        content |= {key: value for key, value in vars(record).items() if key not in _USUAL}
        if record.exc_info and record.exc_info[1] is not None:
            kind, _, trace = record.exc_info
            content["exception"] = kind.__name__ if kind else ""
            content["trace"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)
            ]
        return json.dumps(content, default=str)


def _not_a_cut(record: logging.LogRecord) -> bool:
    """Cutting a stream is how it says "not over yet"; the server underneath takes it for a crash of the app."""
    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return not isinstance(error, StreamCut)


def configure(level: str = "INFO") -> None:
    """Send the logs of Corral and of uvicorn to stderr in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(_not_a_cut)
    for name, least in (("corral", level), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False
    for name in ("uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    logging.getLogger("uvicorn.access").disabled = True
