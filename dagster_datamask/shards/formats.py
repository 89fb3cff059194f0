"""The formats that trainers read, written shard by shard: WebDataset, JSON lines, and Megatron's tokens.

Here: one file (or pair of files) of documents, and reading it back. Not here: which documents, and where files lie.
Equal documents give equal bytes: no file holds a time. The libraries are optional and loaded when a format is used.
"""

import datetime
import gzip
import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dagster_datamask.keyed import digest

Document = Mapping[str, Any]
# columns of a document that are no metadata: every format has a place of its own for them
_OWN = ("doc_id", "id", "text")


class Format(ABC):
    """A format: `kind` is its folder, `suffixes` its files; `seen` is what `read` gives for a document."""

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def write(self, paths: list[Path], documents: Iterable[Document]) -> None: ...

    @abstractmethod
    def read(self, paths: list[Path]) -> Iterator[bytes]: ...

    @abstractmethod
    def seen(self, document: Document) -> bytes: ...


def as_json(value: Any) -> Any:
    """`value` in JSON's types: numbers that are not finite become null, bytes text, all else its ISO or plain form."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def _metadata(document: Document) -> dict[str, Any]:
    return {name: as_json(value) for name, value in document.items() if name not in _OWN}


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")


class JsonLines(Format):
    """`text, id, metadata` a line, gzipped: what datatrove's JsonlReader reads."""

    kind = "jsonl"
    suffixes = (".jsonl.gz",)

    def write(self, paths: list[Path], documents: Iterable[Document]) -> None:
        # the name and the time of a gzip header would make equal documents unequal files
        with paths[0].open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
            for d in documents:
                file.write(_line({"text": d["text"], "id": d["doc_id"], "metadata": _metadata(d)}) + b"\n")

    def read(self, paths: list[Path]) -> Iterator[bytes]:
        with gzip.open(paths[0], "rb") as file:
            for line in file:
                row = json.loads(line)
                yield self.seen({**row["metadata"], "text": row["text"], "doc_id": row["id"]})

    def seen(self, document: Document) -> bytes:
        return _line([document["doc_id"], document["text"], _metadata(document)])


class WebDataset(Format):
    """A tar of `<key>.txt` and `<key>.json` (`id` and metadata); the key is a hash of the id, which may hold dots."""

    kind = "webdataset"
    suffixes = (".tar",)

    def __init__(self) -> None:
        self._library = _library("webdataset", "webdataset", "webdataset")

    def write(self, paths: list[Path], documents: Iterable[Document]) -> None:
        with paths[0].open("wb") as raw, self._library.TarWriter(raw, encoder=False, mtime=0) as tar:
            for d in documents:
                tar.write(
                    {
                        "__key__": digest(d["doc_id"], size=16).hex(),
                        "txt": d["text"].encode("utf-8"),
                        "json": _line({"id": d["doc_id"], **_metadata(d)}),
                    }
                )

    def read(self, paths: list[Path]) -> Iterator[bytes]:
        tar = self._library.tariterators
        with paths[0].open("rb") as raw:
            members = ({**member, "__url__": paths[0].name} for member in tar.tar_file_iterator(raw))
            for sample in tar.group_by_keys(members):
                row = json.loads(sample["json"])
                yield self.seen({**row, "text": sample["txt"].decode("utf-8"), "doc_id": row["id"]})

    def seen(self, document: Document) -> bytes:
        return _line([document["doc_id"], document["text"], _metadata(document)])


class Megatron(Format):
    """Token ids as Megatron's IndexedDataset, `.bin` and `.idx`, each document closed by the end-of-text token.

    encode: the token ids of a text. end: the token that closes a document. vocabulary: ids are below it.
    """

    kind = "megatron"
    suffixes = (".bin", ".idx")

    def __init__(self, encode: Callable[[str], list[int]], end: int, vocabulary: int) -> None:
        self._library = _library("megatron.core.datasets.indexed_dataset", "megatron", "megatron-core")
        self._encode = encode
        self._end = end
        self._dtype = self._library.DType.optimal_dtype(vocabulary)

    def write(self, paths: list[Path], documents: Iterable[Document]) -> None:
        binary, index = paths
        builder = self._library.IndexedDatasetBuilder(str(binary), dtype=self._dtype)
        for d in documents:
            tokens = self._tokens(d)
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(str(index))

    def read(self, paths: list[Path]) -> Iterator[bytes]:
        dataset = self._library.IndexedDataset(str(paths[0].with_suffix("")))
        for k in range(len(dataset)):
            yield repr(dataset[k].tolist()).encode()

    def seen(self, document: Document) -> bytes:
        return repr(self._tokens(document)).encode()

    def _tokens(self, document: Document) -> list[int]:
        return [*self._encode(document["text"]), self._end]


def _library(module: str, extra: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"export.formats: {extra} needs {package} ({error}); install it: pip install 'dagster-datamask[{extra}]'"
        ) from error
