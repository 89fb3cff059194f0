"""The Launchpad's view of the settings: one typed config class per asset, with the file's values as defaults."""

from typing import Any

import dagster as dg
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from dagster_datamask.settings import Settings, section_models
from dagster_datamask.stages.base import Stage

# configured once for all assets, as resources
_IN_RESOURCES = ("models.",)


def config_keys(stage: Stage) -> dict[str, str]:
    """{field in the Launchpad: dotted key}."""
    keys = [key for key in stage.reads if not key.startswith(_IN_RESOURCES)]
    fields = {key.partition(".")[2]: key for key in keys}
    if len(fields) != len(keys):
        raise ValueError(f"{stage.name} reads two settings of one name: {keys}")
    return fields


def config_class(stage: Stage, settings: Settings) -> type[dg.Config]:
    """The config class of a stage's asset."""
    fields: dict[str, Any] = {}
    for name, key in config_keys(stage).items():
        info = _field(key)
        fields[name] = (info.annotation, Field(default=settings.get(key), description=info.description))
    title = "".join(part.capitalize() for part in stage.name.replace("/", "_").split("_"))
    return create_model(f"{title}Config", __base__=dg.Config, **fields)


def effective(stage: Stage, config: dg.Config, settings: Settings) -> Settings:
    """The settings with the Launchpad's values. Raises SettingsError for a value out of range."""
    changed = {
        key: getattr(config, name)
        for name, key in config_keys(stage).items()
        if getattr(config, name) != settings.get(key)
    }
    return settings.replace(changed) if changed else settings


def _field(key: str) -> FieldInfo:
    section, name = key.split(".")
    model = section_models()[section]
    return next(info for attribute, info in model.model_fields.items() if name in (attribute, info.alias))
