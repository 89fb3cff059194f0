"""fineweb_mask_manifest and fineweb_mask: what was decided of every row, and the rows that are kept.

The manifest joins every side file by doc_id and refuses to be written from parts that were made under other settings.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_datamask.reporting.figures import quality_diversity_figure
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.scoring.tokenizers import resolve_tokenizer
from dagster_datamask.settings import Settings, known_keys
from dagster_datamask.shards.cursor import Cursor, read_batches, scatter
from dagster_datamask.shards.documents import DocumentReader, Documents
from dagster_datamask.shards.engine import BATCH_ROWS, Counts
from dagster_datamask.shards.generations import Generation, Published, total_counts
from dagster_datamask.shards.schemas import ADDED, DECISIONS, MANIFEST, joined
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, fingerprints, finish, lineage, mask_of
from dagster_datamask.stages.calibration import selection_encoder
from dagster_datamask.stages.candidates import is_scored
from dagster_datamask.stages.classifiers import classifier_inputs, classifier_of
from dagster_datamask.stages.cleaning import CONTAMINATION, DUPLICATES, evaluation_revision, overtaken
from dagster_datamask.stages.corpus import STATE, part_identity, read_state
from dagster_datamask.stages.embeddings import BAD_EMBEDDING
from dagster_datamask.stages.gneissweb import content_of_categories
from dagster_datamask.stages.ingest import set_aside
from dagster_datamask.stages.language_model import chosen_since, other_sources
from dagster_datamask.stages.quality import JOIN_ROWS, QUALITY_BINS, integer_histogram
from dagster_datamask.stages.substrings import cut_out

SIDECAR = "manifest.json"
# of a snapshot only what is its own: the rest says nothing about it
_ASIDE = "source.set_aside"
_TEXT_GROUP_ROWS = 1000


def fineweb_mask_manifest(run: Run, snapshot: str) -> Outcome:
    """Publish one row per readable input row, and `manifest.json`: settings, models, fingerprints, budget, certificate.

    What is kept is what the mask of select.strategy selects, be it pruned or not; a row that the mask does not speak of
    keeps its earlier decision.
    A failing blocking check keeps it unpublished where an input was made under settings other than those in force.
    """
    stage = STAGES["fineweb_mask_manifest"]
    inputs = run.inputs(stage, snapshot)
    raw, mask = inputs["raw_shards"], inputs[mask_of(run.settings)]
    foreign = foreign_settings(run, snapshot, inputs)
    chosen, in_force = (settings.select.strategy for settings in (run.settings, run.in_force))
    if chosen != in_force:
        foreign.append(f"{stage.name}: select.strategy = {chosen!r} (in force: {in_force!r})")
    same = Check("made_under_these_settings", not foreign, True, {"different": "; ".join(foreign) or "none"})
    if foreign:
        return Outcome(None, 0, {}, checks=(same,))

    def read(shard: str) -> Iterator[dict[str, Any]]:
        def opened(name: str, *columns: str) -> Cursor:
            return Cursor(inputs[name].path(shard), ["doc_id", *columns] if columns else None, JOIN_ROWS)

        whole = {"pruned_documents": opened("pruned_documents"), **{name: opened(name, "score") for name in _SCORES}}
        partial = {
            "kmeans_clusters": opened("kmeans_clusters", "cluster"),
            mask.asset: opened(mask.asset, "selected", "score", "split", "reason"),
        }
        # by far the largest files: on an object store they would come whole to be told that every vector is good
        if any(name.startswith(BAD_EMBEDDING) for name in inputs["e5_embeddings"].record(shard).counts):
            partial["e5_embeddings"] = opened("e5_embeddings", "reason")
        if "near_duplicates" in inputs:
            partial["near_duplicates"] = opened("near_duplicates")
        for table in read_batches(raw.path(shard), ["doc_id", "row", "token_count"], JOIN_ROWS):
            ids = table["doc_id"].combine_chunks()
            yield {
                "shard": shard,
                "raw": table,
                **{name: cursor.take_all(ids) for name, cursor in whole.items()},
                **{name: cursor.take(ids) for name, cursor in partial.items()},
            }
        for cursor in (*whole.values(), *partial.values()):
            cursor.end()

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            read,
            lambda: lambda batch: _decide(batch, snapshot, chosen, mask.asset),
            MANIFEST,
            ext=".parquet",
            total_rows=raw.rows,
        )
        counts = Counter(total_counts(records))
        facts = {
            **{decision: counts[decision] for decision in DECISIONS},
            "tokens_kept": _tokens_kept(generation, raw),
            "strategy": chosen,
            **_selection_facts(mask),
        }
        write_json(generation.folder / SIDECAR, _sidecar(run, snapshot, inputs, counts, facts))
        kept = Check(
            "kept_equals_budget",
            (counts["kept"], facts["tokens_kept"]) == (mask.facts["kept"], mask.facts["tokens"])
            if mask.facts["unit"] == "tokens"
            else counts["kept"] == facts["budget"] - facts["short_by"],
            True,
            {name: facts[name] for name in ("kept", "tokens_kept", "budget", "short_by", "unit")},
        )
        return finish(
            generation,
            records,
            ".parquet",
            facts=facts,
            expected_rows=raw.rows,
            figures=lambda published: {"what the mask keeps": mask_figure(published)},
            checks=(same, kept),
        )


_SCORES = ("dclm_scores", "edu_scores", "wiki_scores")


def _decide(batch: Mapping[str, Any], snapshot: str, strategy: str, mask: str) -> tuple[pa.Table, int, Counts]:
    raw, pruned = batch["raw"], batch["pruned_documents"]
    rows = len(raw)
    decisions = np.array(pruned["decision"].to_pylist(), dtype=object)
    reasons = np.array(pruned["reason"].to_pylist(), dtype=object)
    stages = np.array(pruned["stage"].to_pylist(), dtype=object)
    masks, at_masks = batch[mask]
    survives = pruned["decision"].is_null().to_numpy()
    if "e5_embeddings" in batch:
        embedded, at_vectors = batch["e5_embeddings"]
        why = np.array(embedded["reason"].to_pylist(), dtype=object)
        bad = np.array([reason is not None for reason in why], dtype=bool)
        failed = at_vectors[bad]
        lost = survives[failed]
        decisions[failed[lost]], stages[failed[lost]] = BAD_EMBEDDING, "e5_embeddings"
        reasons[failed[lost]] = why[bad][lost]
    choosable = is_scored(pruned).to_numpy()
    if "near_duplicates" in batch:
        alike, at_alike = batch["near_duplicates"]
        gone = alike["kept_id"].is_valid().to_numpy()
        removed = at_alike[gone]
        decisions[removed], stages[removed] = "duplicate", "near_duplicates"
        kept_ids, cosines = (alike[name].filter(pa.array(gone)).to_pylist() for name in ("kept_id", "similarity"))
        reasons[removed] = [f"near-duplicate of {i}, cosine {c:.4f}" for i, c in zip(kept_ids, cosines, strict=True)]
        choosable[removed] = False
    in_mask = np.zeros(rows, dtype=bool)
    in_mask[at_masks] = True
    undecided = np.array([decision is None for decision in decisions], dtype=bool)
    wrong = np.flatnonzero((in_mask & ~choosable) | (undecided & ~in_mask))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"{mask} {'has' if in_mask[row] else 'lacks'} a row of doc_id {raw['doc_id'][row].as_py()!r} of shard "
            f"{batch['shard']}, whose decision before it is {decisions[row] or 'open'}; materialise {mask} again"
        )
    selected = masks["selected"].to_numpy()
    decisions[at_masks] = np.where(selected, "kept", "not_selected")
    stages[at_masks] = mask
    reasons[at_masks] = np.array(masks["reason"].to_pylist(), dtype=object)
    clusters, at_clusters = batch["kmeans_clusters"]
    table = pa.table(
        {
            "doc_id": raw["doc_id"],
            "snapshot": [snapshot] * rows,
            "shard": [batch["shard"]] * rows,
            "row": raw["row"],
            "strategy": [strategy] * rows,
            "decision": decisions.tolist(),
            "stage": stages.tolist(),
            "reason": reasons.tolist(),
            **{part: batch[f"{part}_scores"]["score"] for part in PARTS},
            "quality": pruned["quality"],
            "cluster": scatter(clusters["cluster"], at_clusters, rows),
            "split": scatter(masks["split"], at_masks, rows),
            "score": scatter(masks["score"], at_masks, rows),
            "token_count": raw["token_count"],
        },
        schema=MANIFEST,
    )
    return table, rows, Counter(decisions.tolist())


def foreign_settings(run: Run, snapshot: str, inputs: Mapping[str, Published]) -> list[str]:
    """What of the inputs was made under other settings or models than those of datamask.toml, in words."""
    made = _made_from(run, snapshot, inputs)
    now = {name: published.fingerprint for name, published in made.items()}
    if STATE in made:
        entry = read_state(made[STATE])["snapshots"].get(snapshot)
        # a later round leaves this snapshot's masks as they are
        now[STATE] = "" if entry is None else part_identity(snapshot, entry)
    foreign = [
        f"{name}: {key} = {published.settings.get(key)!r} (in force: {value!r})"
        for name, published in sorted(made.items())
        for key, value in STAGES[name].identity(run.in_force).items()
        if published.settings.get(key) != value
    ]
    without, asked = set_aside(inputs["raw_shards"]), _asked_aside(run.in_force, snapshot)
    if without != asked:
        foreign.append(f"raw_shards: {_ASIDE} = {without!r} (in force: {asked!r})")
    classifiers = {part: made[classifier_of(part)] for part in (*PARTS, "ultra") if classifier_of(part) in made}
    foreign += [
        f"{name}: made with another generation of {ancestor}"
        for name, published in sorted(made.items())
        for ancestor, fingerprint in sorted(published.inputs.items())
        if now.get(ancestor, fingerprint) != fingerprint
    ]
    foreign += [
        f"{name}: made by version {published.code_version} of the code (in force: {STAGES[name].version})"
        for name, published in sorted(made.items())
        if published.code_version != STAGES[name].version
    ]
    # revisions alone: a manifest written on a CPU accepts vectors made on a GPU
    models = {
        **{
            classifiers[part].asset: tuple(
                {key: value for key, value in inputs.items() if key != "precision"}
                for inputs in (classifiers[part].inputs, classifier_inputs(run.in_force, part, run.accelerator))
            )
            for part in classifiers
        },
        "e5_embeddings": (inputs["e5_embeddings"].inputs["encoder"], selection_encoder(run.in_force).identity),
    } | {
        f"{part}_scores": (made[f"{part}_scores"].facts["model_revision"], classifiers[part].facts["revision"])
        for part in classifiers
    }
    if "exact_substrings" in made:
        tokenizer = resolve_tokenizer(run.in_force.source.tokenizer).revision
        models["exact_substrings"] = (made["exact_substrings"].inputs["tokenizer"], tokenizer)
    foreign += [
        f"{name}: made {'without' if wanted(run.in_force) else 'with'} {read}"
        for name, published in sorted(made.items())
        for read, wanted in STAGES[name].optional
        if wanted(run.in_force) != (read in published.inputs)
    ]
    foreign += [
        f"{name}: trained on another choice of {', '.join(snapshots)} than the published one"
        for name, published in sorted(made.items())
        if (snapshots := chosen_since(run.store, published))
    ]
    if DUPLICATES in made and (since := overtaken(run.store, made[DUPLICATES])):
        foreign.append(
            f"{DUPLICATES}: {', '.join(since)} came or changed after its documents were compared with those before; "
            f"materialise {DUPLICATES} and what follows again, snapshot by snapshot in the order of their names"
        )
    if CONTAMINATION in made and made[CONTAMINATION].inputs["evaluation_sets"] != evaluation_revision(run.in_force):
        foreign.append(f"{CONTAMINATION}: made with other evaluation sets")
    labels = content_of_categories(STAGES[mask_of(run.settings)], run.in_force).get("categories")
    if labels != inputs[mask_of(run.settings)].inputs.get("categories"):
        foreign.append(f"{mask_of(run.settings)}: made with other categories")
    foreign += [f"{name}: made with another {what}" for name, what in other_sources(made, run.in_force)]
    return foreign + [f"{name}: made with another model" for name, (was, is_now) in models.items() if was != is_now]


def other_settings(snapshot: str, sidecar: Mapping[str, Any], settings: Settings) -> list[str]:
    """The settings that the sidecar of a snapshot's manifest tells and that are not those in force, in words."""
    known = set(known_keys())
    told = {_ASIDE: []} | sidecar["settings"]
    now = {key: settings.get(key) if key in known else "no such setting" for key in told}
    now[_ASIDE] = _asked_aside(settings, snapshot)
    return [f"{key} = {told[key]!r} (in force: {now[key]!r})" for key in sorted(told) if told[key] != now[key]]


def _asked_aside(settings: Settings, snapshot: str) -> list[str]:
    return [name for name in settings.source.set_aside if name.startswith(f"{snapshot}/")]


def _made_from(run: Run, snapshot: str, inputs: Mapping[str, Published]) -> dict[str, Published]:
    """The inputs and all that they are made from, whatever it belongs to."""
    # the state of the corpus matters to masks that are a part of it
    names = [name for name in lineage(inputs, run.settings) if name != STATE or _of_state(run, inputs)]
    return {name: inputs.get(name) or run.current(name, snapshot) for name in names}


def _of_state(run: Run, inputs: Mapping[str, Published]) -> bool:
    return STATE in inputs[mask_of(run.settings)].inputs


def _selection_facts(masks: Published) -> dict[str, Any]:
    asked = ("n", "budget", "unit", "short_by", "pool", "splits", "scope", "lambda", "objective", "solver")
    names = (*asked, "value", "quality_raw", "diversity")
    return {name: masks.facts[name] for name in names} | {
        name: masks.facts["certificate"].get(name) for name in ("upper_bound", "gap", "share")
    }


def _tokens_kept(generation: Generation, raw: Published) -> int | None:
    """GPT-2 tokens of the kept rows, None where the source does not tell one's."""
    total = 0
    for table in _batches(lambda shard: generation.path(shard, ".parquet"), raw.shards, ["decision", "token_count"]):
        kept = table["token_count"].filter(pc.equal(table["decision"], "kept"))
        if kept.null_count:
            return None
        total += pc.sum(kept).as_py() or 0
    return total


def mask_figure(published: Published) -> bytes:
    """Quality of the documents that could be chosen and of those that were, and the kept share of each cluster."""
    by_quality = np.zeros((2, QUALITY_BINS), dtype=np.int64)
    by_cluster: list[Counter[int]] = [Counter(), Counter()]
    for table in _batches(published.path, published.shards, ["decision", "quality", "cluster"]):
        for k, decisions in enumerate((["kept", "not_selected"], ["kept"])):
            rows = table.filter(pc.is_in(table["decision"], value_set=pa.array(decisions)))
            by_quality[k] += integer_histogram(rows["quality"].to_numpy())
            # a baseline may choose of documents that nobody embedded
            by_cluster[k].update(rows["cluster"].drop_null().to_pylist())
    clusters = sorted(by_cluster[0])
    return quality_diversity_figure(
        by_quality[0].tolist(),
        by_quality[1].tolist(),
        [by_cluster[0][c] for c in clusters],
        [by_cluster[1][c] for c in clusters],
        f"{published.snapshot}: {published.facts['kept']:,} of {published.rows:,} documents kept",
    )


def _batches(path: Callable[[str], Path], shards: Sequence[str], columns: list[str]) -> Iterator[pa.Table]:
    for shard in shards:
        yield from read_batches(path(shard), columns, JOIN_ROWS)


def _sidecar(
    run: Run, snapshot: str, inputs: Mapping[str, Published], counts: Counter[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """What the selection was made from. No times, hosts or paths: equal inputs give an equal sidecar."""
    masks = inputs[mask_of(run.settings)]
    everything = _made_from(run, snapshot, inputs)
    settings = STAGES["fineweb_mask_manifest"].identity(run.settings)
    for published in everything.values():
        settings |= published.settings
    if without := set_aside(inputs["raw_shards"]):
        settings[_ASIDE] = without
    return {
        "snapshot": snapshot,
        "strategy": run.settings.select.strategy,
        "code_versions": {name: published.code_version for name, published in everything.items()},
        "settings": dict(sorted(settings.items())),
        "seeds": {key: value for key, value in sorted(settings.items()) if key.endswith(".seed")},
        "models": {
            **{
                asset.removesuffix("_scores"): {
                    name: published.facts[name] for name in ("model", "model_ref", "model_revision")
                }
                for asset, published in everything.items()
                if "model_revision" in published.facts
            },
            "encoder": inputs["e5_embeddings"].facts["encoder"],
            **{
                asset: {name: published.facts[name] for name in names}
                for asset, published in everything.items()
                if (names := _MODEL_FACTS.get(asset.rpartition("/")[2]))
            },
        },
        **_reference_sets(everything),
        "fingerprints": fingerprints(everything),
        "quarantined_shards": inputs["raw_shards"].facts["quarantined_shards"],
        "decisions": {decision: counts[decision] for decision in DECISIONS},
        "budget": {
            "asked": facts["budget"],
            "met": counts["kept"] if facts["unit"] == "documents" else facts["tokens_kept"],
            "unit": facts["unit"],
            "short_by": facts["short_by"],
            "n": facts["n"],
        },
        "quotas": masks.facts["quotas"],
        "solver": facts["solver"],
        "scope": facts["scope"],
        "tokens_kept": facts["tokens_kept"],
        "certificate": masks.facts["certificate"],
        "value": masks.facts["value"],
        **({"corpus": masks.facts["corpus"]} if "corpus" in masks.facts else {}),
    }


# of a language model and an influence model, what tells it from another
_MODEL_FACTS = {
    "warmup_model": ("checkpoint", "step"),
    "continued_model": ("checkpoint", "step"),
    "influence_model": ("model", "mode", "similarity", "alpha", "beta"),
}


def _reference_sets(everything: Mapping[str, Published]) -> dict[str, Any]:
    """The content of the reference sets that influence was measured on, where it was."""
    probed = everything.get("stage_1/rollout_sets")
    if probed is None:
        return {}
    return {"reference_sets": {name: probed.inputs.get(name) for name in ("reference", "held_out")}}


def fineweb_mask(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish the kept rows with all their columns and, beside them, doc_id, scores, quality, cluster and mask score.

    Every shard's file has the union of the shards' columns, so that `datasets`, polars and DuckDB read them as one;
    bytes of a string that are no UTF-8 become U+FFFD, as the scorers saw them. Where GneissWeb's mask is kept, texts
    are without what exact_substrings found repeated.
    Raises ColumnClash as raw_shards does, and BadShard where a page cannot be decoded any more.
    """
    stage = STAGES["fineweb_mask"]
    inputs = run.inputs(stage, snapshot)
    raw, manifest, repeats = inputs["raw_shards"], inputs["fineweb_mask_manifest"], inputs.get("exact_substrings")
    reader = DocumentReader(source, raw)
    columns = ["doc_id", "decision", *(name for name in ADDED.values() if name != "doc_id")]

    def read(shard: str) -> Iterator[tuple[Documents, pa.Table, pa.ChunkedArray | None]]:
        cursor = Cursor(manifest.path(shard), columns, BATCH_ROWS)
        spans = None if repeats is None else Cursor(repeats.path(shard), ["doc_id", "spans"], BATCH_ROWS)
        for batch in reader.batches(shard, None):
            yield batch, cursor.take_all(batch.ids), None if spans is None else spans.take_all(batch.ids)["spans"]
        cursor.end()

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        shards = [reader.shard(name) for name in raw.shards]
        schema = joined((shard.path, source.footer(shard).schema) for shard in shards)

        def kernel(batch: tuple[Documents, pa.Table, pa.ChunkedArray | None]) -> tuple[pa.Table, int, Counts]:
            documents, decided, spans = batch
            keep = pc.equal(decided["decision"], "kept")
            rows, kept = documents.rows.filter(keep), decided.filter(keep)
            data = {field.name: conform(rows, field) for field in schema if field.name not in ADDED} | {
                name: kept[column] for name, column in ADDED.items()
            }
            if spans is not None:
                data["text"] = cut_out(data["text"], spans.filter(keep))
            return (
                pa.table(data, schema=schema),
                len(decided),
                {"kept": len(kept), "left_out": len(decided) - len(kept)},
            )

        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            read,
            lambda: kernel,
            schema,
            ext=".parquet",
            total_rows=raw.rows,
            group_rows=_TEXT_GROUP_ROWS,
        )
        written = sum(record.rows for record in records)
        exact = Check(
            "rows_equal_kept",
            written == manifest.facts["kept"],
            True,
            {"rows": written, "kept": manifest.facts["kept"]},
        )
        return finish(
            generation,
            records,
            ".parquet",
            facts={
                "documents": written,
                "bytes": sum(record.bytes for record in records),
                "tokens": manifest.facts["tokens_kept"],
            },
            expected_rows=raw.rows,
            checks=(exact,),
        )


def conform(rows: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """The column of a field, as its type; nulls where the rows have none, U+FFFD where a text is no UTF-8."""
    if field.name not in rows.column_names:
        return pa.nulls(len(rows), field.type)
    column = rows[field.name]
    if not (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
        return column.cast(field.type)
    try:
        # bytes are checked by the cast, strings of a foreign writer only here
        column.validate(full=True)
        return column.cast(field.type)
    except pa.ArrowInvalid:
        return pa.array(decode_column(column)[0], field.type)
