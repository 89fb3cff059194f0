"""Where documents come from and where results go."""

from pathlib import Path

import dagster as dg

from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.source import Source


class StorageResource(dg.ConfigurableResource):
    """`source` is a folder or any fsspec URL in FineWeb's layout; `root` a folder on a disk of this machine."""

    source: str = ""
    root: str = ""

    @classmethod
    def from_settings(cls, settings: Settings) -> "StorageResource":
        return cls(source=settings.source.url, root=settings.storage.root)

    def documents(self) -> Source:
        """The source. Raises SourceError if none is set."""
        return Source(self.source)

    def store(self) -> Store:
        """The root. Raises SettingsError for a URL: leases and atomic renames need a file system."""
        if "://" in self.root and not self.root.startswith("file://"):
            raise SettingsError(
                f"storage.root = {self.root}: results go to a folder on a disk or a mounted file system, not to a URL"
            )
        return Store(Path(self.root.removeprefix("file://")))
