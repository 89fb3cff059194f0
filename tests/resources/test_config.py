"""What the Launchpad shows: each asset's settings, typed, described, with the file's values."""

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.resources.config import config_class, config_keys, effective
from dagster_datamask.settings import SettingsError, load_settings
from dagster_datamask.stages.base import STAGES

SETTINGS = load_settings(
    None,
    ["select.lambda=0.25", "select.budget=5000", "source.on_bad_shard=quarantine", "group_mates.stages=4"],
    env={},
)
# one look at the definitions serves all assets
SHOWN = {
    asset.key: asset for asset in build_definitions(SETTINGS).assets or () if isinstance(asset, dg.AssetsDefinition)
}


@pytest.mark.parametrize("name", STAGES)
def test_defaults_are_the_files_values(name: str) -> None:
    stage = STAGES[name]
    config = config_class(stage, SETTINGS)()
    for field, key in config_keys(stage).items():
        assert getattr(config, field) == SETTINGS.get(key), key
    assert effective(stage, config, SETTINGS) == SETTINGS


@pytest.mark.parametrize("name", STAGES)
def test_every_field_is_typed_and_described_in_dagsters_own_schema(name: str) -> None:
    shown = SHOWN[dg.AssetKey(name.split("/"))].op.config_schema.config_type.fields
    assert set(shown) == set(config_keys(STAGES[name]))
    for field, spec in shown.items():
        assert spec.description, field
        assert spec.config_type.key != "Any", field
        key = config_keys(STAGES[name])[field]
        if SETTINGS.get(key) is not None:
            assert spec.default_provided and spec.default_value == SETTINGS.get(key), field


def test_the_launchpad_speaks_the_files_names() -> None:
    fields = config_keys(STAGES["datamask_masks"])
    assert fields["lambda"] == "select.lambda"
    assert set(fields) >= {"budget", "solver", "seed", "split"}


def test_an_override_reaches_its_setting_alone() -> None:
    stage = STAGES["datamask_masks"]
    changed = effective(stage, config_class(stage, SETTINGS)(**{"lambda": 0.75}), SETTINGS)
    assert changed == SETTINGS.replace({"select.lambda": 0.75})


@pytest.mark.parametrize(("field", "value"), [("lambda", 1.5), ("lambda", -0.1), ("budget", "many"), ("steps", 0)])
def test_out_of_range_names_the_setting_and_the_value(field: str, value: object) -> None:
    stage = STAGES["datamask_masks"]
    with pytest.raises(SettingsError, match=rf"select\.{field} = .*{value}") as caught:
        effective(stage, config_class(stage, SETTINGS)(**{field: value}), SETTINGS)
    assert "\n" not in str(caught.value)
