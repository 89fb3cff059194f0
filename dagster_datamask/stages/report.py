"""snapshot_report: one page of figures and documents that says what was kept of a snapshot, and why.

Published beside the page: its figures, its numbers and its sample, of which `selection_report` makes the corpus's page
without reading the snapshots again. Not here: the figures' numbers (`report_numbers`), their captions (`report_pages`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagster_datamask.reporting.html import Section, self_contained_page
from dagster_datamask.reporting.tables import markdown_table
from dagster_datamask.shards.generations import Generation, Published
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import atomic, table_file, write_json
from dagster_datamask.stages.base import (
    MASKS_OF_A_SNAPSHOT,
    STAGES,
    Check,
    Outcome,
    Run,
    called,
    fingerprints,
    finish,
    mask_of,
    strategy_of,
)
from dagster_datamask.stages.calibration import read_centroids
from dagster_datamask.stages.manifest import SIDECAR, foreign_settings
from dagster_datamask.stages.masks import mask_figures
from dagster_datamask.stages.report_examples import SHOWN, cards, chosen, cut_of, excerpts, neighbours
from dagster_datamask.stages.report_numbers import (
    Numbers,
    gather,
    hosts,
    sample_schema,
    sample_table,
    strategies,
)
from dagster_datamask.stages.report_pages import PAGE, Figure, certificate_in_words, figures, in_short

EXT = ".html"
NUMBERS, SAMPLE_FILE, FIGURES = "numbers.json", "sample.arrow", "figures"


def snapshot_report(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish `report.html` of a snapshot, and beside it `figures/`, `numbers.json` and `sample.arrow`.

    A failing blocking check keeps it unpublished where the snapshot was selected under other settings than those in
    force. Raises InconsistentFiles where inputs were made from different generations, or a source shard was rewritten.
    """
    stage = STAGES["snapshot_report"]
    every = run.inputs(
        stage, snapshot, sorted({*stage.needs(run.settings), *STAGES["fineweb_mask_manifest"].needs(run.settings)})
    )
    foreign = foreign_settings(run, snapshot, every)
    same = Check("made_under_these_settings", not foreign, True, {"different": "; ".join(foreign) or "none"})
    if foreign:
        return Outcome(None, 0, {}, checks=(same,))
    inputs = {name: every[name] for name in stage.needs(run.settings)}
    others, left_out = _others(run, snapshot, every)
    manifest = inputs["fineweb_mask_manifest"]
    keys = fingerprints(inputs) | fingerprints(others) | {f"not {name}": why for name, why in left_out.items()}
    with run.generation(stage, snapshot, keys) as generation:
        record = generation.record(PAGE, EXT)
        if record is None:
            numbers = _make(run, source, generation, inputs, others, left_out)
            generation.keep(NUMBERS, SAMPLE_FILE, FIGURES)
            record = generation.complete(PAGE, EXT, rows=manifest.rows, rows_in=manifest.rows, counts=numbers.decisions)
        told = json.loads((generation.folder / NUMBERS).read_text("utf-8"))
        return finish(
            generation,
            [record],
            EXT,
            facts=told["facts"] | {"page_bytes": record.bytes},
            expected_rows=manifest.rows,
            figures=lambda published: read_figures(published, told["figures"]),
            checks=(same,),
        )


def _others(run: Run, snapshot: str, inputs: Mapping[str, Published]) -> tuple[dict[str, Published], dict[str, str]]:
    """({asset: its published mask} of the snapshot's other selections, {asset: why it is not compared})."""
    own = mask_of(run.settings)
    found, left_out = {}, {}
    for name in sorted({*MASKS_OF_A_SNAPSHOT} - {own}):
        stage, published = STAGES[name], run.store.published(name, snapshot)
        if published is None:
            continue
        if (published.code_version, published.settings) != (stage.version, stage.identity(run.in_force)):
            left_out[name] = "made under other settings or code"
        elif any(published.inputs.get(a, one.fingerprint) != one.fingerprint for a, one in inputs.items()):
            left_out[name] = "made of other generations than those published now"
        else:
            found[name] = published
    return found, left_out


def _make(
    run: Run,
    source: Source,
    generation: Generation,
    inputs: Mapping[str, Published],
    others: Mapping[str, Published],
    left_out: Mapping[str, str],
) -> Numbers:
    snapshot = generation.snapshot or ""
    manifest, raw, mask = inputs["fineweb_mask_manifest"], inputs["raw_shards"], inputs[mask_of(run.settings)]
    own = called(manifest.facts["strategy"])
    run.log(f"snapshot_report {snapshot}: counting {manifest.rows:,} documents")
    gathered = gather(inputs, mask, {called(strategy_of(name)): other for name, other in others.items()}, SHOWN)
    numbers = gathered.numbers
    largest, before, after = hosts(source, inputs, generation.work)
    schema = sample_schema(inputs["e5_embeddings"].facts["dimension"])
    sample = sample_table(gathered.sample, schema)
    with table_file(generation.folder / SAMPLE_FILE, schema) as writer:
        writer.write(sample)
    run.log(f"snapshot_report {snapshot}: a map of {len(sample):,} documents")
    drawn = [
        *(_trajectory(heading, png) for heading, png in mask_figures(mask).items()),
        *figures(
            snapshot,
            numbers,
            strategies(sample, own),
            read_centroids(run.store.current("kmeans_centroids")),
            largest,
            (before, after),
        ),
    ]
    kept, dropped = chosen(gathered.examples)
    nearest = neighbours(inputs, [*kept, *dropped])
    places = {(row["shard"], row["row"]) for row in (*kept, *dropped, *nearest.values())}
    texts = excerpts(source, raw, places)
    cut = cut_of(inputs["pruned_documents"], mask, gathered.kept_of_split)
    sections = [
        in_short(snapshot, numbers),
        ("How good the mask is", _certificate(mask), None),
        *(figure.section() for figure in drawn),
        (
            f"{len(kept)} kept documents",
            "Chosen by the hash of their ids, not by hand, and each beside the kept document that is nearest to it. "
            "Where the two say the same, the mask could have done without one of them.",
            cards(kept, nearest, texts, cut, numbers),
        ),
        (
            f"{len(dropped)} dropped documents",
            "Chosen in the same way, some of every decision there is. The kept document beside each stands for what "
            "is not lost by dropping it: the nearer it is, the less is.",
            cards(dropped, nearest, texts, cut, numbers),
        ),
        *([("Selections that are not compared", _not_compared(left_out), None)] if left_out else []),
        ("What it was made from", made_from(manifest), None),
    ]
    write_json(
        generation.folder / NUMBERS,
        {
            "numbers": numbers.as_dict(),
            "hosts": {"largest": largest, "before": before, "after": after},
            "figures": write_figures(generation.folder, drawn),
            "facts": facts_of(numbers) | {name: manifest.facts[name] for name in ("value", "gap", "share")},
        },
    )
    write_page(generation.folder, f"What {own} kept of {snapshot}", sections)
    return numbers


def _not_compared(left_out: Mapping[str, str]) -> str:
    rows = [{"selection": name, "why": why} for name, why in left_out.items()]
    return f"Materialise them again to see them here.\n\n{markdown_table(rows, ['selection', 'why'])}"


def _trajectory(heading: str, png: bytes) -> Figure:
    return Figure(
        heading.capitalize(),
        "How the objective rises as the solver works. The dashed black line is the bound that no mask exceeds, the "
        "grey one a uniform mask: a line that ends on the black one is done. Dotted: the bound as it was known at each "
        "step.",
        png,
    )


def _certificate(masks: Published) -> str:
    facts = masks.facts
    of = {
        "corpus": "the corpus as one pool, of which this snapshot is a part",
        "snapshot": "the snapshot as one pool",
    }.get(facts["scope"], "the snapshot" if facts["splits"] == 1 else f"the union of {facts['splits']} splits")
    words = certificate_in_words(facts, of)
    if facts.get("split_gaps_weighted") is not None:
        gap = facts["split_gaps_weighted"]
        words += f"\n\nEach split was solved alone; their gaps, weighted by budget, come to {gap:.1e}."
    if facts["short_by"]:
        words += (
            f"\n\nThe budget was {facts['budget']:,} {facts['unit']}; {facts['short_by']:,} of them could not be met."
        )
    return words


def made_from(manifest: Published) -> str:
    """Settings and fingerprints of a published manifest, as tables."""
    sidecar = json.loads(manifest.file(SIDECAR).read_text("utf-8"))
    settings = [{"setting": key, "value": json.dumps(value)} for key, value in sidecar["settings"].items()]
    made = [
        {"asset": name, "version": sidecar["code_versions"][name], "fingerprint": fingerprint}
        for name, fingerprint in sidecar["fingerprints"].items()
    ]
    return (
        "Equal fingerprints mean equal bytes.\n\n"
        + markdown_table(settings, ["setting", "value"])
        + "\n\n"
        + markdown_table(made, ["asset", "version", "fingerprint"])
    )


def facts_of(numbers: Numbers) -> dict[str, Any]:
    """What the UI shows, and plots over time, of a report."""
    scored, choosable, kept = (numbers.groups[name] for name in ("scored", "choosable", "kept"))
    return {
        "quality_scored": scored.mean_quality,
        "quality_choosable": choosable.mean_quality,
        "quality_kept": kept.mean_quality,
        "cosine_choosable": numbers.cosine("choosable"),
        "cosine_kept": numbers.cosine("kept"),
        "mean_tokens_scored": scored.mean_tokens,
        "mean_tokens_kept": kept.mean_tokens,
        "scored": scored.documents,
        "choosable": choosable.documents,
        "kept": kept.documents,
        "tokens_kept": None if kept.uncounted else kept.tokens,
        **({"selections": numbers.selected(), "overlaps": numbers.overlaps()} if len(numbers.selections) > 1 else {}),
    }


def read_sample(published: Published) -> pa.Table:
    """The sample of a published report."""
    with pa.memory_map(str(published.file(SAMPLE_FILE))) as file:
        return pa.ipc.open_file(file).read_all()


def write_figures(folder: Path, drawn: Sequence[Figure]) -> list[dict[str, str]]:
    """Write the figures beside the page; [{heading, file}]."""
    (folder / FIGURES).mkdir(exist_ok=True)
    told = []
    for number, figure in enumerate(drawn, 1):
        name = f"{FIGURES}/{number:02d}.png"
        with atomic(folder / name) as temp:
            temp.write_bytes(figure.png)
        told.append({"heading": figure.heading, "file": name})
    return told


def read_figures(published: Published, told: Sequence[Mapping[str, str]]) -> dict[str, bytes]:
    """{heading: PNG} of what `write_figures` wrote."""
    return {figure["heading"]: published.file(figure["file"]).read_bytes() for figure in told}


def write_page(folder: Path, title: str, sections: Sequence[Section]) -> None:
    with atomic(folder / f"{PAGE}{EXT}") as temp:
        temp.write_text(self_contained_page(title, sections), "utf-8")
