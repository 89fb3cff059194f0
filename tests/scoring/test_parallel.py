"""Several processes, one model: the same scores, the model's memory once, and no process that outlives its use."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fasttext
import numpy as np
import pytest

from dagster_datamask.failures import is_transient
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.models import resolve_model
from dagster_datamask.scoring.parallel import CHUNK_TEXTS, FastTextProcesses, WorkerLost
from dagster_datamask.scoring.text import NO_TOKENS, NULL_TEXT, SURROGATES

from .conftest import MINILM, labelled

MODEL_BYTES = 80_000_000

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="needs Linux's /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of 80 MB: as in the published ones, nearly all of it is word pairs' buckets."""
    folder = tmp_path_factory.mktemp("parallel")
    texts, labels = labelled(60)
    rows = [f"__label__{'hq' if y else 'cc'} {text}\n" for text, y in zip(texts, labels, strict=True)]
    (folder / "train.txt").write_text("".join(rows))
    options = {"dim": 100, "bucket": MODEL_BYTES // 400, "wordNgrams": 2, "epoch": 20, "thread": 1, "verbose": 0}
    fasttext.train_supervised(str(folder / "train.txt"), **options).save_model(str(folder / "large.bin"))
    assert (folder / "large.bin").stat().st_size > MODEL_BYTES
    return folder / "large.bin"


def texts_of(n: int) -> list[str | None]:
    texts, _ = labelled(n)
    odd = {0: None, 1: "", 2: "qqq", 3: "the theorem \ud800", 4: "\u2028\x85\r\n", 5: "buy " * 10_000}
    return [odd.get(k % 37, text) for k, text in enumerate(texts)]


def processes_of(scorer: FastTextProcesses) -> tuple[int, list[int]]:
    """(the server, its workers)."""
    server = scorer._server.pid
    return server, [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


def megabytes(pid: int, *names: str) -> float:
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return sum(int(line[1]) for line in lines if line[0].rstrip(":") in names) / 1024


def are_gone(pids: list[int], seconds: float = 300.0) -> bool:
    def is_there(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    end = time.monotonic() + seconds
    while any(map(is_there, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_there, pids))


@pytest.mark.parametrize("n", [0, 1, 2, CHUNK_TEXTS, 10 * CHUNK_TEXTS + 1])
def test_scores_reasons_and_order_are_those_of_one_process(model: Path, n: int) -> None:
    texts = texts_of(n)
    one = FastTextScorer(model, "hq").score(texts)
    for processes in (1, 3):
        with FastTextProcesses(processes, model, "hq") as scorer:
            for _ in range(2):
                many = scorer.score(texts)
                assert many.scores.tobytes() == one.scores.tobytes()
                assert many.reasons == one.reasons
                assert many.notes == one.notes
    if n > 5:
        assert one.reasons[:5] == [NULL_TEXT, NO_TOKENS, NO_TOKENS, None, NO_TOKENS]
        assert one.notes[SURROGATES] >= 1


def test_batches_come_in_their_order_and_two_are_held_at_most(model: Path) -> None:
    one = FastTextScorer(model, "hq")
    batches = [texts_of(n) for n in (0, 3 * CHUNK_TEXTS, 1, 200, 0, 2)]
    taken = []

    def source() -> Iterator[list[str | None]]:
        for batch in batches:
            taken.append(batch)
            yield batch

    with FastTextProcesses(2, model, "hq") as scorer:
        for k, scored in enumerate(scorer.score_each(source())):
            assert len(taken) <= k + 2
            assert scored.scores.tobytes() == one.score(batches[k]).scores.tobytes()
        assert k == len(batches) - 1
        assert list(scorer.score_each([])) == []


def test_what_is_left_unread_ends_the_processes(model: Path) -> None:
    scorer = FastTextProcesses(2, model, "hq")
    server, workers = processes_of(scorer)
    each = scorer.score_each(texts_of(300) for _ in range(5))
    next(each)
    each.close()
    assert are_gone([server, *workers])


def test_the_models_memory_counts_once(model: Path) -> None:
    with FastTextProcesses(3, model, "hq") as scorer:
        scorer.score(texts_of(600))
        server, workers = processes_of(scorer)
        assert len(workers) == 3
        for worker in workers:
            assert megabytes(worker, "Private_Dirty", "Private_Clean") < MODEL_BYTES / 2**20 / 3
            assert megabytes(worker, "Rss") > MODEL_BYTES / 2**20
        assert sum(megabytes(pid, "Pss") for pid in (server, *workers)) < 2 * MODEL_BYTES / 2**20
        for pid in (server, *workers):
            assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    assert are_gone([server, *workers])


def test_a_killed_worker_is_an_error_that_may_be_tried_again(model: Path) -> None:
    with FastTextProcesses(2, model, "hq") as scorer:
        server, workers = processes_of(scorer)
        os.kill(workers[0], signal.SIGKILL)
        with pytest.raises(
            WorkerLost, match=r"ended by SIGKILL.*finished shards are kept.*compute\.processes"
        ) as caught:
            scorer.score(texts_of(200))
        assert is_transient(caught.value)
        assert are_gone([server, *workers])
    with FastTextProcesses(2, model, "hq") as scorer:
        assert len(scorer.score(texts_of(200)).scores) == 200


def test_what_the_scorer_refuses_is_refused_as_it_would(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no label 'wiki'; the model knows __label__cc, __label__hq"):
        FastTextProcesses(2, model, "wiki")
    with pytest.raises(FileNotFoundError, match=r"none\.bin: no such fastText model"):
        FastTextProcesses(2, tmp_path / "none.bin", "hq")
    (tmp_path / "half.bin").write_bytes(model.read_bytes()[: MODEL_BYTES // 2])
    with pytest.raises(ValueError, match=r"half\.bin: cut short at 40000000 bytes"):
        FastTextProcesses(2, tmp_path / "half.bin", "hq")
    with FastTextProcesses(2, model, "hq") as scorer, pytest.raises(TypeError, match=r"row 1.*bytes"):
        scorer.score(["text", b"bytes"])


def test_it_tells_of_its_model_and_takes_its_normaliser(model: Path) -> None:
    tokenizer = resolve_model(MINILM, filename="tokenizer.json").path
    one = FastTextScorer(model, "hq", "ultra_fineweb", tokenizer)
    texts = ["The Theorem follows", "Buy cheap pills NOW", None]
    with FastTextProcesses(2, model, "hq", "ultra_fineweb", tokenizer) as scorer:
        assert scorer.describe() == one.describe()
        np.testing.assert_array_equal(scorer.score(texts).scores, one.score(texts).scores)


def test_no_process_outlives_one_that_is_killed(model: Path) -> None:
    code = (
        "import sys, time; from dagster_datamask.scoring.parallel import FastTextProcesses\n"
        "scorer = FastTextProcesses(2, sys.argv[1], 'hq'); print(scorer._server.pid, flush=True); time.sleep(3600)"
    )
    user = subprocess.Popen([sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    server = int(user.stdout.readline())
    workers = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    assert len(workers) == 2
    user.kill()
    user.wait()
    user.stdout.close()
    assert are_gone([server, *workers])
