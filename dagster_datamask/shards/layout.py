"""The layout in which documents are handed on: `<folder>/<kind>/<snapshot>/<shard><ext>`, FineWeb's for kind = data.

Here: paths made of names that somebody else chose, which must not lead out of the folder. What the files hold is
their writers' matter.
"""

from pathlib import Path

from dagster_datamask.shards.source import SNAPSHOT_KEY, unusable_name

# as in FineWeb: a reader of some rows does not pay for many texts
TEXT_GROUP_ROWS = 1000


def laid_out(folder: Path, snapshot: str, shard: str, *, kind: str = "data", ext: str = ".parquet") -> Path:
    """The file of a shard below `folder`. Raises ValueError for a name that is no name of one file or folder."""
    if not SNAPSHOT_KEY.fullmatch(snapshot):
        raise ValueError(f"snapshot {snapshot!r} cannot be a folder's name: use letters, digits, '.', '_' and '-' only")
    if why := unusable_name(shard):
        raise ValueError(f"shard {shard!r} of {snapshot} cannot be a file's name: {why}; rename it")
    return folder / kind / snapshot / f"{shard}{ext}"
