"""Groups of equal texts against a dictionary, with partitions of any number and sources of any order."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_datamask.cleaning import duplicates
from dagster_datamask.cleaning.duplicates import HASH, TextGroups, text_hashes

# sources of shards of texts
Texts = Sequence[Sequence[Sequence[str | None]]]


def found(folder: Path, sources: Texts) -> list[dict]:
    names = [f"S{k}" for k in range(len(sources))]
    groups = TextGroups(folder, names, sum(len(shard) for source in sources for shard in source))
    groups.find(
        (k, s, first, pa.array([f"{k}/{s}/{first}"]), text_hashes(pa.array([text], pa.string())))
        for k, source in enumerate(sources)
        for s, shard in enumerate(source)
        for first, text in enumerate(shard)
    )
    return [{"shard": shard, **row} for shard in range(len(sources[-1])) for row in groups.of(shard).to_pylist()]


def expected(sources: Texts) -> list[dict]:
    first: dict[str, tuple[str, int]] = {}
    opened: set[str] = set()
    rows = []
    for k, source in enumerate(sources):
        for s, shard in enumerate(source):
            for ordinal, text in enumerate(shard):
                if text is None:
                    continue
                if text not in first:
                    first[text] = (f"{k}/{s}/{ordinal}", k)
                elif k == len(sources) - 1:
                    kept_id, kept_source = first[text]
                    rows.append(
                        {
                            "shard": s,
                            "ordinal": ordinal,
                            "kept_id": kept_id,
                            "kept_source": kept_source,
                            "opens": text not in opened,
                        }
                    )
                    opened.add(text)
    return rows


def test_the_first_by_source_shard_and_row_is_kept(tmp_path: Path) -> None:
    sources = [[["a", "b"], ["a"]], [["c", "b", "c"], ["a", "d", "c", None, None]]]
    rows = found(tmp_path, sources)
    assert [(r["shard"], r["ordinal"], r["kept_id"], r["kept_source"]) for r in rows] == [
        (0, 1, "0/0/1", 0),
        (0, 2, "1/0/0", 1),
        (1, 0, "0/0/0", 0),
        (1, 2, "1/0/0", 1),
    ]
    assert sum(r["opens"] for r in rows) == 3
    assert rows == expected(sources)


_texts = st.one_of(st.none(), st.sampled_from("abcdef"))
_sources = st.lists(st.lists(st.lists(_texts, max_size=6), max_size=4), min_size=1, max_size=3)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(_sources, st.sampled_from([1, 3, 1000]))
def test_against_a_dictionary_in_any_number_of_partitions(
    tmp_path_factory: pytest.TempPathFactory, sources: Texts, rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_PARTITION_ROWS", rows)
        assert found(tmp_path_factory.mktemp("groups"), sources) == expected(sources)


@pytest.mark.parametrize("sources", [[[]], [[[]]], [[["a"]]], [[["a", "a"]]], [[["a"]], [["a"]]], [[["a"]], []]])
def test_none_one_and_two_documents(tmp_path: Path, sources: Texts) -> None:
    assert found(tmp_path, sources) == expected(sources)


def test_texts_are_hashed_as_the_bytes_that_are_stored() -> None:
    values = [b"a", b"a ", b"A", "é".encode(), b"caf\xff", b"", None]
    kinds = (pa.binary(), pa.large_binary())
    hashes = [text_hashes(pa.array(values, kind)) for kind in kinds]
    assert hashes[0].type == HASH and hashes[0].equals(hashes[1])
    assert hashes[0].to_pylist() == [None if v is None else blake2b(v, digest_size=16).digest() for v in values]
    assert text_hashes(pa.array(["é", "e\u0301"])).to_pylist()[0] == hashes[0][3].as_py()
    assert len(set(text_hashes(pa.array(["é", "e\u0301", "É", "é\n"])).to_pylist())) == 4
    assert text_hashes(pa.nulls(2)).to_pylist() == [None, None]
