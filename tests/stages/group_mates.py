"""A language model of a few thousand weights, and the stages of Group-MATES on the small project, one by one."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.stages import group_selection, influence, language_model, rollouts
from dagster_datamask.stages.base import Outcome
from tests.conftest import SNAPSHOTS
from tests.project import Project, text_of

TINY = (
    *("group_mates.vocabulary=300", "group_mates.layers=1", "group_mates.width=32", "group_mates.heads=2"),
    *("group_mates.context=32", "group_mates.warmup_documents=20", "group_mates.warmup_steps=20"),
    *("group_mates.batch=4", "group_mates.continue_steps=5", "group_mates.reference_documents=4"),
    *("group_mates.trajectories=12", "group_mates.bootstrap_trajectories=8", "group_mates.steps=3", "group_mates.k=2"),
    *("group_mates.influence_width=8", "group_mates.epochs=3", "group_mates.validation=0.4"),
    *("group_mates.clusters=4", "group_mates.stages=2"),
)


def write_reference(path: Path) -> Path:
    """Texts that no document of the small project has."""
    pq.write_table(pa.table({"text": [text_of(f"reference {k}") for k in range(16)]}), path)
    return path


def tiny(reference: Path, *overrides: str) -> tuple[str, ...]:
    """Overrides for Group-MATES in seconds; held-out rows come out of the same file."""
    return (*TINY, f"group_mates.reference={reference}", f"group_mates.held_out={reference}", *overrides)


def run_stage(project: Project, name: str, snapshot: str = "") -> Outcome:
    """An asset of Group-MATES by its name."""
    run, source = project.run(), project.source
    folder, _, kind = name.rpartition("/")
    number = int(folder.removeprefix("stage_") or 0)
    steps = {
        "warmup_model": lambda: language_model.warmup_model(run, source),
        "rollout_sets": lambda: rollouts.rollout_sets(run, number),
        "influence_model": lambda: influence.influence_model(run, number),
        "influence_scores": lambda: influence.stage_scores(run, source, snapshot, number),
        "group_mates_selection": lambda: group_selection.stage_selection(run, source, snapshot, number),
        "continued_model": lambda: language_model.continued_model(run, source, number),
        "all influence_scores": lambda: influence.influence_scores(run, snapshot),
        "all group_mates_selection": lambda: group_selection.group_mates_selection(run, snapshot),
    }
    of_all = not folder and kind != "warmup_model"
    return steps[f"all {kind}" if of_all else kind]()


def through_stages(project: Project, snapshots: tuple[str, ...] = SNAPSHOTS) -> dict[str, Outcome]:
    """All of Group-MATES on these embedded snapshots; {asset, of a snapshot with its name behind: outcome}."""
    done = {"warmup_model": run_stage(project, "warmup_model")}
    for number in range(1, project.settings.group_mates.stages + 1):
        prefix = f"stage_{number}/"
        for kind in ("rollout_sets", "influence_model"):
            done[f"{prefix}{kind}"] = run_stage(project, f"{prefix}{kind}")
        for snapshot in snapshots:
            for kind in ("influence_scores", "group_mates_selection"):
                done[f"{prefix}{kind} {snapshot}"] = run_stage(project, f"{prefix}{kind}", snapshot)
        done[f"{prefix}continued_model"] = run_stage(project, f"{prefix}continued_model")
    for snapshot in snapshots:
        for kind in ("influence_scores", "group_mates_selection"):
            done[f"{kind} {snapshot}"] = run_stage(project, kind, snapshot)
    return done


def on_a_copy(project: Project, root: Path, *without: str) -> Project:
    """The same project on a copy of its root, without some assets."""
    shutil.copytree(project.store.root, root, ignore=lambda folder, names: set(without) & set(names))
    return project.with_settings(**{"storage.root": str(root)})
