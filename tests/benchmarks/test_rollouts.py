from benchmarks.rollouts import Size, rollouts
from dagster_datamask.influence.language_model import LanguageModelOptions


def test_rollouts_are_compared_with_the_plain_loop() -> None:
    rows = rollouts(Size(LanguageModelOptions(1, 16, 2, 16, 32), 3), rounds=1, processes=1)
    speed, seconds, difference = rows
    assert speed.ours > 0 and speed.other > 0 and speed.met is not None and seconds.ratio > 0
    # equal, and not because nothing moved
    assert difference.met and difference.ours < 0.1 * speed.facts["largest"]
