"""The demo's page: the published figures and numbers of a few snapshots, drawn again from what was published."""

from collections.abc import Sequence

from dagster_datamask.reporting.figures import quality_histogram
from dagster_datamask.reporting.html import Section
from dagster_datamask.reporting.tables import markdown_table
from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.classifiers import made_by
from dagster_datamask.stages.manifest import mask_figure
from dagster_datamask.stages.masks import mask_figures

_COLUMNS = (
    "snapshot",
    "readable rows",
    "duplicate",
    "bad_row",
    "unscored",
    "pruned",
    "bad_embedding",
    "not_selected",
    "kept",
)


def sections(store: Store, snapshots: Sequence[str]) -> list[Section]:
    """A table of decisions, one of certificates, and the figures of each snapshot."""
    manifests = {name: store.current("fineweb_mask_manifest", name) for name in snapshots}
    decisions = [
        {"snapshot": name, "readable rows": m.rows, **{c: m.facts[c] for c in _COLUMNS[2:]}}
        for name, m in manifests.items()
    ]
    certificates = [
        {
            "snapshot": name,
            **{
                key: m.facts[key] for key in ("solver", "lambda", "value", "upper_bound", "gap", "share", "quality_raw")
            },
        }
        for name, m in manifests.items()
    ]
    classifiers = store.current("quality_classifiers").facts
    models = [
        {
            "classifier": part,
            "model": made_by(fact),
            "held-out AUC": fact.get("report", {}).get("auc"),
        }
        for part, fact in classifiers.items()
    ]
    page: list[Section] = [
        ("What became of every row", markdown_table(decisions, _COLUMNS), None),
        (
            "How good the masks are",
            "No mask of the same size from the same pool is worth more than `upper_bound`; `gap` is what is left to "
            "it, `share` the share of the gain over a uniform mask.\n\n"
            + markdown_table(certificates, list(certificates[0]) if certificates else ["snapshot"]),
            None,
        ),
        ("Classifiers", markdown_table(models, ["classifier", "model", "held-out AUC"]), None),
    ]
    for name, manifest in manifests.items():
        for heading, png in mask_figures(store.current("datamask_masks", name)).items():
            page.append((f"{name}: {heading}", "", png))
        page.append((f"{name}: what the mask keeps", "", mask_figure(manifest)))
        histogram = store.current("quality_scores", name).facts["histogram"]
        page.append((f"{name}: quality", "", quality_histogram(histogram, f"Quality of {name}")))
    return page
