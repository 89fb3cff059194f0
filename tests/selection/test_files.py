import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.selection.dvrl import DvrlOptions
from dagster_datamask.selection.files import read_documents, solve_file
from dagster_datamask.selection.objectives import BadInput
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import SOLVERS

from .oracles import ids_of, vectors


def table(n: int, d: int = 4, dtype: type = np.float16, fixed: bool = True) -> pa.Table:
    rng = np.random.default_rng(n)
    z = vectors(rng, n, d).astype(dtype)
    flat = pa.array(z.reshape(-1))
    if fixed:
        lists: pa.Array = pa.FixedSizeListArray.from_arrays(flat, d)
    else:
        lists = pa.ListArray.from_arrays(pa.array(np.arange(0, n * d + 1, d), pa.int32()), flat)
    return pa.table({"id": pa.array(ids_of(n), pa.string()), "score": rng.uniform(0, 15, n), "embedding": lists})


def save(path: Path, data: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(data, path, row_group_size=7)
    else:
        with pa.ipc.new_file(str(path), data.schema) as writer:
            writer.write_table(data, max_chunksize=7)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("fixed", [True, False])
def test_reads_every_layout(tmp_path: Path, suffix: str, dtype: type, fixed: bool) -> None:
    data = table(20, dtype=dtype, fixed=fixed)
    found = read_documents(save(tmp_path / f"in{suffix}", data), {}, scores_needed=True)
    assert found.ids == ids_of(20)
    assert found.embeddings.dtype == dtype
    assert found.embeddings.tolist() == data["embedding"].to_pylist()
    assert found.scores is not None
    assert found.scores.tolist() == data["score"].to_pylist()


@pytest.mark.parametrize("n", [0, 1, 2, 30])
@pytest.mark.parametrize("out", ["mask.parquet", "mask.arrow"])
def test_solves_and_writes_one_row_a_document(tmp_path: Path, n: int, out: str) -> None:
    source = save(tmp_path / "in.parquet", table(n))
    target = tmp_path / out
    found = solve_file(source, target, budget="50%", lam=0.3, solver="certified")
    rows = (
        pq.read_table(target) if out.endswith(".parquet") else pa.ipc.open_file(pa.memory_map(str(target))).read_all()
    )
    assert rows.column_names == ["id", "selected", "score", "rank", "split", "reason", "kept_id", "similarity"]
    assert rows["id"].to_pylist() == ids_of(n)
    size = (n + 1) // 2
    assert sum(rows["selected"].to_pylist()) == found["kept"] == found["budget"] == size
    assert rows["reason"].null_count == len(rows)
    assert sorted(rows["rank"].to_pylist()) == list(range(1, n + 1))
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []
    parsed = json.loads(json.dumps(found, allow_nan=False))
    assert {
        "n", "budget", "kept", "value", "quality", "quality_raw", "diversity", "upper_bound", "numerical_error",
        "gap", "share", "passes", "seconds",
    } <= set(parsed)  # fmt: skip
    if n:
        assert found["value"] == pytest.approx(0.3 * found["quality"] + 0.7 * found["diversity"], abs=1e-15)


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    source = save(tmp_path / "in.parquet", table(40))
    for name in ("a", "b"):
        solve_file(source, tmp_path / f"{name}.parquet", budget=10, lam=0.3)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_columns_can_have_other_names_and_lambda_zero_needs_no_score(tmp_path: Path) -> None:
    data = table(10).rename_columns(["doc", "edu", "e5"])
    source = save(tmp_path / "in.parquet", data)
    names = {"id": "doc", "score": "edu", "embedding": "e5"}
    assert solve_file(source, None, budget=3, lam=0.5, columns=names)["quality_raw"] is not None
    bare = save(tmp_path / "bare.parquet", data.drop_columns(["edu"]))
    assert solve_file(bare, None, budget=3, lam=0.0, columns=names)["quality_raw"] is None
    with pytest.raises(ValueError, match=r"bare.parquet: has no column 'edu'; its columns are: doc, e5"):
        solve_file(bare, None, budget=3, lam=0.5, columns=names)
    with pytest.raises(ValueError, match="has no column 'id', 'embedding'"):
        solve_file(bare, None, budget=3, lam=0.0)
    with pytest.raises(ValueError, match=r"no columns are called \['vector'\]"):
        solve_file(bare, None, budget=3, lam=0.0, columns={"vector": "e5"})


def test_integer_ids_are_read_as_text(tmp_path: Path) -> None:
    data = table(3).set_column(0, "id", pa.array([7, 8, 9]))
    assert read_documents(save(tmp_path / "in.parquet", data), {}, scores_needed=False).ids == ["7", "8", "9"]


def spoil(column: str, row: int, value: object) -> pa.Table:
    data = table(20, fixed=False)
    values = data[column].to_pylist()
    values[row] = value
    return data.set_column(data.column_names.index(column), column, pa.array(values, data[column].type))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (spoil("id", 4, None), r"row 4: the id is null"),
        (spoil("id", 4, "doc-2"), r"1 document: 'doc-2' \(row 4\): the id is not unique"),
        (spoil("score", 9, None), r"'doc-9' \(row 9\): the score is null"),
        (spoil("score", 9, float("nan")), r"'doc-9' \(row 9\): the score is not finite"),
        (spoil("embedding", 11, None), r"'doc-11' \(row 11\): the embedding is null"),
        (spoil("embedding", 11, [np.float16(1)] * 3), r"'doc-11' \(row 11\): the embedding has 3 dimensions, .* 4"),
        (spoil("embedding", 11, []), r"'doc-11' \(row 11\): the embedding has 0 dimensions"),
        (spoil("embedding", 11, [np.float16(1), None, None, None]), r"'doc-11' \(row 11\): the embedding holds a null"),
        (spoil("embedding", 11, [np.float16("nan")] * 4), r"'doc-11' \(row 11\): the embedding is not finite"),
        (spoil("embedding", 11, [np.float16(0)] * 4), r"'doc-11' \(row 11\): the embedding is zero"),
    ],
)
def test_bad_rows_are_named_with_their_file(tmp_path: Path, data: pa.Table, message: str) -> None:
    source = save(tmp_path / "in.parquet", data)
    with pytest.raises(BadInput, match=rf"in\.parquet: .*{message}"):
        solve_file(source, tmp_path / "out.parquet", budget=5, lam=0.5)
    assert not (tmp_path / "out.parquet").exists()


def test_unusable_types_and_files_are_refused(tmp_path: Path) -> None:
    plain = table(4)
    texts = pa.array(["a"] * 4)
    for column, values, message in [
        ("embedding", texts, "embeddings are string, not lists"),
        ("embedding", pa.array([[1, 2]] * 4), "embeddings are list<"),
        ("score", texts, "scores are string, not numbers"),
        ("id", pa.array([1.0] * 4), "ids are double, not text or integers"),
    ]:
        data = plain.set_column(plain.column_names.index(column), column, values)
        with pytest.raises(ValueError, match=rf"in\.parquet: {message}"):
            solve_file(save(tmp_path / "in.parquet", data), None, budget=1, lam=0.5)
    whole = save(tmp_path / "whole.parquet", plain).read_bytes()
    for name, content, message in [
        ("empty.parquet", b"", "neither a parquet nor an Arrow"),
        ("cut.parquet", whole[: len(whole) // 2], "cut short"),
        ("text.parquet", b"hello, world", "neither a parquet nor an Arrow"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
            solve_file(tmp_path / name, None, budget=1, lam=0.0)
    with pytest.raises(ValueError, match=r"whole\.parquet: budget 5 asks for more than the 4 documents"):
        solve_file(tmp_path / "whole.parquet", None, budget=5, lam=0.0)
    with pytest.raises(ValueError, match=r"out\.csv: write the mask to a file that ends in"):
        solve_file(tmp_path / "whole.parquet", tmp_path / "out.csv", budget=1, lam=0.0)


def budgeted(tmp_path: Path, n: int = 30) -> Path:
    data = table(n)
    rng = np.random.default_rng(0)
    data = data.append_column("token_count", pa.array(rng.integers(10, 90, n)))
    names = pa.array([("web", "books", None)[k % 3] for k in range(n)], pa.string())
    return save(tmp_path / "budgeted.parquet", data.append_column("source", names))


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_every_solver_writes_a_mask_that_can_be_read_again(tmp_path: Path, solver: str) -> None:
    options = {"policy_gradient": PolicyGradientOptions(steps=5), "dvrl": DvrlOptions(steps=5, hidden=4)}.get(solver)
    diversity = {"disf": 1.0} if solver == "conditional_gradient" else None
    source, out = budgeted(tmp_path), tmp_path / "mask.parquet"
    seen: list[dict] = []
    found = solve_file(
        source, out, budget=9, lam=0.2, solver=solver, diversity=diversity, options=options,
        progress=lambda step, steps, entry: seen.append(entry),
    )  # fmt: skip
    rows = pq.read_table(out).to_pylist()
    kept = {row["id"] for row in rows if row["selected"]}
    assert len(kept) == found["kept"] == 9
    json.dumps(found, allow_nan=False)
    for row in rows:
        if row["reason"] is not None:
            assert (solver, row["reason"], row["selected"]) == ("semdedup", "near_duplicate", False)
            assert row["kept_id"] in kept
            assert -1 <= row["similarity"] <= 1


def test_tokens_and_quotas_of_a_file(tmp_path: Path) -> None:
    source = budgeted(tmp_path)
    data = pq.read_table(source)
    tokens = dict(zip(data["id"].to_pylist(), data["token_count"].to_pylist(), strict=True))
    out = tmp_path / "mask.parquet"
    found = solve_file(source, out, budget="400tok", lam=0.2)
    kept = [row["id"] for row in pq.read_table(out).to_pylist() if row["selected"]]
    assert sum(tokens[i] for i in kept) == found["tokens"] <= 400
    assert min(t for i, t in tokens.items() if i not in kept) > 400 - found["tokens"]
    shared = solve_file(source, None, budget="40%", lam=0.2, quota="source")
    assert shared["quotas"] == {"": 4, "books": 4, "web": 4}
    numbered = solve_file(source, None, budget="40%", lam=0.2, quota="token_count")
    assert sum(numbered["quotas"].values()) == 12
    with pytest.raises(ValueError, match=r"budgeted.parquet: has no column 'topic'"):
        solve_file(source, None, budget=3, lam=0.2, quota="topic")
    with pytest.raises(ValueError, match=r"budgeted.parquet: budget 9999999 asks for more|is not between"):
        solve_file(source, None, budget="9999999tok", lam=0.2)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere; make it first"):
        solve_file(source, tmp_path / "nowhere" / "mask.parquet", budget=3, lam=0.2)
    broken = data.set_column(3, "token_count", pa.array([None, 0, *data["token_count"].to_pylist()[2:]]))
    with pytest.raises(
        BadInput, match=r"2 documents: 'doc-0' \(row 0\), 'doc-1' \(row 1\): the token count is not in 1"
    ):
        solve_file(save(tmp_path / "broken.parquet", broken), None, budget="100tok", lam=0.2)


def test_ids_of_a_dictionary_and_an_empty_file_with_quotas(tmp_path: Path) -> None:
    data = table(6)
    coded = data.set_column(0, "id", data["id"].combine_chunks().dictionary_encode())
    assert solve_file(save(tmp_path / "coded.arrow", coded), None, budget=2, lam=0.2)["kept"] == 2
    empty = table(0).append_column("source", pa.array([], pa.string()))
    assert solve_file(save(tmp_path / "empty.parquet", empty), None, budget=0, lam=0.2, quota="source")["kept"] == 0
