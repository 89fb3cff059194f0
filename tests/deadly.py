"""A file system on which one shard ends the process that reads its texts, as a broken page or memory running out does.

Here as workers import it by name. The process that opened it, by whose environment it knows itself, reads all.
"""

import os
import signal
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

# the process that is spared, the name that kills, and a folder with a file for each time that it shall not, yet
SPARED, DEADLY, NOT_YET = "DATAMASK_TEST_SPARED", "DATAMASK_TEST_DEADLY", "DATAMASK_TEST_NOT_YET"


class DeadlyFileSystem(LocalFileSystem):
    protocol = ("deadly",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("deadly://"))

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        deadly = os.environ.get(DEADLY)
        if deadly and deadly in path and os.environ.get(SPARED) != str(os.getpid()):
            for left in Path(os.environ[NOT_YET]).iterdir():
                left.unlink()
                break
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().open(path, *args, **options)


fsspec.register_implementation("deadly", DeadlyFileSystem, clobber=True)
