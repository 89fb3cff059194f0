"""e5_embeddings: what it tells of its forward passes, its back end, and the vectors' order of the shard."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dagster_datamask.keyed import rng
from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.shards import schemas
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.calibration import selection_encoder
from dagster_datamask.stages.embeddings import vectors_of
from tests.conftest import SNAPSHOTS
from tests.project import Project

SNAPSHOT = SNAPSHOTS[0]


def stored(outcome: Outcome) -> dict[str, np.ndarray]:
    """{doc_id: vector} of the documents that have one."""
    assert outcome.published is not None
    found = {}
    for shard in outcome.published.shards:
        for table in read_batches(outcome.published.path(shard), None, 8192):
            good = table.filter(table["embedding"].is_valid())
            found |= dict(zip(good["doc_id"].to_pylist(), vectors_of(good), strict=True))
    return found


def side_file(path: Path, vectors: np.ndarray, batch: int) -> Path:
    """A side file of these vectors, written in batches of some rows."""
    schema = schemas.embeddings(vectors.shape[1])
    with table_file(path, schema) as writer:
        for first in range(0, len(vectors), batch):
            rows = vectors[first : first + batch]
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), vectors.shape[1])
            ids = [str(first + k) for k in range(len(rows))]
            writer.write(pa.table([ids, column, pa.nulls(len(rows), pa.string())], schema=schema))
    return path


@pytest.mark.parametrize("rows", [0, 1, 2, 100])
def test_vectors_are_read_where_the_file_is_mapped(tmp_path: Path, rows: int) -> None:
    vectors = rng(0, "test-mapped", rows).standard_normal((rows, 8), dtype=np.float32).astype(np.float16)
    path = side_file(tmp_path / "a.arrow", vectors, 40)
    tables = list(read_batches(path, ["embedding"], 16))
    for table in tables:
        body = table["embedding"].chunk(0).buffers()[-1]
        # the very bytes of the file, not a copy of them
        start = vectors_of(table).__array_interface__["data"][0]
        assert body.address <= start < body.address + body.size
    # the file is closed by now, and the rows are still there
    read = [vectors_of(table) for table in tables]
    np.testing.assert_array_equal(np.concatenate([np.empty((0, 8), np.float16), *read]), vectors)
    # rows of several batches are in one piece only as a copy
    whole = pa.concat_tables([schemas.embeddings(8).empty_table(), *read_batches(path, None, 16)])
    np.testing.assert_array_equal(vectors_of(whole), vectors)


def test_what_the_device_did_is_told_and_not_published(finished: tuple[Project, dict[str, Outcome]]) -> None:
    outcome = finished[1]["e5_embeddings"]
    assert outcome.published is not None
    told = outcome.facts.keys() - outcome.published.facts.keys()
    assert told == {"forward_passes", "largest_batch", "padding", "retried_in_float32", "batch_tokens"}
    assert outcome.facts["forward_passes"] >= len(outcome.published.shards) and 0 <= outcome.facts["padding"] < 1


def test_vectors_belong_to_their_documents(finished: tuple[Project, dict[str, Outcome]]) -> None:
    project, outcomes = finished
    vectors = stored(outcomes["e5_embeddings"])
    raw = outcomes["raw_shards"].published
    assert raw is not None
    encoder = Encoder(selection_encoder(project.settings), project.run().accelerator)
    seen = 0
    for shard in raw.shards:
        for batch in DocumentReader(project.source, raw).batches(shard, ["text"]):
            texts = dict(zip(batch.ids.to_pylist(), batch.rows["text"].to_pylist(), strict=True))
            ids = [id_ for id_ in texts if id_ in vectors]
            alone = encoder.encode([texts[id_] for id_ in ids]).vectors
            np.testing.assert_allclose(np.stack([vectors[id_] for id_ in ids]), alone, atol=1e-3)
            seen += len(ids)
    assert seen == len(vectors) > 0


def test_another_back_end_gives_another_generation_of_nearly_equal_vectors(project: Project) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    by_torch = project.full(SNAPSHOT)["e5_embeddings"]
    other = project.with_settings(**{"embed.backend": "openvino"})
    by_openvino = other.stage("e5_embeddings", SNAPSHOT)
    again = other.stage("e5_embeddings", SNAPSHOT)
    assert by_torch.published is not None
    assert by_openvino.published is not None
    assert again.published is not None
    assert by_openvino.published.fingerprint != by_torch.published.fingerprint
    assert again.published.fingerprint == by_openvino.published.fingerprint
    assert by_openvino.published.facts["encoder"]["backend"] == "openvino"
    # nothing was left to do, so nothing was loaded
    assert "forward_passes" not in again.facts
    one, two = stored(by_torch), stored(by_openvino)
    assert one.keys() == two.keys()
    assert min(float(one[id_].astype(np.float64) @ two[id_].astype(np.float64)) for id_ in one) > 0.999
