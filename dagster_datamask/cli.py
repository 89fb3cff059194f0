"""The `datamask` command. Results go to stdout (`--json`: one object), everything else to stderr.

Each command reads settings, calls one function and prints; exit code 2 for input that cannot be worked with, in one
line, and 1 for runs that failed.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dagster_datamask.accelerator import resolve
from dagster_datamask.redaction import redact_logs, redacted, write_error
from dagster_datamask.settings import Settings, SettingsError, load_settings, parse_objective

if TYPE_CHECKING:
    from dagster_datamask.running import SnapshotRun

app = typer.Typer(
    name="datamask",
    help="Select pre-training data by quality and diversity, with a certificate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)

Config = Annotated[Path | None, typer.Option(help="Settings file; default $DATAMASK_CONFIG or ./datamask.toml.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: --set select.lambda=0.3")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main() -> None:
    """Entry point of the command."""
    # a fork after torch has started threads is Hugging Face's to warn about, and there is none here
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=UserWarning, module="dagster")
    redact_logs()
    try:
        app()
    except Exception as error:
        # a defect, or an error of some library: where it happened belongs to who tells of it
        write_error(error)
        sys.exit(1)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn errors of input into one line on stderr and exit code 2."""
    from dagster_datamask.demo.layout import ExportError
    from dagster_datamask.failures import EXPECTED

    try:
        yield
    except (*EXPECTED, ExportError, OSError) as error:
        _err.print(f"datamask: {_in_one_line(error)}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(2) from error


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return redacted(f"{error.filename}: {error.strerror}")
    return redacted(str(error))


def _settings(config: Path | None, overrides: list[str] | None, **given: str | None) -> Settings:
    named = [f"{key.replace('__', '.')}={value}" for key, value in given.items() if value is not None]
    return load_settings(config, [*(overrides or []), *named])


def _print(result: dict[str, Any], as_json: bool, show: Callable[[], None]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    else:
        show()


@app.command()
def run(
    source: Annotated[str | None, typer.Option(help="Folder or URL with data/<snapshot>/*.parquet.")] = None,
    root: Annotated[str | None, typer.Option(help="Folder for the results.")] = None,
    snapshots: Annotated[str, typer.Option(help="Snapshots, separated by commas; default all.")] = "",
    limit: Annotated[int | None, typer.Option(help="Keep this many documents in all, by keyed hash.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be read and what it costs.")] = False,
    config: Config = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Materialise snapshots through Dagster, without the UI; the runs appear there all the same."""
    with _one_line_errors():
        settings = _settings(config, set_, source__url=source, storage__root=root)
        result = _run(settings, [s.strip() for s in snapshots.split(",") if s.strip()], limit, dry_run)
    _print(result, as_json, lambda: _show_run(result, dry_run))
    if not dry_run and any(not r["success"] for r in result["runs"]):
        raise typer.Exit(1)


def _run(settings: Settings, asked: list[str], limit: int | None, dry: bool, stages: bool = False) -> dict[str, Any]:
    import dagster as dg

    from dagster_datamask import running
    from dagster_datamask.resources.storage import StorageResource
    from dagster_datamask.shards.source import Source
    from dagster_datamask.stages.freshness import unfitted

    source = Source(settings.source.url)
    snapshots = running.chosen_snapshots(source, asked, lambda text: _err.print(text, style="yellow", highlight=False))
    if dry:
        return running.dry_run(settings, source, snapshots)
    store = StorageResource.from_settings(settings).store()
    if limit is not None:
        settings = running.limited(settings, source, snapshots, limit)
    running.refuse_narrowing(store, settings, snapshots)
    # a model that cannot be had is found here, before anything is written
    unfitted(store, settings, source)
    home = running.dagster_home()
    stages = stages or settings.select.strategy in ("group_mates", "joint")

    with dg.DagsterInstance.from_config(str(home)) as instance:
        running.free_dead_slots(instance, lambda text: _err.print(text, style="yellow", highlight=False))
        runs = running.materialise(settings, source, snapshots, instance, _told, stages=stages)
    return {
        "root": store.where,
        "runs": [asdict(run) for run in runs],
        "snapshots": running.summary(store, snapshots),
        "group_mates": running.staged_summary(store, settings, snapshots) if stages else [],
    }


def _told(done: "SnapshotRun") -> None:
    if done.success:
        _err.print(f"{done.name}: done in {sum(done.seconds.values()):.1f} s", style="green", highlight=False)
    else:
        _err.print(f"{done.name} failed: {done.failure}", style="red", highlight=False, soft_wrap=True, markup=False)


def _show_run(result: dict[str, Any], dry: bool) -> None:
    from dagster_datamask.reporting.tables import human, summary_table

    if dry:
        _out.print_json(json.dumps(result))
        return
    rows = [{"readable": row["readable_rows"], **row} for row in result["snapshots"]]
    for row in result["group_mates"]:
        _out.print(_stage_in_words(row), soft_wrap=True, highlight=False)
    if rows:
        _out.print(summary_table(rows))
        kept = sum(row["kept"] for row in rows)
        _out.print(f"{human(kept)} documents kept; results under {result['root']}/fineweb_mask", soft_wrap=True)


def _stage_in_words(row: dict[str, Any]) -> str:
    """What a stage of Group-MATES chose, and what it did to the model."""
    before, after = row["held_out_loss_before"], row["held_out_loss_after"]
    learnt = "" if before is None else f"; held-out loss {before:.3f} before training on them, {after:.3f} after"
    return (
        f"Group-MATES, stage {row['stage']}: {row['chosen']} documents, {row['also_in_datamask']} of them in "
        f"DataMask's mask too{learnt}. Predicted influence (lower is better): {row['influence_kept']:.2f} on average, "
        f"{row['influence_of_pool']:.2f} over all there were to choose from; it alone would choose "
        f"{row['by_influence_alone']:.0%} of them, the others were taken for being unlike those before."
    )


@app.command()
def demo(
    source: Annotated[
        str, typer.Option(help="docs: documentation installed with this project; hf: a piece of FineWeb from the hub.")
    ] = "docs",
    folder: Annotated[Path, typer.Option(help="Where the demo's documents and results go.")] = Path(".demo"),
    export_only: Annotated[bool, typer.Option("--export-only", help="Write the documents and stop.")] = False,
    as_json: Json = False,
) -> None:
    """The main job on real text, with models that need no hub: documents, scores, mask, manifest, report; and beside
    it a stage of Group-MATES with a small language model."""
    from dagster_datamask.demo.corpus import export_corpus
    from dagster_datamask.demo.hub import export_fineweb_sample

    with _one_line_errors():
        if source not in ("docs", "hf"):
            raise SettingsError(f"--source {source!r} is none of: docs, hf")
        folder = folder.resolve()
        _err.print("writing the demo's documents from what is installed ...", highlight=False)
        corpus = export_corpus(folder / "source")
        given = ["profile=demo", f"source.url={folder / 'source'}", f"storage.root={folder / 'root'}"]
        labels = folder / "source" / "labels"
        given += [f"score.{part}_labels={labels / part}.parquet" for part in ("dclm", "wiki", "edu")]
        given += [f"group_mates.{name}={labels / 'edu'}.parquet" for name in ("reference", "held_out")]
        if source == "hf":
            corpus = export_fineweb_sample(folder / "fineweb")
            given += [f"source.url={folder / 'fineweb'}", f"storage.root={folder / 'root_fineweb'}"]
            given += ["models.encoder=intfloat/e5-base-v2"]
        _err.print(f"{corpus.documents:,} documents in {len(corpus.rows)} snapshots", highlight=False)
        if export_only:
            _print(asdict(corpus), as_json, lambda: None)
            return
        settings = load_settings(_demo_config(folder), given, env={})
        result = _run(settings, [], None, False, stages=True)
        result["report"] = _report(settings) if result["snapshots"] else None
    _print(result, as_json, lambda: _show_demo(result))
    if any(not r["success"] for r in result["runs"]):
        raise typer.Exit(1)


def _demo_config(folder: Path) -> Path:
    """The project's own datamask.toml where the demo runs in it, so that the UI shows what the demo made."""
    beside = folder.parent / "datamask.toml"
    return beside if beside.exists() else Path(os.devnull)


def _report(settings: Settings) -> str | None:
    """The page over all snapshots, made by the job report; None where it failed."""
    import dagster as dg

    from dagster_datamask import running
    from dagster_datamask.resources.storage import StorageResource

    with dg.DagsterInstance.from_config(str(running.dagster_home())) as instance:
        done = running.report_all(settings, instance)
    if not done.success:
        _err.print(f"report failed: {done.failure}", style="red", highlight=False, soft_wrap=True, markup=False)
        return None
    published = StorageResource.from_settings(settings).store().current("selection_report")
    return str(published.path(published.shards[0]))


def _show_demo(result: dict[str, Any]) -> None:
    _show_run(result, False)
    if result["report"]:
        _out.print(f"figures: {result['report']}", soft_wrap=True, highlight=False)
        _out.print("next: `make dev` opens the Dagster UI on these results", highlight=False)


Budget = Annotated[str, typer.Option(help="'10%' of the documents, a number of them, or tokens: '2e9tok'.")]
Quota = Annotated[
    str | None, typer.Option(help="Column whose values share the budget in proportion to their documents.")
]
Columns = Annotated[str, typer.Option(help="Other names: id=doc_id,score=quality,embedding=vector,token_count=tokens")]
Objective = Annotated[
    str,
    typer.Option(
        help="Diversity: pws | facility_location | disf | disf_second_moment, or a sum: pws=0.7,facility_location=0.3"
    ),
]
Scale = Annotated[str, typer.Option(help="Scale of quality: per_pool | zscore | raw")]
Seed = Annotated[int, typer.Option(help="Seed of every draw.")]
Device = Annotated[str, typer.Option(help="auto | cpu | cuda:i")]


@app.command()
def solve(
    documents: Annotated[Path, typer.Argument(help="Parquet or Arrow file: id, score, embedding[, token_count].")],
    budget: Budget = "10%",
    lam: Annotated[float, typer.Option("--lambda", help="Weight of quality; 1 - lambda is diversity's.")] = 0.5,
    objective: Objective = "pws",
    solver: Annotated[
        str,
        typer.Option(
            help="certified | policy_gradient | greedy | conditional_gradient (disf) | top_k | random | semdedup | dvrl"
        ),
    ] = "certified",
    scale: Scale = "per_pool",
    quota: Quota = None,
    out: Annotated[Path | None, typer.Option(help="Where the mask goes (.parquet or .arrow).")] = None,
    columns: Columns = "",
    seed: Seed = 0,
    steps: Annotated[int | None, typer.Option(help="Steps of policy_gradient (10,000) or dvrl (2,000).")] = None,
    group: Annotated[int | None, typer.Option(help="Masks a step, policy_gradient or dvrl (128).")] = None,
    lr: Annotated[float | None, typer.Option(help="Step of the logits (10), or dvrl's learning rate (0.003).")] = None,
    batch: Annotated[float | None, typer.Option(help="Share of the pool in a step (0.05); dvrl: documents.")] = None,
    gradient: Annotated[str | None, typer.Option(help="policy_gradient: independent | ordered")] = None,
    variant: Annotated[str | None, typer.Option(help="greedy: lazy | stochastic | lazier")] = None,
    clusters: Annotated[int | None, typer.Option(help="semdedup: clusters that are searched (root of N).")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Select from one file of ids, scores and embeddings, and certify the choice."""
    from dagster_datamask.selection.files import solve_file

    given = {
        name: value
        for name, value in {
            "steps": steps,
            "group": group,
            "lr": lr,
            "batch": batch,
            "gradient": gradient,
            "variant": variant,
            "clusters": clusters,
        }.items()
        if value is not None
    }
    with _one_line_errors(), _progress(f"{solver}") as progress:
        result = solve_file(
            documents,
            out,
            budget=budget,
            lam=lam,
            solver=solver,
            scale=scale,
            seed=seed,
            columns=_renamed(columns),
            diversity=parse_objective(objective),
            quota=quota,
            accelerator=resolve(device),
            progress=progress,
            options=_solver_options(solver, given),
        )
    _print(result, as_json, lambda: _show_facts(result))


def _solver_options(solver: str, given: dict[str, Any]) -> Any:
    """The solver's options with those that were given, or None for its defaults."""
    from dagster_datamask.selection.solve import OPTIONS

    kind = OPTIONS.get(solver)
    for name in given:
        if kind is None or name not in {f.name for f in fields(kind)}:
            knowing = [other for other, options in OPTIONS.items() if name in {f.name for f in fields(options)}]
            raise SettingsError(f"--{name} is an option of {', '.join(knowing)}, not of {solver}")
    if solver == "dvrl" and "batch" in given:
        given["batch"] = int(given["batch"])
    return kind(**given) if kind is not None and given else None


def _renamed(columns: str) -> dict[str, str]:
    return dict(_pair(item) for item in columns.split(",") if item)


def _pair(item: str) -> tuple[str, str]:
    name, sign, value = item.partition("=")
    if not sign:
        raise SettingsError(f"--columns {item!r} is not of the form id=name")
    return name.strip(), value.strip()


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int, dict[str, Any]], None]]:
    # gone once the result or an error is there, and never in a log
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_err,
        transient=True,
        disable=not _err.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)

        def told(entry: dict[str, Any]) -> str:
            return f"{entry['value']:.6f}" if "value" in entry else ""

        def progress(step: int, steps: int, entry: dict[str, Any]) -> None:
            bar.update(task, completed=step, total=steps, description=f"{what} {told(entry)}")

        yield progress


def _show_facts(facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for name, value in facts.items():
        if value is not None and not isinstance(value, dict):
            table.add_row(name, Text(f"{value:,.9g}" if isinstance(value, float) else str(value)))
    _out.print(table)


@app.command()
def sweep(
    documents: Annotated[Path, typer.Argument(help="Parquet or Arrow file: id, score, embedding.")],
    lam: Annotated[
        str, typer.Option("--lambda", help="0,0.1,0.5 | 0:1:0.05 | 0,0.05,…,1: the weights of quality.")
    ] = "0:1:0.05",
    budget: Budget = "10%",
    objective: Objective = "pws",
    solver: Annotated[str, typer.Option(help="As for solve; bounds are proven whatever the solver.")] = "certified",
    scale: Scale = "per_pool",
    quota: Quota = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder, or .csv, .parquet or .png (table and figure), or .html (both in one).")
    ] = None,
    columns: Columns = "",
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """The certified front of quality against diversity: a mask for each lambda, and what no mask can reach."""
    from dagster_datamask.selection.sweep import parse_lambdas, sweep_file

    with _one_line_errors():
        written = [] if out is None else _sweep_files(out)
        with _progress(f"{solver}") as progress:
            result = sweep_file(
                documents,
                parse_lambdas(lam),
                budget=budget,
                scale=scale,
                solver=solver,
                seed=seed,
                columns=_renamed(columns),
                diversity=parse_objective(objective),
                quota=quota,
                accelerator=resolve(device),
                progress=progress,
            )
        for path in written:
            _write_sweep(path, result)
        result["out"] = [str(path) for path in written]
    _print(result, as_json, lambda: _show_sweep(result))


def _sweep_files(out: Path) -> list[Path]:
    """The files that `--out` asks for."""
    beside = {".csv": ".png", ".parquet": ".png", ".png": ".csv", ".html": None}
    if out.suffix in beside:
        other = beside[out.suffix]
        return [out] if other is None else [out, out.with_suffix(other)]
    if out.suffix and not out.is_dir():
        raise SettingsError(f"--out {out}: name a folder or a file that ends in {', '.join(beside)}")
    return [out / "sweep.csv", out / "sweep.png"]


def _write_sweep(path: Path, result: dict[str, Any]) -> None:
    import polars as pl

    from dagster_datamask.reporting.figures import front_figure
    from dagster_datamask.reporting.html import self_contained_page
    from dagster_datamask.reporting.tables import markdown_table
    from dagster_datamask.shards.writer import atomic

    rows = result["rows"]
    table = pl.DataFrame(rows, infer_schema_length=None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temp:
        if path.suffix == ".csv":
            table.write_csv(temp)
        elif path.suffix == ".parquet":
            table.write_parquet(temp)
        elif path.suffix == ".png":
            temp.write_bytes(front_figure(rows, result["uniform"]))
        else:
            what = f"{result['budget']:,} of {result['n']:,} documents; scale {result['scale']}, {result['solver']}"
            section = ("Front", f"{what}\n\n{markdown_table(rows, list(rows[0]))}")
            png = front_figure(rows, result["uniform"])
            temp.write_text(self_contained_page("Quality against diversity", [(*section, png)]), "utf-8")


def _show_sweep(result: dict[str, Any]) -> None:
    from dagster_datamask.reporting.tables import sweep_table

    _out.print(sweep_table(result["rows"], f"{result['budget']:,} of {result['n']:,} documents, for each λ"))
    if result["out"]:
        _out.print(f"written: {', '.join(result['out'])}", soft_wrap=True, highlight=False)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="Mask file, generation, or a snapshot's folder of masks or manifests.")],
    b: Annotated[Path, typer.Argument(help="What to compare it with.")],
    out: Annotated[Path | None, typer.Option(help="Where every changed document goes (.parquet or .csv).")] = None,
    as_json: Json = False,
) -> None:
    """Which documents two selections decide differently, and why."""
    from dagster_datamask.selection.diff import diff as compare

    with _one_line_errors():
        result = compare(a, b, out)
    _print(result, as_json, lambda: _show_diff(result))


def _show_diff(result: dict[str, Any]) -> None:
    from dagster_datamask.reporting.tables import diff_table

    def say(text: str) -> None:
        _out.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"A: {result['a']}\nB: {result['b']}")
    nested = ("a", "b", "decisions", "causes", "changes", "out")
    _show_facts({key: value for key, value in result.items() if key not in nested})
    for flow in result["decisions"]:
        if flow["a"] != flow["b"]:
            say(f"{flow['documents']:,}: {flow['a'] or 'absent'} in A, {flow['b'] or 'absent'} in B")
    for cause in result["causes"] or ():
        say(f"{cause['kind']} {cause['name']}: {cause['a']} in A, {cause['b']} in B")
    shown, changed = result["changes"], result["changed"]
    if shown:
        rest = "" if len(shown) == changed else f", the first {len(shown)}; --out FILE receives them all"
        _out.print(diff_table(shown, f"{changed:,} documents decided differently{rest}"))
    if result["out"]:
        say(f"written: {result['out']}")


@app.command()
def apply(
    manifest: Annotated[Path, typer.Argument(help="Exported folder, its ids, or a generation of manifests.")],
    source: Annotated[str, typer.Argument(help="Folder or URL with data/<snapshot>/*.parquet: what you hold.")],
    out: Annotated[Path, typer.Option(help="Folder for the kept documents, in the source's layout.")],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Write what is there where the source lacks documents.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The kept documents of a source, by their ids."""
    from dagster_datamask.shards.source import Source
    from dagster_datamask.stages.apply import apply_manifest

    def told(text: str) -> None:
        _err.print(text, highlight=False, markup=False, soft_wrap=True)

    with _one_line_errors():
        result = apply_manifest(manifest, Source(source), out, allow_missing=allow_missing, log=told)
    _print(result, as_json, lambda: _show_applied(result))
    if result["missing"] and not allow_missing:
        told(
            f"{result['missing']:,} documents are not in {source}, so none is written; --allow-missing writes the rest"
        )
        raise typer.Exit(1)


def _show_applied(result: dict[str, Any]) -> None:
    def say(text: str) -> None:
        _out.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{result['rows']:,} documents of {result['wanted']:,} written to {result['out']}")
    for what in ("missing", "duplicates"):
        if result[what]:
            first = result[f"{what}_named"][0]
            say(f"{what}: {result[what]:,}, all in {what}.parquet; the first: {first['doc_id']} of {first['snapshot']}")
    for shard, why in result["unreadable_shards"].items():
        say(f"unreadable: {shard} {why}")
    if result["by_place"]:
        say(f"{result['by_place']:,} documents have no id and were found by shard and row alone")


_SHOWN_ROWS = 50


@app.command()
def sql(
    query: Annotated[str | None, typer.Argument(help="One SELECT; without it, the views and their columns.")] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the results.")] = None,
    config: Config = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Ask DuckDB about what is published: manifest, masks, scores, clusters, embeddings, kept documents."""
    from dagster_datamask.resources.storage import StorageResource
    from dagster_datamask.stages.sql import query as ask

    with _one_line_errors():
        store = StorageResource.from_settings(_settings(config, set_, storage__root=root)).store()
        answer = ask(store, query, None if as_json or query is None else _SHOWN_ROWS)
    result = {"columns": answer.columns, "rows": answer.rows}
    _print(result, as_json, lambda: _show_rows(result, answer.count))


def _show_rows(result: dict[str, Any], count: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in result["columns"]:
        table.add_column(Text(name), overflow="fold")
    for row in result["rows"]:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    _out.print(table)
    shown = len(result["rows"])
    _out.print(
        f"{count:,} rows" + ("" if shown == count else f", the first {shown}; --json prints all"), highlight=False
    )


@app.command()
def doctor(config: Config = None, set_: Set = None, as_json: Json = False) -> None:
    """What is installed, which device, which models and which documents can be reached."""
    from dagster_datamask.doctor import examine

    with _one_line_errors():
        result = examine(_settings(config, set_))
    _print(result, as_json, lambda: _show_doctor(result))


def _show_doctor(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("what", "state", "", title="datamask doctor", title_justify="left")
    for row in result["checks"]:
        style = {"ok": "green", "missing": "red", "note": "yellow"}[row["state"]]
        table.add_row(row["what"], f"[{style}]{row['state']}[/{style}]", row["detail"])
    _out.print(table)


@app.command()
def gc(
    keep: Annotated[int, typer.Option(help="Generations to keep of each asset and snapshot.")] = 2,
    root: Annotated[str | None, typer.Option(help="Folder of the results.")] = None,
    config: Config = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Remove old generations; what is published, or was made use of, stays."""
    from dagster_datamask.resources.storage import StorageResource

    with _one_line_errors():
        store = StorageResource.from_settings(_settings(config, set_, storage__root=root)).store()
        removed = store.gc(keep)
    result = {"removed": [path for path, _ in removed], "bytes": sum(size for _, size in removed)}
    _print(result, as_json, lambda: _out.print(f"{len(removed)} generations removed, {result['bytes']:,} bytes freed"))


if __name__ == "__main__":
    main()
