"""Hashes and generators: fixed values, independent keys, nothing of the process."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.keyed import digest, hash64, hash128, rng

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)


@given(a=st.lists(TEXT, max_size=3), b=st.lists(TEXT, max_size=3))
def test_different_parts_have_different_digests(a: list[str], b: list[str]) -> None:
    assert (digest(*a) == digest(*b)) == (a == b)


def test_parts_are_set_apart_and_typed_by_their_text() -> None:
    assert digest("a", "bc") != digest("ab", "c")
    assert digest("") != digest()
    assert digest(1) == digest("1") == digest(b"1")
    assert len(digest("x", size=6)) == 6


def _by_hand(text: str, seed: int, purpose: str) -> int:
    """hash64 of one id in Python's own whole numbers."""
    start, first, second = (int.from_bytes(digest(seed, purpose, k, size=8), "little") for k in range(3))
    raw, mask = text.encode("utf-8", "surrogatepass"), 2**64 - 1
    h = start ^ len(raw)
    raw = raw if len(raw) <= 512 else digest(raw, size=64)
    for k in range(0, len(raw), 8):
        word = int.from_bytes(raw[k : k + 8], "little")
        h = ((h ^ (word * (first | 1) & mask)) * (second | 1)) & mask
        h ^= h >> 29
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = ((h ^ (h >> shift)) * factor) & mask
    return h ^ (h >> 31)


@pytest.mark.parametrize("text", ["", "a", "a\0", "é", "eight888", "nine99999", "x" * 512, "x" * 513, "\ud800"])
def test_hash64_by_hand(text: str) -> None:
    assert hash64([text], 7, "tie").tolist() == [_by_hand(text, 7, "tie")]
    assert hash64(["b", text, "y" * 600], 7, "tie")[1] == _by_hand(text, 7, "tie")


def test_hash64_of_like_ids_is_distinct_and_even_in_every_bit() -> None:
    hashes = hash64([f"<urn:uuid:{k:032x}>" for k in range(50_000)], 0, "tie")
    assert np.unique(hashes).size == 50_000
    for bit in range(64):
        share = float(((hashes >> np.uint64(bit)) & np.uint64(1)).mean())
        # five sigma
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(50_000)


@given(ids=st.lists(TEXT, max_size=5))
def test_a_hash_is_that_of_its_id_alone(ids: list[str]) -> None:
    assert hash64(ids, 0, "tie").tolist() == [int(hash64([i], 0, "tie")[0]) for i in ids]
    assert hash128(ids).tolist() == [hash128([i])[0].tolist() for i in ids]
    assert hash64(ids, 0, "tie").dtype == np.uint64


def test_no_one_and_two_ids() -> None:
    for n in range(3):
        ids = [str(k) for k in range(n)]
        assert hash64(iter(ids), 0, "x").shape == (n,)
        assert hash128(iter(ids)).shape == (n, 2)


def test_seeds_and_purposes_give_unrelated_orders() -> None:
    ids = [str(k) for k in range(4000)]
    base = hash64(ids, 0, "tie").astype(float)
    for other in (hash64(ids, 1, "tie"), hash64(ids, 0, "split"), hash128(ids)[:, 0]):
        assert abs(np.corrcoef(base, other.astype(float))[0, 1]) < 0.08
    # uniform: a sixteenth of the ids in each sixteenth of the range, within five sigma
    counts = np.bincount((hash64(ids, 0, "tie") >> np.uint64(60)).astype(int), minlength=16)
    assert np.abs(counts - 250).max() < 5 * np.sqrt(250)


def test_generators_repeat_by_key_and_differ_between_keys() -> None:
    draws = rng(0, "text", "a", 1).random(8)
    assert (rng(0, "text", "a", 1).random(8) == draws).all()
    for other in (rng(1, "text", "a", 1), rng(0, "mask", "a", 1), rng(0, "text", "a", 2), rng(0, "text", "a1")):
        assert (other.random(8) != draws).all()


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_gives_the_same(hash_seed: str) -> None:
    code = (
        "from dagster_datamask.keyed import *; "
        "print(digest('a', 1).hex(), hash64(['a'], 0, 'tie')[0], hash128(['a'])[0, 1], rng(0, 'x').integers(2**60))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    own = (digest("a", 1).hex(), hash64(["a"], 0, "tie")[0], hash128(["a"])[0, 1], rng(0, "x").integers(2**60))
    assert other.stdout.split() == [str(part) for part in own]
