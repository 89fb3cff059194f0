"""Damaged fastText files are refused before fastText's reader, which would crash on them or answer nonsense."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_datamask.scoring.fasttext_file import check_file
from dagster_datamask.scoring.training import train_fasttext

from .conftest import labelled

# where the twelve arguments, then the dictionary's counts begin
_ARGUMENTS, _COUNTS = 8, 64

_SCORE_ALL = """
import sys
from pathlib import Path
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
refused = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        FastTextScorer(path, "hq").score(["the theorem follows", "buy cheap pills now", "unseen wörter"])
    except ValueError as error:
        assert path.name in str(error), error
        refused += 1
print(refused)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("models")
    texts, labels = labelled(120)
    for name in ("plain.bin", "quantised.ftz"):
        train_fasttext(texts, labels, folder / name, seed=1, dim=4)
    return {path.name: path.read_bytes() for path in folder.glob("*.*") if path.suffix in (".bin", ".ftz")}


def put(folder: Path, raw: bytes, at: int, layout: str, *values: int) -> Path:
    found = bytearray(raw)
    struct.pack_into(layout, found, at, *values)
    path = folder / "m.bin"
    path.write_bytes(found)
    return path


@pytest.mark.parametrize("name", ["plain.bin", "quantised.ftz"])
def test_a_whole_model_is_taken_and_any_shorter_one_is_not(tmp_path: Path, models: dict[str, bytes], name: str) -> None:
    raw, path = models[name], tmp_path / "m.bin"
    path.write_bytes(raw)
    check_file(path)
    for size in {0, 1, 7, 8, 60, 63, 64, 90, 100, len(raw) // 2, len(raw) - 1}:
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"m\.bin: (an empty file|cut short at)"):
            check_file(path)


@pytest.mark.parametrize(
    ("at", "layout", "value", "why"),
    [
        (0, "<i", 1, "version 11 or 12"),
        (4, "<i", 13, "version 11 or 12"),
        (_ARGUMENTS, "<i", -4, "a dimension or number of buckets below one"),
        (_ARGUMENTS, "<i", 5, "an input matrix of 4 columns for 5 dimensions"),
        (_ARGUMENTS + 4 * 6, "<i", 9, "no known model or loss"),
        (_ARGUMENTS + 4 * 8, "<i", 0, "n-grams without a bucket"),
        (_ARGUMENTS + 4 * 8, "<i", 2**30, r"an input matrix of \d+ rows for 10737"),
        (_COUNTS + 4, "<i", -1, "counts of words that do not add up"),
        (_COUNTS + 8, "<i", 9, "counts of words that do not add up"),
        (_COUNTS + 20, "<q", -2, "fewer than no n-grams kept"),
    ],
)
def test_numbers_that_contradict_each_other_are_told(
    tmp_path: Path, models: dict[str, bytes], at: int, layout: str, value: int, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"m\.bin: not a fastText model.*{why}"):
        check_file(put(tmp_path, models["plain.bin"], at, layout, value))


@pytest.mark.parametrize("name", ["plain.bin", "quantised.ftz"])
def test_no_damage_to_any_number_crashes_the_reader(tmp_path: Path, models: dict[str, bytes], name: str) -> None:
    """Each number of the head, of the first words and of the matrices' heads, replaced by values that counts can turn
    into: refused by name, or read without harm, by a process that is still there at the end."""
    raw = models[name]
    (words, labels) = struct.unpack_from("<ii", raw, _COUNTS + 4)
    behind = _COUNTS + 28
    for _ in range(words + labels):
        behind = raw.index(b"\0", behind) + 1 + 9
    places = [
        *range(_ARGUMENTS, _COUNTS + 28, 4),
        *range(_COUNTS + 28, _COUNTS + 60, 4),
        *range(behind, behind + 48, 4),
    ]
    for at in places:
        for k, value in enumerate((-1, 0, 1, 2**31 - 1, -(2**31))):
            found = bytearray(raw)
            struct.pack_into("<i", found, at, value)
            (tmp_path / f"{at:06d}-{k}.bin").write_bytes(found)
    done = subprocess.run(
        [sys.executable, "-c", _SCORE_ALL, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > len(places)
