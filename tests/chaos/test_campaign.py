"""The campaign: whole under the marker `chaos`, a few injections of it always; and proofs that it would notice."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dagster_datamask.settings import load_settings
from tests.chaos import __main__ as command
from tests.chaos import campaign, faults, kills
from tests.chaos.__main__ import FAULTS, KINDS, schedule, whole
from tests.chaos.campaign import Entry, Injection, Wrong
from tests.chaos.world import ROWS, World, broken, different, half_done, published

# at least so many faults, of which so many SIGKILLs
CONSOLE = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, width=160)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.made(tmp_path_factory.mktemp("chaos"))


def run(world: World, chosen: list[tuple[int, str, campaign.Kind]], log: Path) -> list[campaign.Entry]:
    with world.victims:
        return campaign.run(world, chosen, log, CONSOLE)


def test_the_campaign_has_enough_of_everything() -> None:
    every = list(schedule())
    assert [seed for seed, _, _ in every] == list(range(len(every)))
    assert len(every) >= FAULTS
    assert {kind for _, kind, _ in every} == set(KINDS)
    # the first injection of a kind is the same whatever else is asked for
    assert next(iter(schedule(["disk_full"])))[0] == next(seed for seed, kind, _ in every if kind == "disk_full")


def test_an_error_a_short_read_and_a_fsync_that_fails_leave_no_trace(world: World, tmp_path: Path) -> None:
    chosen = [next(iter(schedule([kind]))) for kind in ("source_timeout", "source_short_read", "disk_fsync")]
    entries = run(world, chosen, tmp_path / "log.jsonl")
    assert campaign.wrong(entries) == []
    assert campaign.injected(entries) >= 2
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()]
    assert [line["seed"] for line in lines] == [seed for seed, _, _ in chosen]
    assert {"seed", "kind", "where", "when", "outcome", "count", "seconds"} == set(lines[0])


def test_a_seed_gives_the_same_injection_again(world: World, tmp_path: Path) -> None:
    chosen = [next(iter(schedule(["disk_torn"])))]
    one, two = (run(world, chosen, tmp_path / name)[0] for name in "ab")
    assert (one.where, one.when, one.outcome) == (two.where, two.when, two.outcome)


def test_another_process_runs_the_same_project(world: World, tmp_path: Path) -> None:
    config = tmp_path / "datamask.toml"
    config.write_text(world.config(tmp_path / "root"), "utf-8")
    loaded = load_settings(config, [], env={})
    assert loaded.replace({"source.url": f"chaos://{world.source}"}) == world.settings(tmp_path / "root")


def test_what_is_wrong_is_seen(world: World, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(world.whole, root)
    assert different(published(root), world.expected) == [] and broken(root) == []
    (shard,) = root.glob("wiki_scores/*/*/001_00000.parquet")
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + b"?")
    name = str(shard.relative_to(root))
    assert different(published(root), world.expected) == [f"{name} has other bytes"]
    assert half_done(root) == [f"{name} is not what its record says"]
    shard.unlink()
    assert different(published(root), world.expected) == [f"{name} is missing"]
    assert half_done(root) == [f"{name}.done.json tells of a file that is not there"]
    shard.write_bytes(raw)
    (shard.parent / ".x.parquet.1.tmp").touch()
    assert broken(root) == [f"{shard.parent.relative_to(root)}/.x.parquet.1.tmp was left behind"]
    assert f"the manifest has {ROWS} rows of {ROWS + 1}" in broken(root, ROWS + 1)


def test_an_injection_that_proves_wrong_is_told_and_its_root_is_kept(world: World) -> None:
    def breaks(world: World, rng: np.random.Generator, root: Path) -> Injection:
        root.mkdir(parents=True)
        raise Wrong("a row is lost")

    entry = campaign.inject(world, 7, "some", breaks)
    assert entry.outcome == "WRONG: a row is lost"
    assert Path(entry.where).is_dir()
    assert campaign.wrong([entry]) == [entry]


def test_the_store_s_own_errors_are_among_the_faults() -> None:
    error = faults.ERRORS["slow_down"]("a")
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 503  # type: ignore[attr-defined]


def test_a_campaign_whose_kills_did_not_come_is_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def part(seeds: object, kinds: list[str], *_: object) -> list[Entry]:
        return [Entry(seed, name, "a", "at once", "survived", 9, 0.1) for seed, name, _ in schedule(kinds)]

    never = shutil.which("false")
    assert never is not None
    monkeypatch.setattr(command, "part", part)
    monkeypatch.setattr(command.sys, "executable", never)
    monkeypatch.setattr(command.sys, "argv", ["chaos", f"--log={tmp_path / 'log.jsonl'}"])
    assert command.main() == 1
    told = capfd.readouterr().err
    lost = [seed for seed, name, _ in schedule() if name in kills.KINDS]
    assert lost and all(f"has no entry: --seed {seed}\n" in told for seed in lost)
    assert "0 SIGKILLs, and 30 are the least" in told and "faults, and" not in told
    assert "the process that kills ended with 1" in told
    # and of a part of it
    monkeypatch.setattr(command.sys, "argv", ["chaos", f"--kind={next(iter(kills.KINDS))}"])
    assert command.main() == 0
    monkeypatch.setattr(command, "part", lambda *asked: part(*asked)[1:])
    assert command.main() == 1


def test_moments_that_did_not_come_are_no_faults() -> None:
    missed = [Entry(seed, "kill_a", "", "", campaign.MISSED, 9, 0.1) for seed in range(50)]
    assert command.too_few(missed) == ["0 faults, and 100 are the least", "0 SIGKILLs, and 30 are the least"]
    assert command.too_few([Entry(0, "kill_a", "", "", "survived", FAULTS, 0.1), *missed]) == []


@pytest.mark.chaos
def test_every_fault_is_survived_or_told_and_a_rerun_gives_every_published_byte() -> None:
    entries, short = whole(Path(".chaos/log.jsonl").absolute(), CONSOLE)
    CONSOLE.print(campaign.summary(entries))
    assert campaign.wrong(entries) == []
    assert short == []
