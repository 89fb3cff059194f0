"""Credentials belong to the environment and to nothing that is kept or shown.

Here: whether a URL carries one, and texts without any. Where texts are kept or shown is the callers' matter: failures,
the command, the doctor, and every record of Python's logging.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

# names of a URL's parameters that are credentials, in the spelling of any store
_PARAMETER = r"[\w.%-]*(?:secret|passw|token|credential|signature)[\w.%-]*|[\w.%-]*key|sig|auth|authorization"
_PARAMETERS = re.compile(rf"(?<=[?&;])({_PARAMETER})=[^&;\s\"'<>]+", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
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
    return sorted(found, key=len, reverse=True)


def redact_logs() -> None:
    """Make every record of this process's loggers, libraries' included, one without secrets."""
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
        return record

    record_of.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record_of)


def redacted_error(error: BaseException) -> BaseException:
    """`error`; where it or what it came from tells a secret, one that tells the same without, but where it happened."""
    chain = list(_chain(error))
    told = [f"{type(one).__name__}: {one}" for one in chain]
    without = [redacted(text) for text in told]
    return error if without == told else RuntimeError(", caused by ".join(without))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and all that a traceback shows behind it."""
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
