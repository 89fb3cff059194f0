"""selection_report: one page over all snapshots that were selected, made of what their own reports published.

Nothing here reads a snapshot's documents again: counts add up, and the least keyed hashes of all samples are a sample
of the corpus. What is missing or stale is found by comparing published fingerprints: Dagster follows no more than 100
partitions. Not here: what a single snapshot's page holds (`report`).
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dagster_datamask.keyed import digest
from dagster_datamask.reporting.html import Section
from dagster_datamask.reporting.tables import Markdown, markdown_table
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Generation, NotPublished, Published, Store
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, called, finish
from dagster_datamask.stages.calibration import read_centroids
from dagster_datamask.stages.corpus import STATE, named, outdated_masks
from dagster_datamask.stages.manifest import SIDECAR, other_settings
from dagster_datamask.stages.report import (
    EXT,
    FIGURES,
    NUMBERS,
    facts_of,
    read_figures,
    read_sample,
    write_figures,
    write_page,
)
from dagster_datamask.stages.report_numbers import Numbers, merged, sample_schema, strategies
from dagster_datamask.stages.report_pages import PAGE, Figure, certificate_in_words, figures, in_short

_WHAT = "The corpus"
_MANIFEST, _REPORT = "fineweb_mask_manifest", "snapshot_report"


@dataclass(frozen=True)
class _Snapshot:
    """A selected snapshot: its manifest, and its report where there is one of this very manifest."""

    manifest: Published
    report: Published | None

    def told(self) -> Mapping[str, Any]:
        """The report's numbers.json, read anew: megabytes each, of which only one at a time is to be in memory."""
        assert self.report is not None
        told: dict[str, Any] = json.loads(self.report.file(NUMBERS).read_text("utf-8"))
        return told


def selection_report(run: Run, source: Source) -> Outcome:
    """Publish `report.html` of all snapshots that have a manifest, with `figures/` and `numbers.json` beside it.

    A failing blocking check keeps it unpublished where a snapshot was selected under other settings than those in
    force; a check that does not block names the snapshots that are missing or stale.
    Raises NotPublished where nothing is selected yet.
    """
    stage = STAGES["selection_report"]
    found = {name: _selected(run.store, name) for name in run.store.snapshots(_MANIFEST)}
    if not found:
        raise NotPublished(f"no snapshot under {run.store.where} has a manifest; run the job full for one first")
    foreign = {
        name: ", ".join(why)
        for name, one in found.items()
        if (why := other_settings(name, _sidecar(one.manifest), run.in_force))
    }
    same = Check("made_under_these_settings", not foreign, True, {"different": named(foreign) or "none"})
    if foreign:
        return Outcome(None, 0, {}, checks=(same,))
    waiting = dict.fromkeys(source.snapshots(), "not begun") | standing(run.store, run.in_force)
    waiting = {name: why for name, why in sorted(waiting.items()) if why}
    keys = {f"{_MANIFEST} {name}": one.manifest.fingerprint for name, one in found.items()}
    keys |= {f"{_REPORT} {name}": one.report.fingerprint for name, one in found.items() if one.report}
    keys["kmeans_centroids"] = run.store.current("kmeans_centroids").fingerprint
    keys["waiting"] = digest(json.dumps(waiting)).hex()
    rows = sum(one.manifest.rows for one in found.values())
    with run.generation(stage, None, keys) as generation:
        record = generation.record(PAGE, EXT)
        if record is None:
            _make(run, generation, found, waiting)
            generation.keep(NUMBERS, FIGURES)
            counts: Counter[str] = Counter()
            for one in found.values():
                counts.update(one.manifest.counts)
            record = generation.complete(PAGE, EXT, rows=rows, rows_in=rows, counts=counts)
        told = json.loads((generation.folder / NUMBERS).read_text("utf-8"))
        fresh = Check(
            "every_snapshot_reported",
            not waiting,
            False,
            {"waiting": len(waiting), "snapshots": named(waiting) or "none"},
        )
        return finish(
            generation,
            [record],
            EXT,
            facts=told["facts"] | {"page_bytes": record.bytes},
            expected_rows=rows,
            figures=lambda published: read_figures(published, told["figures"]),
            checks=(same, fresh),
        )


def standing(store: Store, settings: Settings) -> dict[str, str]:
    """{snapshot that was begun: what of it is missing or stale, "" where nothing is}, by published fingerprints."""
    begun = sorted({*store.snapshots("raw_shards"), *store.snapshots(_MANIFEST)})
    outdated = outdated_masks(store, settings) if settings.select.scope == "corpus" else {}
    frozen: dict[str, str | None] = {}
    return {
        name: "its part of corpus_selection_state was solved anew since"
        if name in outdated
        else _standing(store, settings, name, frozen)
        for name in begun
    }


def _standing(store: Store, settings: Settings, snapshot: str, frozen: dict[str, str | None]) -> str:
    manifest = store.published(_MANIFEST, snapshot)
    if manifest is None:
        return "begun, but not selected"
    sidecar = _sidecar(manifest)
    other = other_settings(snapshot, sidecar, settings)
    if other:
        return f"selected under other settings: {', '.join(other)}"
    changed = [
        asset
        for asset, fingerprint in sidecar["fingerprints"].items()
        # a later round of the corpus leaves a snapshot's part as it is
        if asset != STATE and _fingerprint(store, asset, snapshot, frozen) != fingerprint
    ]
    if changed:
        return f"selected from another generation of {', '.join(changed)} than the published one"
    older = [asset for asset, version in sidecar["code_versions"].items() if STAGES[asset].version != version]
    if older:
        return f"selected by another version of {', '.join(older)}"
    report = store.published(_REPORT, snapshot)
    if report is None:
        return "has no snapshot_report"
    if report.inputs.get(_MANIFEST) != manifest.fingerprint:
        return "its snapshot_report is of an earlier manifest"
    if report.code_version != STAGES[_REPORT].version:
        return "its snapshot_report is by another version of the code"
    return ""


def _fingerprint(store: Store, asset: str, snapshot: str, frozen: dict[str, str | None]) -> str | None:
    """The fingerprint that is published; those of global assets are looked up once."""
    if not STAGES[asset].partitioned and asset in frozen:
        return frozen[asset]
    published = store.published(asset, snapshot if STAGES[asset].partitioned else None)
    fingerprint = published.fingerprint if published else None
    if not STAGES[asset].partitioned:
        frozen[asset] = fingerprint
    return fingerprint


def unreported(store: Store, settings: Settings) -> dict[str, str]:
    """{snapshot: why the published selection_report does not speak of it as it is now}."""
    why = {name: reason for name, reason in standing(store, settings).items() if reason}
    published = store.published("selection_report")
    for name in store.snapshots(_MANIFEST):
        manifest = store.current(_MANIFEST, name)
        if published is None:
            why.setdefault(name, "nothing is reported yet")
        elif published.inputs.get(f"{_MANIFEST} {name}") != manifest.fingerprint:
            why.setdefault(name, "selected since the report was made")
    return why


def _sidecar(manifest: Published) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(manifest.file(SIDECAR).read_text("utf-8"))
    return told


def _selected(store: Store, snapshot: str) -> _Snapshot:
    manifest = store.current(_MANIFEST, snapshot)
    report = store.published(_REPORT, snapshot)
    current = report is not None and report.inputs.get(_MANIFEST) == manifest.fingerprint
    return _Snapshot(manifest, report if current else None)


def _make(run: Run, generation: Generation, found: Mapping[str, _Snapshot], waiting: Mapping[str, str]) -> None:
    frozen = run.store.current("kmeans_centroids")
    # clusters and vectors add up where they are of one k-means
    drawn = {
        name: one
        for name, one in found.items()
        if one.report is not None
        and one.report.code_version == STAGES[_REPORT].version
        and _sidecar(one.manifest)["fingerprints"]["kmeans_centroids"] == frozen.fingerprint
    }
    run.log(f"selection_report: {len(found)} snapshots, {len(drawn)} of them in the figures")
    cosines: dict[str, float | None] = {}
    left_out = sorted(found.keys() - drawn.keys())
    sections: list[Section] = []
    pictures: list[Figure] = []
    facts: dict[str, Any] = {"snapshots": len(found), "snapshots_in_figures": len(drawn), "waiting": len(waiting)}
    if drawn:
        centroids = read_centroids(frozen)
        # of selections to compare with, those that every snapshot has
        every = set.intersection(*(set(one.told()["numbers"]["selections"]) for one in drawn.values()))
        own = called(run.in_force.select.strategy)
        names = [own, *sorted(every - {own})]
        k, dimension = centroids.shape
        total = Numbers.empty(dimension, k, names)
        hosts: Counter[str] = Counter()
        kept_of_hosts: Counter[str] = Counter()
        for name, one in drawn.items():
            told = one.told()
            numbers = Numbers.from_dict(told["numbers"])
            cosines[name] = numbers.cosine("kept")
            total.add(numbers)
            for host in told["hosts"]["largest"]:
                hosts[host["host"]] += host["scored"]
                kept_of_hosts[host["host"]] += host["kept"]
        largest = [
            {"host": host, "scored": scored, "kept": kept_of_hosts[host]}
            for host, scored in sorted(hosts.items(), key=lambda item: (-item[1], item[0]))
        ]
        sample = merged(read_sample(one.report) for one in drawn.values() if one.report)
        empty = sample_schema(dimension).empty_table()
        found_in = strategies(empty if sample is None else sample, own)
        pictures = figures(_WHAT, total, found_in, centroids, largest, None)
        sections = [in_short(f"{_WHAT} of {len(drawn)} snapshots", total)]
        facts |= facts_of(total)
    sections += [
        ("Snapshots", _table(found, cosines), None),
        ("What is missing or stale", _waiting(waiting, left_out), None),
        ("How good the masks are", _worth(run, found), None),
        *(figure.section() for figure in pictures),
    ]
    write_json(generation.folder / NUMBERS, {"figures": write_figures(generation.folder, pictures), "facts": facts})
    write_page(
        generation.folder, f"What {called(run.in_force.select.strategy)} kept of {len(found)} snapshots", sections
    )


def _table(found: Mapping[str, _Snapshot], cosines: Mapping[str, float | None]) -> str:
    """A row for each snapshot. cosines: of what each keeps, where it is in the figures."""
    rows = []
    for name, one in found.items():
        facts, report = one.manifest.facts, one.report
        # a page beside this one, wherever the root lies
        there = f"../../{_REPORT}/{name}/{report.fingerprint}/{PAGE}{EXT}" if report else ""
        rows.append(
            {
                "snapshot": Markdown(f"[{name}]({there})") if there else name,
                "n": facts["n"],
                "kept": facts["kept"],
                "tokens": facts["tokens_kept"],
                "quality": _number(facts["quality_raw"], ".2f"),
                "cosine": _number(cosines.get(name), ".3f"),
                "value": _number(facts["value"], ".6f"),
                "gap": _number(facts["gap"], ".1e"),
                "share of gain": _number(facts["share"], ".2%"),
            }
        )
    return (
        "`n`: scored documents; `quality` and `cosine` are means over what is kept, of 15 and of two different "
        "documents; `value`, `gap` and `share of gain` are the certificate's, explained below. Each name leads to the "
        "snapshot's own page, with the documents themselves.\n\n" + markdown_table(rows, list(rows[0]))
    )


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _waiting(waiting: Mapping[str, str], left_out: list[str]) -> str:
    if not waiting:
        return "Nothing: every snapshot of the source is selected and reported as it is published now."
    rows = [{"snapshot": name, "why": why} for name, why in waiting.items()]
    text = "These snapshots are not here, or not as they are published now. Materialise them, and the report again."
    if left_out:
        text += f" Of the selected ones, the figures leave out: {', '.join(left_out)}."
    return f"{text}\n\n{markdown_table(rows, ['snapshot', 'why'])}"


def _worth(run: Run, found: Mapping[str, _Snapshot]) -> str:
    facts = [one.manifest.facts for one in found.values()]
    state = run.store.published(STATE) if run.settings.select.scope == "corpus" else None
    if state is not None:
        return certificate_in_words(state.facts, "the corpus as one pool")
    told = [fact for fact in facts if fact["gap"] is not None and fact["kept"]]
    if not told:
        return "No snapshot's mask has a bound to be compared with; each page says why."
    weight = sum(fact["kept"] for fact in told)
    gap = math.fsum(fact["kept"] * fact["gap"] for fact in told) / weight
    shares = [100 * fact["share"] for fact in told if fact["share"] is not None]
    text = (
        "Each snapshot was chosen from apart, and has a certificate of its own: no mask of its size from the same "
        f"documents is worth more than its value and its gap together. Weighted by what is kept, the gaps come to "
        f"**{gap:.1e}**"
    )
    if shares:
        text += (
            f"; of what choosing can gain over a uniform mask, the snapshots reach {min(shares):.2f} to "
            f"{max(shares):.2f} % (median {np.median(shares):.2f} %)"
        )
    return text + "."
