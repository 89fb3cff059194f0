import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, XLMRobertaConfig

from dagster_datamask.scoring.batching import MOST_CHARACTERS, OutOfMemory, ahead, pack, positions, run, tokenise
from dagster_datamask.scoring.encoders import Encoder

lengths_lists = st.lists(st.integers(1, 40), max_size=30)


@given(lengths_lists, st.integers(1, 100))
def test_packing_is_complete_sorted_and_within_budget(lengths: list[int], budget: int) -> None:
    array = np.array(lengths, dtype=np.int64)
    batches = pack(array, np.arange(len(array)), budget)
    flat = np.concatenate([*batches, np.zeros(0, dtype=np.int64)]).astype(int)
    assert sorted(flat) == list(range(len(lengths)))
    assert [(-lengths[i], i) for i in flat] == sorted((-n, i) for i, n in enumerate(lengths))
    assert all(len(b) * array[b].max() <= budget or len(b) == 1 for b in batches)


@given(lengths_lists, st.integers(1, 200), st.integers(40, 200))
def test_out_of_memory_halves_and_loses_no_row(lengths: list[int], budget: int, ceiling: int) -> None:
    array = np.array(lengths, dtype=np.int64)
    out = np.full(len(array), -1.0)

    def forward(batch: np.ndarray) -> np.ndarray:
        if len(batch) * array[batch].max() > ceiling:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch.astype(float)

    sizes = run(array, np.arange(len(array)), budget, forward, out)
    assert out.tolist() == list(range(len(lengths)))
    assert sum(sizes) == len(lengths)


def test_after_an_out_of_memory_later_batches_are_small_too() -> None:
    tried: list[int] = []

    def forward(batch: np.ndarray) -> np.ndarray:
        tried.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return np.zeros(len(batch))

    sizes = run(np.full(12, 10), np.arange(12), 80, forward, np.zeros(12))
    assert tried == [8, 4, 2, 2, 2, 2, 2, 2] and sizes == [2] * 6


def test_a_real_failed_allocation_is_retried() -> None:
    def forward(batch: np.ndarray) -> np.ndarray:
        if len(batch) > 1:
            torch.empty(1 << 60, dtype=torch.uint8)
        return batch.astype(float)

    out = np.zeros(2)
    assert run(np.array([5, 5]), np.arange(2), 10, forward, out) == [1, 1]
    assert out.tolist() == [0, 1]


def test_one_row_that_does_not_fit_and_other_errors() -> None:
    def full(batch: np.ndarray) -> np.ndarray:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory, match="one text of 7 tokens"):
        run(np.array([7]), np.arange(1), 100, full, np.zeros(1))

    def broken(batch: np.ndarray) -> np.ndarray:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(np.array([7]), np.arange(1), 100, broken, np.zeros(1))


@given(
    st.lists(
        st.lists(
            st.sampled_from(["cell", "antidisestablishmentarianism", "a", "語", "é", "\n", "  ", "x,y"]), max_size=40
        ),
        max_size=4,
    ),
    st.integers(3, 9),
)
def test_the_head_of_a_text_gives_the_whole_texts_tokens(
    encoder: Encoder, words: list[list[str]], max_length: int
) -> None:
    tokenizer = encoder._tokenizer
    texts = [" ".join(text) for text in words]
    tokens = tokenise(tokenizer, texts, max_length)
    whole = [tokenizer(text, truncation=True, max_length=max_length)["input_ids"] for text in texts]
    assert [tokens.row(i)["input_ids"] for i in range(len(texts))] == whole
    assert tokens.lengths.tolist() == [len(row) for row in whole]


def test_positions_of_a_roberta_start_behind_the_padding_id() -> None:
    assert positions(XLMRobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512
    assert positions(BertConfig(max_position_embeddings=512)) == 512


def test_no_rows() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert run(none, none, 10, lambda batch: batch, np.zeros(0)) == []


@given(st.lists(st.lists(st.sampled_from(["a", "cell", "語", "x,y"]), max_size=9), min_size=1, max_size=6), st.data())
def test_padding_is_the_tokenizers_own(encoder: Encoder, words: list[list[str]], data: st.DataObject) -> None:
    tokenizer = encoder._tokenizer
    texts = [" ".join(text) for text in words]
    tokens = tokenise(tokenizer, texts, 7)
    index = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=8)))
    side = data.draw(st.sampled_from(["right", "left"]))
    before, tokenizer.padding_side = tokenizer.padding_side, side
    try:
        found = tokens.padded(tokenizer, index, "cpu")
        whole = [texts[i] for i in index]
        expected = tokenizer(whole, truncation=True, max_length=7, padding=True, return_tensors="pt")
    finally:
        tokenizer.padding_side = before
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("space", ["\n", "\u2028", "\u3000", "\t"])
def test_a_head_ends_at_any_white_space(encoder: Encoder, space: str) -> None:
    seen: list[int] = []

    class Watched:
        model_input_names = encoder._tokenizer.model_input_names

        def __call__(self, texts: list[str], **options: object) -> object:
            seen.extend(len(text) for text in texts)
            return encoder._tokenizer(texts, **options)

    tokens = tokenise(Watched(), [space.join(["word"] * 100_000)], 8)  # type: ignore[arg-type]
    assert tokens.lengths.tolist() == [8] and max(seen) < 64


@pytest.mark.parametrize("space", [" ", "\n", "\u3000"])
@pytest.mark.parametrize("before", ["", "first"])
def test_a_head_of_white_space_is_no_end_of_the_text(encoder: Encoder, before: str, space: str) -> None:
    tokenizer = encoder._tokenizer
    # as many as a head has characters, one fewer, and far more
    for count in (8 * 6 - len(before) - 1, 8 * 6, 50_000):
        tokens = tokenise(tokenizer, [before + space * count + "last"], 6)
        assert tokens.row(0)["input_ids"] == tokenizer(f"{before} last")["input_ids"]


def test_of_a_text_without_spaces_a_million_characters_are_read(encoder: Encoder) -> None:
    tokenizer = encoder._tokenizer
    words = ["x" * (MOST_CHARACTERS + 9), "\x01" * MOST_CHARACTERS + " word", "語" * 5000]
    tokens = tokenise(tokenizer, words, 6)
    cls, sep, unknown = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id
    assert tokens.row(0)["input_ids"] == [cls, unknown, sep]
    assert tokens.row(1)["input_ids"] == [cls, sep]
    assert tokens.row(2)["input_ids"] == tokenizer("語語語語")["input_ids"]


def test_a_smaller_budget_is_told() -> None:
    told: list[int] = []

    def forward(batch: np.ndarray) -> np.ndarray:
        if len(batch) > 3:
            raise MemoryError
        return np.zeros(len(batch))

    assert run(np.full(12, 10), np.arange(12), 80, forward, np.zeros(12), told.append) == [2] * 6
    assert told == [40, 20]


def test_the_next_item_is_made_while_one_is_worked_on() -> None:
    made: list[tuple[int, int]] = []
    second = threading.Event()

    def items():
        for i in range(3):
            made.append((i, threading.get_ident()))
            if i == 1:
                second.set()
            yield i

    found = []
    for item in ahead(items()):
        if item == 0:
            assert second.wait(300)
        found.append(item)
    assert found == [0, 1, 2] and [i for i, _ in made] == found
    assert threading.get_ident() not in {thread for _, thread in made}


def test_an_error_ahead_comes_where_its_item_would_and_an_early_end_leaves_no_thread() -> None:
    def items():
        yield 1
        raise ValueError("row 2")

    found = ahead(items())
    assert next(found) == 1
    with pytest.raises(ValueError, match="row 2"):
        next(found)
    before = set(threading.enumerate())
    stopped = ahead(iter(range(9)))
    assert next(stopped) == 0
    stopped.close()
    assert set(threading.enumerate()) <= before
    assert list(ahead([])) == []
