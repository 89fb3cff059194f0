from pathlib import Path

import fasttext
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.text import NO_TOKENS, NULL_TEXT, SURROGATES
from dagster_datamask.scoring.training import train_fasttext

from .conftest import labelled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fasttext")
    texts, labels = labelled(120)
    train_fasttext(texts, labels, folder / "two.bin", seed=1, dim=8)
    train_fasttext(texts, labels, folder / "two.ftz", seed=1, dim=8)
    source = folder / "three.txt"
    source.write_text(
        "".join(
            f"__label__{label} {text} {text}\n"
            for label, text in [("a", "red apple"), ("b", "blue sky"), ("c", "green grass")] * 40
        )
    )
    options = {"input": str(source), "dim": 8, "epoch": 20, "thread": 1, "verbose": 0, "bucket": 500}
    fasttext.train_supervised(**options).save_model(str(folder / "three.bin"))
    fasttext.train_supervised(**options, loss="hs").save_model(str(folder / "softmax_tree.bin"))
    fasttext.train_supervised(**options, minn=3, maxn=4).save_model(str(folder / "subwords.bin"))
    sure = fasttext.train_supervised(**(options | {"lr": 1.0, "epoch": 200}))
    sure.save_model(str(folder / "sure.bin"))
    pruned = fasttext.train_supervised(**options, wordNgrams=2)
    pruned.quantize(input=str(source), cutoff=300, qnorm=True, thread=1, verbose=0)
    pruned.save_model(str(folder / "pruned.ftz"))
    fasttext.train_unsupervised(str(source), dim=4, minCount=1, thread=1, verbose=0, bucket=100).save_model(
        str(folder / "vectors.bin")
    )
    return folder


@pytest.mark.parametrize("name", ["two.bin", "two.ftz"])
def test_it_separates_what_it_was_trained_on(folder: Path, name: str) -> None:
    batch = FastTextScorer(folder / name, "hq").score(["the theorem follows", "buy cheap pills now"])
    assert batch.reasons == [None, None]
    assert batch.scores[0] > 0.9 and batch.scores[1] < 0.1


def raw_probability(path: Path, line: str, label: str) -> float:
    """What the library itself says of one line."""
    labels, probabilities = fasttext.load_model(str(path)).predict(line, k=-1)
    return float(dict(zip(labels, probabilities, strict=True))[f"__label__{label}"])


@pytest.mark.parametrize("label", ["hq", "wiki"])
def test_dclm_and_the_wiki_reference_read_a_text_as_one_line(tmp_path: Path, label: str) -> None:
    texts, labels = labelled(120)
    train_fasttext(texts, labels, tmp_path / "m.bin", positive_label=label, seed=1, dim=8)
    text = "  The theorem\u2028follows\r\nbuy cheap\n\npills now \n"
    expected = raw_probability(tmp_path / "m.bin", "The theorem follows buy cheap  pills now", label)
    assert FastTextScorer(tmp_path / "m.bin", label).score([text]).scores.tolist() == [expected]
    assert raw_probability(tmp_path / "m.bin", "Thetheoremfollows buy cheap pills now", label) != expected


def test_ultra_fineweb_reads_lower_case_tokens_and_escapes(tmp_path: Path, minilm_path: Path) -> None:
    texts, labels = labelled(120)
    form = {"normaliser": "ultra_fineweb", "tokenizer": minilm_path / "tokenizer.json"}
    model = tmp_path / "m.bin"
    report = train_fasttext(texts, labels, model, positive_label="pos", negative_label="neg", seed=1, dim=8, **form)
    assert report.settings["normaliser"] == "ultra_fineweb"
    scorer = FastTextScorer(model, "pos", **form)
    # MiniLM's own splitting drops white space, so what it would escape is not there
    text = "The Th\u00e9orem\n\n\nfollows from\tunmitosis"
    line = "the theorem follows from un ##mit ##osis"
    assert scorer.score([text]).scores.tolist() == [raw_probability(model, line, "pos")]
    assert scorer.describe()["normaliser"] == "ultra_fineweb"
    assert scorer.describe()["tokenizer"].startswith("blake2b:")
    assert str(minilm_path) not in str(scorer.describe())


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_rows(folder: Path, n: int) -> None:
    batch = FastTextScorer(folder / "two.bin", "hq").score(["the theorem", "cheap pills"][:n])
    assert batch.scores.shape == (n,) and batch.scores.dtype == np.float64 and batch.reasons == [None] * n


def test_label_spelling_and_unknown_label(folder: Path) -> None:
    short, full = (FastTextScorer(folder / "two.bin", label) for label in ("hq", "__label__hq"))
    assert short.score(["the theorem"]).scores == full.score(["the theorem"]).scores
    with pytest.raises(ValueError, match=r"'wiki'.*__label__cc, __label__hq"):
        FastTextScorer(folder / "two.bin", "wiki")


@pytest.mark.parametrize("name", ["three.bin", "softmax_tree.bin"])
def test_with_three_labels_the_probability_is_the_labels_own(folder: Path, name: str) -> None:
    texts = ["red apple", "blue sky", "green grass", "red sky grass"]
    by_label = np.array([FastTextScorer(folder / name, label).score(texts).scores for label in "abc"])
    assert by_label[:, :3].argmax(axis=0).tolist() == [0, 1, 2]
    np.testing.assert_allclose(by_label.sum(axis=0), 1, atol=1e-3)
    assert (by_label[0, 3] - (1 - by_label[1, 3])) ** 2 > 1e-6


def test_texts_without_score(folder: Path) -> None:
    # fastText itself answers every one of these
    nothing = ["", "  \n", "qqq zzz", "qqq", "__label__hq", "</s> the theorem", "\u00a0", "\x00"]
    raw = fasttext.load_model(str(folder / "two.bin")).predict(["", "qqq zzz", "qqq"], k=-1)[1]
    assert all(len(probabilities) == 2 for probabilities in raw)
    batch = FastTextScorer(folder / "two.bin", "hq").score([None, *nothing, "qqq theorem"])
    assert batch.reasons == [NULL_TEXT, *[NO_TOKENS] * len(nothing), None]
    assert np.isnan(batch.scores[:-1]).all() and np.isfinite(batch.scores[-1])


def test_unknown_words_of_a_subword_model_count_by_their_character_ngrams(folder: Path) -> None:
    scorer = FastTextScorer(folder / "subwords.bin", "a")
    # "<redder>" shares n-grams with "<red>"; a free-standing label mark has none
    batch = scorer.score(["redder", "__label__a", "</s>"])
    assert batch.reasons == [None, NO_TOKENS, NO_TOKENS]
    assert batch.scores[0] > 0.5


def test_scores_do_not_depend_on_how_lines_are_broken(folder: Path) -> None:
    scorer = FastTextScorer(folder / "two.bin", "hq")
    marks = ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
    scores = scorer.score([f"the theorem{mark}buy cheap{mark}" for mark in [" ", *marks]]).scores
    assert (scores == scores[0]).all()


def test_the_last_line_counts(folder: Path) -> None:
    scorer = FastTextScorer(folder / "two.bin", "hq")
    one, both = scorer.score(["the theorem", "the theorem\nbuy cheap pills now"]).scores
    assert both < one


def test_surrogates_are_replaced_and_counted(folder: Path) -> None:
    batch = FastTextScorer(folder / "two.bin", "hq").score(["the theorem \ud800", "the theorem \ufffd"])
    assert batch.scores[0] == batch.scores[1] and batch.notes == {SURROGATES: 1}


def test_probabilities_are_clamped(folder: Path) -> None:
    text = "red apple " * 50
    raw = fasttext.load_model(str(folder / "sure.bin")).predict([text], k=-1)[1][0].max()
    assert raw > 1
    assert FastTextScorer(folder / "sure.bin", "a").score([text]).scores[0] == 1.0


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.none() | st.text(st.characters() | st.sampled_from("the \n\x85"), max_size=20), max_size=5))
def test_any_text_has_a_score_or_a_reason(folder: Path, texts: list[str | None]) -> None:
    scorer = FastTextScorer(folder / "two.bin", "hq")
    batch = scorer.score(texts)
    alone = [scorer.score([text]) for text in texts]
    np.testing.assert_array_equal(batch.scores, np.array([one.scores[0] for one in alone]))
    assert all((reason is None) == (0 <= score <= 1) for reason, score in zip(batch.reasons, batch.scores, strict=True))


def test_what_is_no_classifier(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.bin"):
        FastTextScorer(tmp_path / "none.bin", "hq")
    (tmp_path / "junk.bin").write_bytes(b"junk and more")
    with pytest.raises(ValueError, match=r"junk\.bin: not a fastText model"):
        FastTextScorer(tmp_path / "junk.bin", "hq")
    (tmp_path / "junk.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"junk\.bin: an empty file"):
        FastTextScorer(tmp_path / "junk.bin", "hq")
    with pytest.raises(ValueError, match="unsupervised"):
        FastTextScorer(folder / "vectors.bin", "hq")
    with pytest.raises(ValueError, match="'none' is none of: dclm"):
        FastTextScorer(folder / "two.bin", "hq", normaliser="none")


@pytest.mark.parametrize("name", ["two.bin", "two.ftz", "subwords.bin", "pruned.ftz"])
def test_a_model_cut_short_is_told_and_not_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    raw = (folder / name).read_bytes()
    cut = tmp_path / name
    for size in (4, 9, 70, 95, 200, len(raw) // 3, len(raw) // 2, len(raw) - 20, len(raw) - 1):
        cut.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=f"cut short at {size} bytes; fetch the model again"):
            FastTextScorer(cut, "hq")
    cut.write_bytes(raw)
    assert FastTextScorer(cut, "hq" if name.startswith("two") else "a").labels


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["the", "qqq", "cheap", "</s>", "__label__hq", "\t", "\x00", "\u00a0", "é"]), max_size=6)
)
def test_known_tokens_are_fasttexts_own(folder: Path, tokens: list[str]) -> None:
    model = fasttext.load_model(str(folder / "two.bin"))
    words = model.get_line(" ".join(tokens).strip())[0]
    known = any(word in model and word != "</s>" for word in words)
    (reason,) = FastTextScorer(folder / "two.bin", "hq").score([" ".join(tokens)]).reasons
    assert (reason is None) == known


def test_description(folder: Path) -> None:
    told = FastTextScorer(folder / "two.ftz", "hq").describe()
    assert told["positive_label"] == "__label__hq" and told["normaliser"] == "dclm" and told["quantised"] is True
    assert told["revision"].startswith("blake2b:") and told["dimension"] == 8
    assert str(folder) not in str(told)


def test_a_document_of_50_mb(folder: Path) -> None:
    scorer = FastTextScorer(folder / "two.bin", "hq")
    text = "the theorem follows from the lemma\n" * (50_000_000 // 35)
    assert len(text) > 49_000_000
    batch = scorer.score([text, "buy cheap pills now"])
    # the mean of equal words is the word's, and so is that of word pairs, but for the ends
    alone = scorer.score(["the theorem follows from the lemma\n" * 1000]).scores[0]
    assert batch.reasons == [None, None]
    assert batch.scores[0] == pytest.approx(alone, abs=1e-3)
    assert batch.scores[1] < 0.5


def test_line_separators_alone_are_no_text(folder: Path) -> None:
    marks = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    batch = FastTextScorer(folder / "two.bin", "hq").score([marks, marks * 1000, "\u2028", f"{marks}theorem{marks}"])
    assert batch.reasons == [NO_TOKENS, NO_TOKENS, NO_TOKENS, None]


def test_mixed_scripts_are_scored_by_the_words_that_are_known(folder: Path) -> None:
    scorer = FastTextScorer(folder / "two.bin", "hq")
    mixed = "\u0442\u0435\u043e\u0440\u0435\u043c\u0430 theorem \u5b9a\u7406 \u0645\u0628\u0631\u0647\u0646\u0629"
    foreign = "\u0442\u0435\u043e\u0440\u0435\u043c\u0430 \u5b9a\u7406 \u0645\u0628\u0631\u0647\u0646\u0629"
    batch = scorer.score([mixed, foreign, "\u5b9a\u7406\u2029\u0645\u0628"])
    assert batch.reasons == [None, NO_TOKENS, NO_TOKENS]
    assert batch.scores[0] > 0.5
