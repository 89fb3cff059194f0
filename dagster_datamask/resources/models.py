"""Which encoder and classifiers the stages use; `scoring` knows how to load and run them."""

import dagster as dg

from dagster_datamask.settings import Settings


class ModelsResource(dg.ConfigurableResource):
    """References (hub id, local path, URL, package:<name>, or 'trained') of the models, as in [models]."""

    encoder: str
    encoder_prefix: str | None = None
    dclm: str
    dclm_label: str
    wiki: str
    wiki_label: str
    ultra: str
    ultra_label: str
    ultra_tokenizer: str
    edu: str

    @classmethod
    def from_settings(cls, settings: Settings) -> "ModelsResource":
        return cls(**settings.models.model_dump())

    def apply(self, settings: Settings) -> Settings:
        """`settings` with [models] as configured here."""
        return settings.replace({f"models.{name}": getattr(self, name) for name in type(settings.models).model_fields})
