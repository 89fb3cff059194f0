"""Which global assets are missing or were fitted under other settings: what must run before a snapshot can."""

from collections.abc import Sequence

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import FITTED, STAGES
from dagster_datamask.stages.calibration import selection_encoder
from dagster_datamask.stages.classifiers import classifier_inputs, classifier_of
from dagster_datamask.stages.language_model import chosen_since, reference_identities, warm_up_identities


def unfitted(store: Store, settings: Settings, source: Source, names: Sequence[str] = FITTED) -> dict[str, str]:
    """{asset: why it has to be fitted}, empty where all of these unpartitioned ones are published under these settings
    and models.

    A calibration on documents that have nothing to do with the source is no calibration; one on snapshots of which
    some are still there stays, because what is fitted is frozen. A language model is not, where a stage chose otherwise
    since of a snapshot that it was trained on.

    Raises ModelUnavailable for a model that cannot be had, SettingsError for labels that are not there.
    """
    why: dict[str, str] = {}
    here = source.snapshots()
    # resolved even where nothing is published yet: a model that cannot be had is better known before any run
    models = {name: _models(name, settings) for name in names}
    for name in names:
        stage = STAGES[name]
        published = store.published(name)
        if published is None:
            why[name] = "missing"
        elif published.code_version != stage.version:
            why[name] = "fitted by another version of the code"
        elif published.settings != stage.identity(settings):
            why[name] = "fitted under other settings"
        elif not set(published.facts.get("snapshots", here)) & set(here):
            why[name] = "fitted on snapshots that the source does not have"
        elif any(ancestor in why for ancestor in stage.inputs):
            why[name] = f"rests on {', '.join(a for a in stage.inputs if a in why)}"
        elif any(
            (made := store.published(a)) is None or made.fingerprint != published.inputs.get(a) for a in stage.inputs
        ):
            why[name] = "fitted on another generation of its inputs"
        elif snapshots := chosen_since(store, published):
            why[name] = f"trained on another choice of {', '.join(snapshots)} than the published one"
        elif any(published.inputs.get(model) != revision for model, revision in models[name].items()):
            why[name] = "fitted with other models or labels"
    return why


def _models(name: str, settings: Settings) -> dict[str, str]:
    """{input: revision} of the models and labels behind a global asset, without the device they would run on."""
    for part in PARTS:
        if name == classifier_of(part):
            inputs = classifier_inputs(settings, part, Accelerator())
            return {model: revision for model, revision in inputs.items() if model != "precision"}
    found: dict[str, str] = {}
    kind = name.rpartition("/")[2]
    if kind in ("kmeans_centroids", "rollout_sets", "influence_model"):
        found["encoder"] = selection_encoder(settings).identity
    if kind in ("rollout_sets", "continued_model"):
        found |= reference_identities(settings)
    return found | (warm_up_identities(settings) if kind == "warmup_model" else {})
