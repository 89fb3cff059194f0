"""Permanent or transient: every kind of error that hubs, stores, disks and data give."""

import errno
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from dagster_datamask.compute.base import Poisoned, packed, unpacked
from dagster_datamask.failures import is_transient, shard_of, told
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.shards.schemas import BadShard, InconsistentFiles, ShardReplaced
from dagster_datamask.shards.source import SourceError

_REQUEST = httpx2.Request("GET", "https://hub.example/model")


def hub(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("hub", response=httpx2.Response(status, request=_REQUEST))


class ClientError(Exception):
    """As botocore's: the status is in a dictionary."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """As gcsfs's: the status is called `code`."""

    def __init__(self, code: int) -> None:
        self.code = code


def foreign(module: str, name: str, parent: Exception | None = None) -> Exception:
    """An error of a library that is not installed here, under its own name."""
    kind: type[Exception] = type(name, (type(parent) if parent else Exception,), {"__module__": module})
    return kind()


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def from_a_worker(error: Exception) -> BaseException:
    """The error as it comes out of the process of a worker."""
    sent = unpacked(packed(error))
    assert (type(sent).__name__, str(sent), told(sent)) == (type(error).__name__, str(error), told(error))
    return sent


@pytest.mark.parametrize("status", [408, 412, 425, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("kind", [hub, ClientError, HttpError])
def test_what_a_busy_server_answers_passes(kind: Any, status: int) -> None:
    assert is_transient(kind(status))
    assert is_transient(from_a_worker(kind(status)))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416, 501])
@pytest.mark.parametrize("kind", [hub, ClientError, HttpError])
def test_what_a_server_refuses_stays_refused(kind: Any, status: int) -> None:
    assert not is_transient(kind(status))


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        BrokenPipeError(),
        httpx2.ConnectError("no route"),
        httpx2.ReadTimeout("slow"),
        foreign("aiohttp.client_exceptions", "ClientPayloadError"),
        foreign("botocore.exceptions", "ReadTimeoutError", foreign("botocore.exceptions", "HTTPClientError")),
        foreign("s3fs.core", "FileExpired"),
        OSError(errno.EIO, "i/o"),
        OSError(errno.ESTALE, "stale handle"),
        OSError(errno.EBUSY, "slow down"),
        OSError("end of stream, and no number"),
        ShardReplaced("changed"),
        caused(ModelUnavailable("hub gave"), hub(503)),
        caused(ModelUnavailable("hub gave"), caused(OSError("not in the cache"), httpx2.ConnectError("x"))),
        caused(RuntimeError("wrapped"), TimeoutError()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_network_and_the_disk_on_a_bad_day_pass(error: Exception) -> None:
    assert is_transient(error)
    assert is_transient(from_a_worker(error))


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "x", "/root/file") for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)),
        PermissionError(errno.EACCES, "denied"),
        FileNotFoundError(errno.ENOENT, "gone"),
        OfflineModeIsEnabled("offline"),
        caused(ModelUnavailable("offline"), OfflineModeIsEnabled("offline")),
        caused(ModelUnavailable("hub gave"), hub(404)),
        ModelUnavailable("no such file"),
        SettingsError("select.lambda"),
        SourceError("no source"),
        BadShard("data/a.parquet", "is empty"),
        NotPublished("x"),
        InconsistentFiles("ids"),
        KeyError("a defect"),
        ZeroDivisionError(),
        # as clients of object stores have it, without a number
        PermissionError("Access Denied"),
        FileNotFoundError("bucket/x"),
        OSError("Forbidden: https://store.example/b\nno right"),
        foreign("botocore.exceptions", "NoCredentialsError"),
        Poisoned({"shard": "SIGKILL"}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_given_wrong_and_what_is_full_stays(error: Exception) -> None:
    assert not is_transient(error)
    assert not is_transient(from_a_worker(error))


def test_causes_that_go_round_in_a_circle_end() -> None:
    error = RuntimeError()
    error.__cause__ = caused(RuntimeError(), error)
    assert not is_transient(error)


def test_the_shard_is_named_by_the_error_or_by_its_note() -> None:
    assert shard_of(BadShard("data/a.parquet", "is empty")) == "data/a.parquet"
    noted = TimeoutError()
    noted.add_note("something else")
    noted.add_note("at shard 000_00000")
    assert shard_of(caused(RuntimeError(), noted)) == "000_00000"
    assert shard_of(ValueError()) is None


def test_a_full_disk_is_told_in_one_line_with_its_remedy() -> None:
    line = told(OSError(errno.ENOSPC, "No space left\non device", "/root/a.parquet"))
    assert "/root/a.parquet" in line and "datamask gc" in line and "\n" not in line
    assert "grant the right" in told(PermissionError(errno.EROFS, "Read-only file system", "/root/a"))
    assert told(ValueError()) == "ValueError: ValueError"
