"""Where documents come from and where results go."""

import dagster as dg

from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.remote import open_store
from dagster_datamask.shards.source import Source


class StorageResource(dg.ConfigurableResource):
    """`source` is a folder or any fsspec URL in FineWeb's layout; `root` a folder, or the URL of a bucket, of which
    `cache` holds what this machine reads and writes ("": below the user's cache folder), `cache_gb` of it at most."""

    source: str = ""
    root: str = ""
    cache: str = ""
    cache_gb: float | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "StorageResource":
        asked = settings.storage
        return cls(source=settings.source.url, root=asked.root, cache=asked.cache, cache_gb=asked.cache_gb)

    def documents(self) -> Source:
        """The source. Raises SourceError if none is set."""
        return Source(self.source)

    def store(self) -> Store:
        """The root. Raises RootUnusable for a URL that cannot hold results."""
        return open_store(self.root, self.cache, cache_gb=self.cache_gb)
