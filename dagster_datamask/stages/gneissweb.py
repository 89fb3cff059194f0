"""GneissWeb's rule (arXiv:2502.14907): percentiles of several scorers by category, after repeated substrings are cut.

Here: the categories that a user gives, the exact percentile of each scorer in each of them, and who is above all.
Not here: the cutting (`substrings`), and drawing the budget from who passes (`baselines`).
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from dagster_datamask.scoring.models import content_revision
from dagster_datamask.settings import BaselinesSettings, Settings, SettingsError
from dagster_datamask.shards.cursor import Cursor
from dagster_datamask.shards.order import Cut, cut, descending, tie_hash
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import Stage
from dagster_datamask.stages.scores import SIDE_ROWS
from dagster_datamask.stages.substrings import NOTHING_LEFT

# GneissWeb's ensemble takes DCLM's fastText and one of educational value
SCORERS = ("dclm", "edu")
SUBSTRINGS = "exact_substrings"
SIDES = (*(f"{scorer}_scores" for scorer in SCORERS), SUBSTRINGS)
CATEGORIES = "baselines.gneissweb_categories"
# DuckDB's, to join the categories; it goes on disk beyond
_MEMORY = "1GB"
_KEYS = np.dtype([("value", "<u8"), ("tie", "<u8")])
_PLACED = pa.schema([("place", pa.int64()), ("doc_id", pa.string())])

# (ids, rows of SIDES) of all scored documents, in one order, each call anew
Documents = Callable[[], Iterable[tuple[pa.Array, Mapping[str, pa.Table]]]]


def content_of_categories(stage: Stage, settings: Settings) -> dict[str, str]:
    """What a stage reads of the user's categories, for its fingerprint; nothing for one that reads none."""
    path = settings.baselines.gneissweb_categories
    if CATEGORIES not in stage.reads or not path:
        return {}
    _check_there(path)
    return {"categories": content_revision(Path(path))}


class Rule:
    """Which documents pass: of those that removal leaves something of, all but the lowest ⌊percentile · n⌋ of each
    scorer, n being the documents of their category with that score.

    Documents that nobody labelled are one category. Equal scores go by the hash of the id. On disk 32 bytes a document.
    """

    def __init__(self, settings: BaselinesSettings, folder: Path, documents: Documents) -> None:
        """Raises SettingsError for categories that are not there, are no parquet (id, category) or contradict
        themselves."""
        # not what a killed run left: files are appended to
        self._folder = Path(tempfile.mkdtemp(prefix="gneissweb-", dir=folder))
        path = settings.gneissweb_categories
        self._categories = _of_documents(path, self._folder, documents) if path else None
        self._codes: dict[str | None, int] = {}
        sizes: Counter[tuple[str, int]] = Counter()
        cursor = self._cursor()
        for ids, rows in documents():
            codes, scores = self._coded(ids, cursor), _scores(rows)
            ties = tie_hash(ids.to_pylist())
            for scorer, values in scores.items():
                for code in np.unique(codes).tolist():
                    inside = np.flatnonzero((codes == code) & ~np.isnan(values))
                    keys = np.empty(len(inside), _KEYS)
                    keys["value"], keys["tie"] = descending(values[inside]), ties[inside]
                    with self._path(scorer, code).open("ab") as file:
                        file.write(keys.tobytes())
                    sizes[scorer, code] += len(inside)
        share = Fraction(repr(settings.gneissweb_percentile))
        self._cuts: dict[tuple[str, int], Cut] = {
            key: cut(partial(self._spilled, *key), n - int(share * n)) for key, n in sizes.items()
        }
        self._cursor_of_calls = self._cursor()

    def __call__(self, ids: pa.Array, rows: Mapping[str, pa.Table]) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
        """(how many scorers let a document pass, float64[n], NaN where nothing of it is left; whether all do, bool[n];
        why not). Documents come once each, in the order in which they came before."""
        codes, scores = self._coded(ids, self._cursor_of_calls), _scores(rows)
        ties = tie_hash(ids.to_pylist())
        passed = np.zeros((len(SCORERS), len(ids)), bool)
        for row, (scorer, values) in zip(passed, scores.items(), strict=True):
            for code in np.unique(codes).tolist():
                inside = np.flatnonzero((codes == code) & ~np.isnan(values))
                row[inside] = self._cuts[scorer, code].inside(descending(values[inside]), ties[inside])
        empty = _empty(rows)
        lacking = np.array([np.isnan(values) for values in scores.values()])
        reasons = [
            NOTHING_LEFT if nothing else _why(of_one, without)
            for nothing, of_one, without in zip(empty.tolist(), passed.T.tolist(), lacking.T.tolist(), strict=True)
        ]
        return np.where(empty, np.nan, passed.sum(axis=0)), np.asarray(passed.all(axis=0)), reasons

    def _cursor(self) -> Cursor | None:
        return None if self._categories is None else Cursor(self._categories, None, SIDE_ROWS)

    def _coded(self, ids: pa.Array, cursor: Cursor | None) -> np.ndarray:
        """int64[n]: the documents' categories, numbered as they come."""
        names = [None] * len(ids) if cursor is None else cursor.take_all(ids)["category"].to_pylist()
        return np.array([self._codes.setdefault(name, len(self._codes)) for name in names], np.int64)

    def _path(self, scorer: str, code: int) -> Path:
        return self._folder / f"{scorer}.{code}.bin"

    def _spilled(self, scorer: str, code: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        with self._path(scorer, code).open("rb") as file:
            while block := file.read(_KEYS.itemsize * SIDE_ROWS):
                keys = np.frombuffer(block, _KEYS)
                yield keys["value"], keys["tie"]


def _scores(rows: Mapping[str, pa.Table]) -> dict[str, np.ndarray]:
    """{scorer: float64[n]}, NaN where there is no score or nothing left to be of that score."""
    empty = _empty(rows)
    return {scorer: np.where(empty, np.nan, rows[f"{scorer}_scores"]["score"].to_numpy()) for scorer in SCORERS}


def _empty(rows: Mapping[str, pa.Table]) -> np.ndarray:
    return rows[SUBSTRINGS]["reason"].is_valid().to_numpy()


def _why(passed: Sequence[bool], lacking: Sequence[bool]) -> str | None:
    """What a document fails by, of the scorers' verdicts in their order; a score that is null is below nothing."""
    of_each = list(zip(SCORERS, passed, lacking, strict=True))
    below = " and ".join(scorer for scorer, passes, without in of_each if not passes and not without)
    without = " and ".join(scorer for scorer, _, without in of_each if without)
    said = [f"no score of {without}" if without else "", f"below the percentile of {below}" if below else ""]
    return ", ".join(filter(None, said)) or None


def _check_there(path: str) -> None:
    if not Path(path).is_file():
        raise SettingsError(f"{CATEGORIES}: {path} is no file; name a parquet file with the columns id and category")


def _of_documents(path: str, folder: Path, documents: Documents) -> Path:
    """A file `doc_id, category` of all documents in their order, the category null where nobody labelled it."""
    _check_there(path)
    placed, found = folder / "documents.parquet", folder / "categories.parquet"
    place = 0
    with table_file(placed, _PLACED) as writer:
        for ids, _ in documents():
            writer.write(pa.table({"place": np.arange(place, place + len(ids)), "doc_id": ids}, schema=_PLACED))
            place += len(ids)
    # labels of a whole corpus may be larger than memory
    with duckdb.connect() as database:
        database.execute(f"SET memory_limit = '{_MEMORY}'")
        database.execute(f"SET temp_directory = {_quoted(folder / 'duckdb')}")
        try:
            names = [row[0] for row in database.execute(f"DESCRIBE FROM read_parquet({_quoted(path)})").fetchall()]
        except duckdb.Error as error:
            raise SettingsError(f"{CATEGORIES}: {path} is no parquet file ({str(error).splitlines()[0]})") from error
        missing = [name for name in ("id", "category") if name not in names]
        if missing:
            raise SettingsError(
                f"{CATEGORIES}: {path} has no column {missing[0]!r}; its columns are: {', '.join(names)}"
            )
        database.execute(
            f"""CREATE TEMP TABLE labels AS
            SELECT id::VARCHAR AS id, min(category::VARCHAR) AS category, max(category::VARCHAR) AS another
            FROM read_parquet({_quoted(path)})
            WHERE id::VARCHAR IN (SELECT doc_id FROM read_parquet({_quoted(placed)}))
            GROUP BY 1"""
        )
        twice = database.execute(
            "SELECT id, category, another FROM labels WHERE category <> another ORDER BY id LIMIT 1"
        ).fetchone()
        if twice is not None:
            raise SettingsError(
                f"{CATEGORIES}: {path} gives document {twice[0]!r} two categories, {twice[1]!r} and {twice[2]!r}; "
                "leave one of them"
            )
        database.execute(
            f"""COPY (
                SELECT doc_id, category FROM read_parquet({_quoted(placed)}) LEFT JOIN labels ON doc_id = id
                ORDER BY place
            ) TO {_quoted(found)} (FORMAT parquet)"""
        )
    return found


def _quoted(path: str | Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
