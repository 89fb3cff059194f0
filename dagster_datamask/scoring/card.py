"""The model card of a classifier trained here, as Markdown: data, labels, seed, settings, versions, held-out figures.

Its bytes depend on the training's inputs and the libraries' versions alone. Not here: training (`training`).
"""

from importlib.metadata import version
from typing import Any

CARD_FILE = "card.md"
_LIBRARIES = {
    "fasttext": ("fasttext-community", "numpy"),
    "logistic_head": ("scikit-learn", "sentence-transformers", "torch", "transformers", "numpy"),
    "ridge_head": ("scikit-learn", "sentence-transformers", "torch", "transformers", "numpy"),
}
_KINDS = {
    "fasttext": "a fastText classifier of two labels, trained by DCLM's recipe (Li et al. 2024)",
    "logistic_head": "a logistic regression on frozen embeddings, its probability on a scale of 0 to 5",
    "ridge_head": "a ridge regression on frozen embeddings, as FineWeb-Edu's classifier is one (Penedo et al. 2024)",
}


def library_versions(kind: str) -> dict[str, str]:
    """{distribution: version} of what makes the bytes of a model of this kind, this package first."""
    return {name: version(name) for name in ("dagster-datamask", *_LIBRARIES[kind])}


def model_card(name: str, report: dict[str, Any], *, data: str, data_revision: str, model_revision: str) -> str:
    """The card of the classifier `name`.

    report: `TrainingReport.to_dict()`. data, data_revision: the name of the label file and its content's hash.
    """
    kind = report["kind"]
    (true_neg, false_pos), (false_neg, true_pos) = report["confusion"]
    held_out = {
        what: report[key]
        for what, key in (
            ("rows", "n_heldout"),
            ("precision", "precision"),
            ("recall", "recall"),
            ("AUC", "auc"),
            ("calibration error", "calibration_error"),
            ("rank correlation", "spearman"),
            ("root mean square error", "rmse"),
        )
        if report[key] is not None
    }
    bins = [
        (f"{b['lower']:g} to {b['upper']:g}", b["n"], b["mean_predicted"], b["mean_observed"])
        for b in report["calibration"]
        if b["n"]
    ]
    positive = f"A row counts as predicted positive from {report['threshold']:g} on."
    parts = [
        f"# {name}",
        f"This is {_KINDS[kind]}. Revision `{model_revision}`.",
        "## Data",
        f"`{data}`, content `{data_revision}`: {report['n_train']} rows trained on, {report['n_heldout']} held out, "
        f"{report['n_without_text']} left out for want of text. The held-out rows are chosen by a keyed hash of the "
        "text, so that texts equal but for white space and case are on one side.",
        _table(("label", "rows"), sorted(report["labels"].items())),
        "## Training",
        _table(("setting", "value"), [("seed", report["seed"]), *sorted(report["settings"].items())]),
        _table(("library", "version"), library_versions(kind).items()),
        "## Held-out rows",
        positive,
        _table(("figure", "value"), held_out.items()),
        _table(
            ("", "predicted negative", "predicted positive"),
            [("negative", true_neg, false_pos), ("positive", false_neg, true_pos)],
        ),
        _table(("prediction", "rows", "mean prediction", "mean label"), bins),
        "## Use and limits",
        "Made to rank web documents of the language and kind of its labels by quality, for selecting training data of "
        "language models. It judges a text by its likeness to the labelled ones: no fact is checked, and what the "
        "labels favour it favours. Its held-out figures are of its own labels and say nothing of other sources. It is "
        "not made to judge people or single pages.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
