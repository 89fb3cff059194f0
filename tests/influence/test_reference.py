from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from dagster_datamask.influence.reference import (
    Example,
    Kept,
    OverlapError,
    Reference,
    build_reference,
    of_sequences,
    read_examples,
    text_key,
)
from dagster_datamask.influence.tokens import train_tokenizer

END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["question answer yes no"], 260)


def write(path: Path, **columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def counted(tokenizer: Tokenizer, reference: Reference, row: int) -> tuple[str, str]:
    """(what comes before, what counts) of a row, as texts, the ends as |."""
    parts = (reference.tokens[row][: reference.mask[row].argmax()], reference.tokens[row][reference.mask[row]])
    before, after = ("".join("|" if t == END else tokenizer.decode([t]) for t in part.tolist()) for part in parts)
    return before, after


def test_only_the_answer_counts(tokenizer: Tokenizer) -> None:
    reference = build_reference(tokenizer, [Example("0", "a question", "yes"), Example("1", "", "a text")], 64)
    assert counted(tokenizer, reference, 0) == ("a question", " yes|")
    # a plain text comes after the end of another
    assert counted(tokenizer, reference, 1) == ("|", "a text|")
    assert reference.cut == 0 and reference.counted == reference.mask.sum()
    # padding stands at the end and counts nowhere
    assert not reference.mask[1, 8:].any() and (reference.tokens[1, 8:] == END).all()


def test_a_long_prompt_loses_its_start_and_a_long_answer_its_end(tokenizer: Tokenizer) -> None:
    examples = [Example("0", "xyzw", "1"), Example("1", "xy", "123456789"), Example("2", "", "123456789")]
    reference = build_reference(tokenizer, examples, 6)
    assert reference.tokens.shape == (3, 6) and reference.cut == 3
    assert counted(tokenizer, reference, 0) == ("yzw", " 1|")
    assert counted(tokenizer, reference, 1) == ("y", " 1234")
    assert counted(tokenizer, reference, 2) == ("|", "12345")
    fits = build_reference(tokenizer, [Example("0", "xyz", "1")], 6)
    assert fits.cut == 0 and counted(tokenizer, fits, 0) == ("xyz", " 1|")


def test_what_is_no_reference(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="the reference set is empty"):
        build_reference(tokenizer, [], 8)
    with pytest.raises(ValueError, match="row 7: its answer has no tokens"):
        build_reference(tokenizer, [Example("7", "", "")], 8)
    tokens = np.ones((2, 3), np.int64)
    for mask, message in [
        (np.array([[0, 1, 0], [0, 0, 0]], bool), "row 1 has no token that counts"),
        (np.array([[0, 1, 0], [1, 1, 0]], bool), "row 1: nothing predicts its first token"),
        (np.ones((2, 2), bool), "not of one shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            Reference(tokens, mask)


def test_sequences_as_a_reference() -> None:
    reference = of_sequences(np.arange(8).reshape(2, 4))
    assert reference.mask.tolist() == [[False, True, True, True]] * 2 and reference.tokens.dtype == np.int64
    assert reference.identity == of_sequences(np.arange(8).reshape(2, 4)).identity
    assert reference.identity != of_sequences(np.arange(8).reshape(4, 2)).identity
    assert reference.identity != Reference(reference.tokens, reference.mask & (np.arange(4) > 1)).identity


@pytest.mark.parametrize("n", [1, 2])
def test_reading_prompts_and_answers(tmp_path: Path, n: int) -> None:
    path = write(tmp_path / "r.parquet", prompt=[" a? ", None][:n], answer=["b", "c"][:n], other=[1, 2][:n])
    assert (
        sorted((e.name, e.prompt, e.answer) for e in read_examples(path, 9)) == [("0", "a?", "b"), ("1", "", "c")][:n]
    )


def test_rows_without_an_answer_and_repeated_ones_are_left_out(tmp_path: Path) -> None:
    texts = ["One  Text", None, " ", "one text", "another"]
    found = read_examples(write(tmp_path / "r.parquet", text=texts), 9)
    assert sorted((e.name, e.answer) for e in found) == [("0", "One  Text"), ("4", "another")]


@pytest.mark.parametrize("rows", list(permutations([("", "a b"), ("", "A  B"), ("a", "b")])))
def test_of_equal_texts_the_same_is_taken_wherever_it_stands(tmp_path: Path, rows: tuple) -> None:
    prompts, answers = zip(*rows, strict=True)
    found = read_examples(write(tmp_path / "r.parquet", prompt=list(prompts), answer=list(answers)), 9)
    assert [(e.prompt, e.answer) for e in found] == [("", "A  B")]


def test_a_keyed_order_of_texts(tmp_path: Path) -> None:
    texts = [f"text {k}" for k in range(50)]
    paths = [write(tmp_path / f"{k}.parquet", text=some) for k, some in enumerate((texts, texts[::-1]))]
    first, mirrored = ([e.answer for e in read_examples(path, 20)] for path in paths)
    assert first == mirrored and len(set(first)) == 20 and first != texts[:20]
    held_out = [e.answer for e in read_examples(paths[0], 30, skip=20)]
    assert not set(held_out) & set(first) and set(held_out) | set(first) == set(texts)
    assert [e.answer for e in read_examples(paths[0], 20, seed=1)] != first
    with pytest.raises(ValueError, match=r"50 different examples .*50 of them are taken"):
        read_examples(paths[0], 1, skip=50)


def test_only_the_first_of_a_large_file_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.parquet", text=[f"text {k % 90}" for k in range(400)])
    whole = read_examples(path, 5, skip=2)
    monkeypatch.setattr("dagster_datamask.influence.reference._READ_ROWS", 8)
    assert [e.text for e in read_examples(path, 5, skip=2)] == [e.text for e in whole]


def test_a_text_file_is_its_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_bytes(b"one\r\nline\r\n\r\n\r\ntwo\n\n \n")
    found = sorted(read_examples(tmp_path / "r.txt", 9), key=lambda e: e.name)
    assert [e.answer for e in found] == ["one\nline", "two"]


def test_unreadable_references(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        read_examples(tmp_path / "none.parquet", 1)
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.parquet: not a readable parquet"):
        read_examples(tmp_path / "junk.parquet", 1)
    with pytest.raises(ValueError, match="no columns 'prompt' and 'answer' and no column 'text'; it has: prompt, body"):
        read_examples(write(tmp_path / "b.parquet", prompt=["a"], body=["b"]), 1)
    for texts in ([], [None]):
        with pytest.raises(ValueError, match="none is left"):
            read_examples(write(tmp_path / "e.parquet", text=pa.array(texts, pa.string())), 1)
    with pytest.raises(ValueError, match="a reference of 0 examples"):
        read_examples(tmp_path / "b.parquet", 0)


def test_equal_texts_whatever_their_form() -> None:
    assert text_key("The  ﬁrst\nRow ") == text_key("the first row") != text_key("the first rows")


def test_an_overlap_names_its_rows() -> None:
    sets = {"reference": [Example("3", "What is", "this?")], "held-out reference": [Example("8", "", "Plain text")]}
    kept = Kept.of(sets)
    kept.refuse("pool", [("a", "what is"), ("b", None), ("c", "")])
    with pytest.raises(
        OverlapError, match=r"pool: 2 rows .* a \(= reference row 3\), d \(= held-out reference row 8\);"
    ):
        kept.refuse("pool", iter([("a", "what is THIS?"), ("b", "other"), ("d", "plain\ttext")]))
    with pytest.raises(OverlapError, match=r"pool: 5 rows .* x2 .* and 2 more;"):
        kept.refuse("pool", ((f"x{k}", "plain text") for k in range(5)))


def test_two_references_with_a_text_in_common() -> None:
    with pytest.raises(OverlapError, match=r"held-out: 1 rows .*: 5 \(= reference row 0\)"):
        Kept.of({"reference": [Example("0", "", "A b")], "held-out": [Example("5", "", "a  B")]})
    assert len(Kept.of({}).keys) == 0
