"""Errors on their way from one process to another."""

import errno
import traceback

import pytest

from dagster_datamask.compute.base import packed, unpacked
from dagster_datamask.failures import is_transient, told

SECRET = "s3cr3t/of+workers"


class Refused(Exception):
    """As a store's client has it: the answer as a dictionary, the message made of it."""

    def __init__(self, response: dict[str, object]) -> None:
        self.response = response
        super().__init__(f"refused: {response}")


class Spelled(Exception):
    """One whose text is in no argument of its own."""

    def __str__(self) -> str:
        return f"signed with {SECRET}"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"no bucket for {SECRET}"),
        FileNotFoundError(errno.ENOENT, "not there", f"s3://bucket?key={SECRET}"),
        Refused({"ResponseMetadata": {"HTTPStatusCode": 503}, "headers": [("x-key", SECRET)], "lock": iter(())}),
        ConnectionError(OSError(f"proxy {SECRET}")),
        Spelled(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_only_a_worker_knows_to_be_secret_stays_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    try:
        try:
            raise OSError(f"behind it {SECRET}")
        except OSError as behind:
            error.add_note(f"sent {SECRET}")
            raise error from behind
    except Exception as raised:
        data = packed(raised)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert SECRET.encode() not in data
    arrived = unpacked(data)
    shown = "".join(traceback.format_exception(arrived)) + repr(vars(arrived)) + told(arrived)
    assert SECRET not in shown and "***" in shown
    assert arrived.__notes__ == ["sent ***"]
    assert type(arrived.__cause__) is OSError and str(arrived.__cause__) == "behind it ***"
    if isinstance(error, Spelled):
        assert str(arrived) == "Spelled: signed with ***"
        return
    assert type(arrived) is type(error) and is_transient(arrived) is is_transient(error)
    if isinstance(error, FileNotFoundError):
        assert (arrived.errno, arrived.filename) == (errno.ENOENT, "s3://bucket?key=***")  # type: ignore[attr-defined]


def test_an_error_without_secrets_arrives_whole() -> None:
    error = OSError(errno.EIO, "bad sector", "shard.parquet")
    error.add_note("at shard 3")
    arrived = unpacked(packed(error))
    assert (type(arrived), str(arrived), arrived.__notes__) == (OSError, str(error), ["at shard 3"])
