import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, XLMRobertaConfig

from dagster_datamask.scoring.batching import OutOfMemory, pack, positions, run, tokenise
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
