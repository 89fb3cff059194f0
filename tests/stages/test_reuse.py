"""A shard that lands costs its neighbours nothing that does not depend on it, and changes no byte."""

import shutil
from pathlib import Path

from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, write_shard
from tests.stages.conftest import copied, tree

SNAPSHOT = SNAPSHOTS[0]
PER_SHARD = ("dclm_scores", "edu_scores", "wiki_scores")


def test_scores_of_untouched_shards_are_taken_over(project: Project, labels: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(project.settings.source.url, source)
    mine = Project(settings_for(source, project.store.root, labels))
    clean = copied(mine, tmp_path / "clean")
    before = mine.full(SNAPSHOT)
    write_shard(source, SNAPSHOT, "002_00000", 5)
    after = mine.full(SNAPSHOT)
    for name in PER_SHARD:
        old, new = before[name].published, after[name].published
        assert old is not None
        assert new is not None
        assert old.fingerprint != new.fingerprint
        assert new.path("000_00000").samefile(old.path("000_00000"))
        assert new.rows == 70
    once = clean.full(SNAPSHOT)
    for name, outcome in after.items():
        assert outcome.published is not None
        assert once[name].published is not None
        assert tree(outcome.published.folder) == tree(once[name].published.folder), name


def test_embeddings_of_all_rows_do_not_follow_the_pruning_cut(project: Project) -> None:
    every = project.with_settings(**{"embed.documents": "all"})
    first = every.full(SNAPSHOT)["e5_embeddings"].published
    pruned = every.with_settings(**{"prune.ratio": 0.2})
    pruned.fit_global()
    second = pruned.full(SNAPSHOT)["e5_embeddings"].published
    assert first is not None
    assert second is not None
    assert first.fingerprint != second.fingerprint
    assert second.path("000_00000").samefile(first.path("000_00000"))
