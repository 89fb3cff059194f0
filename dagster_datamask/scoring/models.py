"""Where a model is: from a reference to a local path, an exact revision and a licence.

Here belong: local files, models shipped inside packages, the Hugging Face hub and other URLs, and that no directory is
loaded which could run code. Not here: loading a model or knowing its conventions (`encoders`, `fasttext_scorer`,
`regression`).
"""

import importlib.util
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec

from dagster_datamask.keyed import digest

PACKAGE_PREFIX = "package:"
# seconds for the hub's first answer: a run must not hang on a machine without network
HUB_TIMEOUT_S = 10.0
_HUB_REF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(:(?P<filename>[^@]+))?(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")
_LICENCE = re.compile(r"\A---\s*\n(?:(?!---).*\n)*?license:[ \t]*['\"]?([\w.+-]+)", re.MULTILINE)
_PLAIN_SUFFIXES = (".json", ".txt", ".model")
_SAFETENSORS = ".safetensors"
# what torch.load unpickles, and unpickling runs what the file says
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OWN_MODULES = "sentence_transformers."
_OTHER_BACKENDS = ("onnx", "openvino")


class ModelUnavailable(RuntimeError):
    """A model that was asked for cannot be had; the message says what, why not, and how to go on."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine. revision: the hub's commit, or `blake2b:…` over the content of local files."""

    ref: str
    path: Path
    revision: str
    licence: str | None


def resolve_model(ref: str, *, filename: str | None = None, setting: str = "") -> ResolvedModel:
    """Find, or fetch into the hub's cache, the model that `ref` names.

    ref: a local file or directory; `package:<import name>[/sub/dir]`, a directory inside an installed package
    (without a sub-directory: its one SentenceTransformer directory); `<org>/<name>[:filename][@revision]` on
    the hub; or any fsspec URL of a file. filename: the file wanted of a hub repository or directory, where
    `ref` names none. setting: the key to name in errors, of [models] where it has no section ("dclm",
    "source.tokenizer").

    Raises ModelUnavailable in one line. Nothing half-written is left where a later call could take it for a
    model.
    """
    key = setting if "." in setting else f"models.{setting}" if setting else "[models]"
    if ref.startswith(PACKAGE_PREFIX):
        found = _within(_package_directory(ref, key), filename, ref, key)
        return ResolvedModel(ref, found, content_revision(found), licence_of(found))
    if "://" in ref:
        found = _fetched(ref, key)
        return ResolvedModel(ref, found, content_revision(found), licence_of(found))
    path = Path(ref).expanduser()
    if path.exists():
        found = _within(path, filename, ref, key)
        return ResolvedModel(ref, found, content_revision(found), licence_of(found))
    match = _HUB_REF.fullmatch(ref)
    if match is None or ref.startswith((".", "~")):
        raise ModelUnavailable(
            f"model {ref!r}: no such file or directory (working directory {Path.cwd()}), and not a hub id "
            f"<org>/<name>[:filename][@revision]; correct {key} in datamask.toml"
        )
    return _from_hub(ref, match["repo"], match["filename"] or filename, match["revision"], key)


def check_inert(folder: Path) -> None:
    """Raise ValueError, naming the file, where loading a model's directory could run code that came with it.

    That is: weights that are pickled and not there as safetensors, in the directory or that of a module; modules other
    than sentence-transformers' own (modules.json); an architecture that only the directory's code knows (auto_map).
    """
    modules = _json(folder / "modules.json") or []
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type"))
        if not kind.startswith(_OWN_MODULES):
            raise ValueError(
                f"{folder / 'modules.json'}: the module {kind!r} is code of the model's own, which is not run; take a "
                "model of sentence-transformers' modules"
            )
    for place in sorted({folder, *(p.parent for p in folder.glob("*/config.json"))}):
        pickled = sorted(p.name for p in place.iterdir() if _is_weights(p) and p.suffix in _PICKLED)
        if pickled and not any(p.suffix == _SAFETENSORS for p in place.iterdir()):
            raise ValueError(
                f"{place / pickled[0]}: pickled weights, which can run code when they are loaded, and no safetensors "
                "beside them; take a revision that has model.safetensors, or save the model anew where you trust it "
                "(model.save_pretrained)"
            )
    config = _json(folder / "config.json") or {}
    if isinstance(config, dict) and config.get("auto_map"):
        # slow to import, and such models are few
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config.get("model_type") not in CONFIG_MAPPING_NAMES:
            raise ValueError(
                f"{folder / 'config.json'}: the architecture {config.get('model_type')!r} is code of the model's own "
                "(auto_map), which is not run; take a model of an architecture that transformers has"
            )


def _is_weights(path: Path) -> bool:
    # what a trainer leaves beside a model (training_args.bin, optimizer.pt) no loader reads
    return path.is_file() and path.stem.startswith(("pytorch_model", "model", "adapter_model"))


def _json(path: Path) -> Any:
    """A JSON file's value; None where there is none, and the loader tells of one that is broken."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def content_revision(path: Path) -> str:
    """`blake2b:` and 32 hex digits over a file's bytes, or over the names and bytes of a directory's files.

    Hidden files are left out: no loader reads them. Within the process a file is read again only when its
    size or modification time changed.
    """
    path = Path(path)
    if path.is_file():
        return f"blake2b:{_file_digest(path).hex()}"
    names = sorted(
        (p.relative_to(path).as_posix(), p)
        for p in path.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    )
    parts: list[str | bytes] = []
    for name, file in names:
        parts += [name, _file_digest(file)]
    return f"blake2b:{digest(*parts).hex()}"


_digests: dict[tuple[str, int, int], bytes] = {}


def _file_digest(path: Path) -> bytes:
    stat = path.stat()
    key = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    if key not in _digests:
        hasher = blake2b(digest_size=16)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
        _digests[key] = hasher.digest()
    return _digests[key]


def model_cache() -> Path:
    """The folder of this user's machine where what was fetched or made from a model is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dagster_datamask" / "models"


def licence_of(path: Path) -> str | None:
    """The `license:` of the model card in a model's directory; None where there is no card or it names
    none."""
    card = (path if path.is_dir() else path.parent) / "README.md"
    if not card.is_file():
        return None
    match = _LICENCE.match(card.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else None


def _within(path: Path, filename: str | None, ref: str, key: str) -> Path:
    if filename is None or path.is_file():
        return path
    if (path / filename).is_file():
        return path / filename
    there = ", ".join(sorted(p.name for p in path.iterdir() if p.is_file())[:20]) or "no files"
    raise ModelUnavailable(f"model {ref!r}: no file {filename!r} in {path}; there: {there}; correct {key}")


def _package_directory(ref: str, key: str) -> Path:
    name, _, sub = ref.removeprefix(PACKAGE_PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(name) if name else None
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnavailable(
            f"model {ref!r}: no package {name!r} is installed in this environment; "
            f"install it, or give another model in {key} of datamask.toml"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    if sub:
        if not (root / sub).exists():
            raise ModelUnavailable(f"model {ref!r}: the package has no {sub!r}; correct {key} in datamask.toml")
        return root / sub
    found = sorted(p.parent for p in root.rglob("modules.json"))
    if len(found) != 1:
        names = ", ".join(p.relative_to(root).as_posix() for p in found) or "none"
        raise ModelUnavailable(
            f"model {ref!r}: the package must hold one SentenceTransformer directory (modules.json), it "
            f"holds: {names}; "
            f"write {PACKAGE_PREFIX}{name}/<directory> in {key} of datamask.toml"
        )
    return found[0]


def _fetched(url: str, key: str) -> Path:
    """The local copy of a URL's file, downloaded once per version of the remote file."""
    try:
        filesystem, remote = fsspec.core.url_to_fs(url)
        if not filesystem.isfile(remote):
            raise FileNotFoundError("no such file")
        if filesystem.protocol == "file" or "file" in filesystem.protocol:
            return Path(remote)
        version = str(filesystem.ukey(remote))
        target = model_cache() / digest(url, version).hex() / Path(remote).name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                part = Path(scratch) / "part"
                with filesystem.open(remote, "rb") as source, part.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                part.replace(target)
    except (OSError, ValueError, ImportError) as error:
        raise ModelUnavailable(
            f"model {url!r}: {_one_line(error)}; correct {key} in datamask.toml, or give a local path there"
        ) from error
    return target


def _from_hub(ref: str, repo: str, filename: str | None, revision: str | None, key: str) -> ResolvedModel:
    # slow to import, and needless for local models
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HTTPError

    # a full commit cannot move, so a cached copy of it needs no question
    if revision and _COMMIT.fullmatch(revision) and (path := _cached(repo, filename, revision)):
        return ResolvedModel(ref, path, revision, licence_of(path))
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
        listed = [sibling.rfilename for sibling in info.siblings or []]
        licence = info.card_data.get("license") if info.card_data else None
        if filename is not None:
            if filename not in listed:
                offered = ", ".join(name for name in listed if name.endswith((".bin", ".ftz"))) or "none"
                raise ModelUnavailable(
                    f"model {ref!r}: the repository has no file {filename!r}; .bin and .ftz files there: "
                    f"{offered}; "
                    f"correct {key} in datamask.toml"
                )
            path = Path(hf_hub_download(repo, filename, revision=revision))
        else:
            _refuse_pickled(ref, listed, key)
            path = Path(snapshot_download(repo, revision=revision, allow_patterns=_needed(listed)))
        # asked for by branch, so that the client records which commit it was and finds it without network
        return ResolvedModel(ref, path, _commit_of(path), licence)
    except (HTTPError, OSError, ValueError) as error:
        cached = _cached(repo, filename, revision)
        if cached is None:
            raise ModelUnavailable(
                f"model {ref!r}: not in the local cache, and the hub gave: {_one_line(error)}. Give a "
                f"local path in "
                f"datamask.toml ({key}), set HF_HOME to a cache that has it, or HF_TOKEN if it is private or the hub "
                f"answers too many requests"
            ) from error
        return ResolvedModel(ref, cached, _commit_of(cached), licence_of(cached))


def _refuse_pickled(ref: str, names: list[str], key: str) -> None:
    pickled = [name for name in names if name.split("/")[0] not in _OTHER_BACKENDS and name.endswith(_PICKLED)]
    if pickled and not any(name.endswith(_SAFETENSORS) for name in names):
        raise ModelUnavailable(
            f"model {ref!r}: its weights are pickled ({pickled[0]}) and not there as safetensors, and a pickle can run "
            f"code; name a revision that has model.safetensors (@refs/pr/<n>), or a folder with the model saved anew, "
            f"in {key} of datamask.toml"
        )


def _needed(names: list[str]) -> list[str]:
    """Of a repository's files, those that loading with torch reads: no other backend's, and nothing pickled."""
    return [
        name
        for name in names
        if name.split("/")[0] not in _OTHER_BACKENDS
        and (name == "README.md" or name.endswith((*_PLAIN_SUFFIXES, _SAFETENSORS)))
    ]


def _cached(repo: str, filename: str | None, revision: str | None) -> Path | None:
    """A complete copy in the hub's cache, without network; None where there is none."""
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError

    try:
        found = try_to_load_from_cache(repo, filename or "config.json", revision=revision)
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    if filename is not None:
        return Path(found)
    folder = Path(found).parent
    try:
        listed = [entry.path for entry in get_cached_repo_tree(repo, revision=_commit_of(folder))]
    except CachedRepoTreeNotFoundError:
        # a cache of an older client: what the repository holds is not known, but weights there must be
        return folder if any(p.suffix == _SAFETENSORS for p in folder.rglob("*")) else None
    return folder if all((folder / name).is_file() for name in _needed(listed)) else None


def _commit_of(path: Path) -> str:
    parts = path.parts
    return parts[len(parts) - parts[::-1].index("snapshots")]


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
