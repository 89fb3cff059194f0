"""Credentials belong to the environment and to nothing that is kept or shown.

Here: whether a URL carries one, and texts without any. Where texts are kept or shown is the callers' matter: failures,
the command, the doctor, the sensors, Dagster's errors (`resources.errors`), and every record of Python's logging.
"""

import json
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus

# of a credential, in the words of whoever refuses it elsewhere
ITS_PLACE = "the environment, where the store's own client looks for it (such as AWS_SECRET_ACCESS_KEY)"
# names of a URL's parameters that are credentials, in the spelling of any store
_PARAMETER = r"[\w.%-]*(?:secret|passw|token|credential|signature)[\w.%-]*|[\w.%-]*key|sig|auth|authorization"
_PARAMETERS = re.compile(rf"(?<=[?&;])({_PARAMETER})=[^&;\s\"'<>]+", re.IGNORECASE)
# to the last @ before the path: a password may hold one that nobody has escaped
_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+(?=@)")
_BEARER = re.compile(r"\b(Bearer|Basic) [\w.~+/=-]{8,}", re.IGNORECASE)
# variables whose value is one; names of files that hold one are none
_VARIABLE = re.compile(
    r"SECRET|(?<![A-Z])TOKEN(?![A-Z])|PASSW|API_?KEY|ACCESS_?KEY|ACCOUNT_?KEY|PRIVATE_?KEY|CONNECTION_STRING"
)
_A_PLACE = re.compile(r"_(FILE|PATH|DIR|URL|URI)$")
# what is shorter is a switch or a number, and would be found everywhere
_SHORTEST = 8
_REDACTED = "***"


def has_secret(text: str) -> bool:
    """Whether a URL carries a password or a key: in front of its host, or as a parameter."""
    return "://" in text and bool(_PASSWORD.search(text) or _PARAMETERS.search(text))


def redacted(text: str, env: Mapping[str, str] | None = None) -> str:
    """`text` with *** for what is secret in it: values of the environment's credentials, passwords and keys of URLs."""
    for value in _values(os.environ if env is None else env):
        text = text.replace(value, _REDACTED)
    if "://" in text or "?" in text:
        text = _PASSWORD.sub(rf"\1:{_REDACTED}", text)
        text = _PARAMETERS.sub(rf"\1={_REDACTED}", text)
    return _BEARER.sub(rf"\1 {_REDACTED}", text)


def _values(env: Mapping[str, str]) -> list[str]:
    found = {
        value
        for name, value in env.items()
        if len(value) >= _SHORTEST and _VARIABLE.search(name.upper()) and not _A_PLACE.search(name.upper())
    }
    # one may be a part of another
    return sorted({text for value in found for text in _spellings(value)}, key=len, reverse=True)


@cache
def _spellings(value: str) -> frozenset[str]:
    """A value as it is, and as URLs, Python and JSON write it."""
    return frozenset(
        {
            value,
            quote(value, "", errors="replace"),
            quote_plus(value, errors="replace"),
            repr(value)[1:-1],
            json.dumps(value)[1:-1],
        }
    )


def redact_logs() -> None:
    """From now on this process writes no secret by itself: in records of loggers, libraries' included, in warnings, and
    in what a thread ends by."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            told = record.getMessage()
        except (TypeError, ValueError):
            # a message that does not fit its arguments is its handler's to tell of
            return record
        if (without := redacted(told)) != told:
            record.msg, record.args = without, ()
        if record.exc_info and record.exc_info[0] is not None:
            told = "".join(traceback.format_exception(*record.exc_info))
            if (without := redacted(told)) != told:
                # handlers write an error's traceback by themselves, each in its own way
                record.exc_info = (RuntimeError, RuntimeError(without), None)
        return record

    record_of.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record_of)
    in_words = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: redacted(in_words(*args, **kwargs))
    threading.excepthook = _of_a_thread


def write_error(error: BaseException) -> None:
    """Write an error that nobody caught on stderr as Python does, but for secrets."""
    sys.stderr.write(redacted("".join(traceback.format_exception(error))))


def _of_a_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and ended.exc_type is not SystemExit:
        sys.stderr.write(f"Exception in thread {ended.thread.name if ended.thread else 'without a name'}:\n")
        write_error(ended.exc_value)
