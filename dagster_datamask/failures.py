"""What a failure is: permanent, which a second try cannot mend, or transient, which it may; and what is said of it.

The one place that tells them apart, for the assets, the command and the sensor that retries. Libraries of the network
are known by the names of their errors, so that none has to be installed or imported.
"""

import errno
from collections.abc import Iterator

from dagster_datamask.accelerator import AcceleratorUnavailable
from dagster_datamask.compute.base import Poisoned, WorkerTraceback
from dagster_datamask.redaction import redacted
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.shards.engine import AT_SHARD
from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.shards.schemas import BadShard, InconsistentFiles, ShardReplaced
from dagster_datamask.shards.source import SourceUnreachable

# errors of this project and of what it is given: their message is the whole story
EXPECTED = (ValueError, NotPublished, InconsistentFiles, ModelUnavailable, AcceleratorUnavailable, Poisoned)

# how a failed step says which of the two it is, in its metadata
KIND, PERMANENT, TRANSIENT = "kind", "permanent", "transient"

# request timeout, precondition failed (replaced between listing and reading), too early, too many requests, and a
# server that is ill or busy
_TRANSIENT_STATUS = frozenset({408, 412, 425, 429, 500, 502, 503, 504})
_TRANSIENT_NAMES = frozenset(
    {
        "httpx.TransportError",
        "httpx2.TransportError",
        "aiohttp.ClientConnectionError",
        "aiohttp.ClientPayloadError",
        "botocore.HTTPClientError",
        "botocore.ConnectionError",
        "azure.ServiceRequestError",
        "azure.ServiceResponseError",
        "google.TransportError",
        "urllib3.HTTPError",
        "s3fs.FileExpired",
    }
)
# a person said so, by HF_HUB_OFFLINE
_PERMANENT_NAMES = frozenset({"huggingface_hub.OfflineModeIsEnabled", "httpx.UnsupportedProtocol"})
# how gcsfs begins what a store's 403 says
_FORBIDDEN_WORD = "Forbidden: "
# no key was found where a store's client looks for it
_NO_KEY_NAMES = frozenset(
    {"botocore.NoCredentialsError", "botocore.PartialCredentialsError", "google.DefaultCredentialsError"}
)
# what an S3 store calls keys that it takes no more, or not at all
_BAD_KEYS = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_PERMANENT_ERRNO = _FULL | _FORBIDDEN | {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL}


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: the first error of the chain of causes that tells either way decides.

    What nothing is known of is a defect, and a defect does not go away.
    """
    return next((verdict for cause in _chain(error) if (verdict := _verdict(cause)) is not None), False)


def told(error: BaseException) -> str:
    """One line without secrets: what happened, and the remedy where the system knows only a number."""
    line = f"{type(error).__name__}: {redacted(' '.join(str(error).split())) or type(error).__name__}"
    if _names(error) & _NO_KEY_NAMES:
        return f"{line}; put the store's keys into the environment of whatever runs this, and run it again"
    if not isinstance(error, OSError):
        return line
    if _code(error) in _BAD_KEYS:
        return f"{line}; renew the store's keys where whatever runs this takes them from"
    if _code(error) == "RequestTimeTooSkewed":
        return f"{line}; set this machine's clock and run it again"
    if error.errno in _FULL:
        return f"{line}; make room (`datamask gc` removes old results) and run it again"
    if error.errno in _FORBIDDEN or isinstance(error, PermissionError) or str(error).startswith(_FORBIDDEN_WORD):
        return f"{line}; grant the right to read and write there and run it again"
    if _code(error) == "NoSuchBucket":
        return f"{line}; make the bucket, or name another in storage.root or source.url"
    return line


def _names(error: BaseException) -> set[str]:
    return {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__}


def _code(error: BaseException) -> str | None:
    """What an S3 store calls its refusal."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def shard_of(error: BaseException) -> str | None:
    """The shard at which it happened, or None where it was not at one."""
    for cause in _chain(error):
        if isinstance(cause, BadShard):
            return cause.path
        for note in getattr(cause, "__notes__", ()):
            if note.startswith(AT_SHARD):
                return str(note.removeprefix(AT_SHARD))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = _cause(cause)


def _cause(error: BaseException) -> BaseException | None:
    """What caused it, wherever it was raised: the traceback of a worker tells only where."""
    return None if isinstance(error.__cause__, WorkerTraceback) else error.__cause__


def _verdict(error: BaseException) -> bool | None:
    """Transient, permanent, or None where this error alone does not tell and its cause may."""
    if isinstance(error, ShardReplaced):
        return True
    names = _names(error)
    if names & _PERMANENT_NAMES:
        return False
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if names & _TRANSIENT_NAMES or isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, ModelUnavailable | SourceUnreachable):
        return None
    if _cause(error) is None and _is_refusal(error):
        return False
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        # a number that says neither is of the disk or the network on a bad day
        return None if _cause(error) is not None and error.errno is None else error.errno not in _PERMANENT_ERRNO
    return False if isinstance(error, EXPECTED) else None


def _is_refusal(error: BaseException) -> bool:
    """Whether it says no, without a number: clients of object stores put their words in errors of the disk."""
    return isinstance(error, PermissionError | FileNotFoundError) or str(error).startswith(_FORBIDDEN_WORD)


def _status(error: BaseException) -> int | None:
    """The HTTP status an error carries, as the libraries of hubs and object stores put it there."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for found in (
        response,
        getattr(response, "status_code", None),
        *(getattr(error, name, None) for name in ("status_code", "status", "code")),
    ):
        if isinstance(found, int) and 400 <= found < 600:
            return found
    return None
