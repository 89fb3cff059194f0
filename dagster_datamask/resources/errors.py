"""Errors as Dagster keeps and shows them: without secrets.

Whatever fails in a process that has loaded the definitions (a step, a check, a resource, the start of a run, a tick of
a sensor) reaches the event log, the tick and the UI as a SerializableErrorInfo, which this one method makes of a
traceback. The pin in pyproject.toml keeps it so; a test fails where the replacement is no longer reached.
"""

from traceback import TracebackException

from dagster._utils.error import SerializableErrorInfo

from dagster_datamask.redaction import redacted

_MADE = SerializableErrorInfo.from_traceback.__func__  # type: ignore[attr-defined]


def _without_secrets(cls: type[SerializableErrorInfo], tb: TracebackException) -> SerializableErrorInfo:
    made: SerializableErrorInfo = _MADE(cls, tb)
    # its cause and its context have been through here themselves
    return made._replace(message=redacted(made.message), stack=[redacted(line) for line in made.stack])


def redact_errors() -> None:
    """Replace Dagster's method in this process; calling it again changes nothing."""
    SerializableErrorInfo.from_traceback = classmethod(_without_secrets)  # type: ignore[assignment, method-assign]
