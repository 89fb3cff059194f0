"""e5_embeddings: what it tells of its forward passes, its back end, and the vectors' order of the shard."""

import numpy as np
import pytest

from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.documents import DocumentReader
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
