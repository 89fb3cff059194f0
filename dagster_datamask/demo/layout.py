"""FineWeb's folder and column layout, and how a demo's folder comes to exist all at once.

Here: the nine columns in order, the writing of one shard, and the rule that a folder holds either a complete export or
nothing. Not here: what the rows are.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# FineWeb's dataset card; a null means "not measured here".
FINEWEB_SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.string()),
        ("dump", pa.string()),
        ("url", pa.string()),
        ("date", pa.string()),
        ("file_path", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
    ]
)
ROW_GROUP_ROWS = 250
MARKER = "complete.json"


class ExportError(RuntimeError):
    """A demo corpus cannot be written; the message says what to do."""


@dataclass(frozen=True)
class CorpusSummary:
    """What an export holds: rows and tokens per snapshot, rows per label file (0 files for real rows), what was passed
    over by reason, and the hash of everything it depends on."""

    root: str
    inputs: str
    documents: int
    tokens: int
    rows: dict[str, int]
    packages: int
    labels: dict[str, int]
    skipped: dict[str, int]


def write_shard(table: pa.Table, path: Path, about: dict[str, str] | None = None) -> None:
    """One Parquet shard in row groups of 250; `about` becomes key-value metadata of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {**(table.schema.metadata or {}), **{k.encode(): v.encode() for k, v in (about or {}).items()}}
    pq.write_table(
        table.replace_schema_metadata(metadata or None),
        path,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
    )


def export_once(target: Path, inputs: str, write: Callable[[Path], CorpusSummary]) -> CorpusSummary:
    """The complete export at `target`: the one already there where its inputs are these, else a new one.

    `write` fills an empty sibling folder that then takes the target's name, so a killed export leaves nothing that
    looks done. Two processes at once wait for each other. Raises ExportError where `target` holds something else.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = target / MARKER
        if marker.is_file():
            done = CorpusSummary(**{**json.loads(marker.read_text()), "root": str(target)})
            if done.inputs == inputs:
                return done
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ExportError(
                f"{target} is not a demo export (it has no {MARKER}); name an empty or a new folder, or remove it."
            )
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        summary = write(partial)
        (partial / MARKER).write_text(json.dumps({**asdict(summary), "root": ""}, indent=1) + "\n")
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        # A killed process between these two lines leaves no target at all, which the next export takes for "not there".
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        return CorpusSummary(**{**asdict(summary), "root": str(target)})
