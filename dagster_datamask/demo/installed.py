"""The documentation that came with this project's own dependencies, as plain documents.

Here: which distributions count (the requirement closure of this project with its `demo` extra, so that stray packages
in the environment change nothing), their long descriptions and the docstrings of their public modules, classes and
functions, read with `ast` and never imported. Not here: choosing documents, labels, files.
"""

import ast
import gc
import importlib.metadata
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dagster_datamask.keyed import digest, hash64

ROOT = "dagster-datamask"
EXTRA = "demo"

MIN_CHARS = 300
MAX_CHARS = 6_000
# A section of a description shorter than this is joined with the next: a heading with one line is not a document.
MIN_SECTION_CHARS = 800
# torch and transformers alone hold more docstrings than the rest together; reading stops at this many of each.
DOCSTRINGS_PER_PACKAGE = 200
# Generated tables of symbols: half of the parse time of a big package, and hardly a sentence in them.
MAX_SOURCE_BYTES = 100_000

_NOT_DOCUMENTATION = re.compile(
    r"(^|/)(tests?|testing|test_[^/]*|_test_[^/]*|[^/]*_test|conftest|_?vendor(ed)?|_?extern(al)?|third_party|benchmarks?)"
    r"(/|\.py$)|_pb2(_grpc)?\.py$"
)
_MARKDOWN_HEADING = re.compile(r"#{1,6}\s+\S")
_RST_UNDERLINE = re.compile(r"([=\-~^\"'*+#`])\1{2,}\s*$")
_FENCE = re.compile(r"\s*(```|~~~)")


@dataclass(frozen=True)
class Document:
    """One piece of installed documentation. `kind` is "description" or "docstring"; `path` is relative to
    site-packages; `id` is a UUID5 of the URL and the text, so it is the same wherever the same release is installed."""

    text: str
    url: str
    path: str
    package: str
    kind: str

    @property
    def id(self) -> str:
        return f"<urn:uuid:{uuid5(NAMESPACE_URL, self.url + ' ' + digest(self.text).hex())}>"


@dataclass(frozen=True)
class Harvest:
    """Documents in a fixed order (package, path, position), and what was passed over, by reason."""

    documents: list[Document]
    skipped: dict[str, int]


def dependency_closure(root: str = ROOT, extra: str = EXTRA) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions that `root[extra]` needs, by canonical name, sorted; `root` itself is left out.

    Follows `Requires-Dist` with its extras and markers; a requirement that is not installed is not followed.
    Raises PackageNotFoundError where `root` itself is not installed.
    """
    start = canonicalize_name(root)
    found = {start: importlib.metadata.distribution(root)}
    pending = [(start, ""), (start, extra)]
    seen = set(pending)
    while pending:
        name, with_extra = pending.pop()
        for text in found[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": with_extra}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed not in found:
                try:
                    found[needed] = importlib.metadata.distribution(requirement.name)
                except importlib.metadata.PackageNotFoundError:
                    continue
            for item in [(needed, ""), *((needed, e) for e in requirement.extras)]:
                if item not in seen:
                    seen.add(item)
                    pending.append(item)
    # Our own docstrings would make the demo's text change with every commit.
    del found[start]
    return dict(sorted(found.items()))


def fingerprint(distributions: dict[str, importlib.metadata.Distribution]) -> str:
    """Hex hash of names and versions, and of the Python whose grammar parses them."""
    parts = [f"{name}=={d.version}" for name, d in sorted(distributions.items())]
    return digest(f"{sys.version_info[:2]}", *parts).hex()


def harvest(distributions: dict[str, importlib.metadata.Distribution], seed: int = 0) -> Harvest:
    """All documents of 300 to 6,000 characters, exact duplicates removed (the first in order stays).

    Longer texts are divided at headings and blank lines. Per package, files are read in the order of a keyed hash until
    `DOCSTRINGS_PER_PACKAGE` docstrings are found.
    """
    skipped: Counter[str] = Counter()
    documents: list[Document] = []
    seen: set[bytes] = set()
    for name, distribution in sorted(distributions.items()):
        # Distribution.metadata parses the whole METADATA file at each use, .version too: half of the time if repeated.
        metadata = distribution.metadata
        base = f"https://pypi.org/project/{name}/{metadata['Version']}#"
        found = [
            *_description(name, base, metadata, skipped),
            *_docstrings(name, base, distribution, seed, skipped),
        ]
        for document in found:
            key = digest(document.text)
            if key in seen:
                skipped["exact duplicate"] += 1
            else:
                seen.add(key)
                documents.append(document)
    return Harvest(documents, dict(sorted(skipped.items())))


def _description(
    name: str, base: str, metadata: importlib.metadata.PackageMetadata, skipped: Counter[str]
) -> Iterator[Document]:
    payload = metadata.get_payload() if isinstance(metadata, Message) else None
    body = payload if isinstance(payload, str) and payload.strip() else metadata["Description"] or ""
    path = f"{metadata['Name'].replace('-', '_')}-{metadata['Version']}.dist-info/METADATA"
    pieces = _usable(_sections(body.replace("\r\n", "\n")), skipped)
    for number, text in pieces:
        yield Document(text, f"{base}description-{number}", path, name, "description")


def _docstrings(
    name: str, base: str, distribution: importlib.metadata.Distribution, seed: int, skipped: Counter[str]
) -> Iterator[Document]:
    paths = sorted(
        str(f) for f in distribution.files or [] if f.suffix == ".py" and not _NOT_DOCUMENTATION.search(str(f))
    )
    order = hash64(paths, seed, "demo-files").argsort(kind="stable")
    count = 0
    for path in (paths[i] for i in order):
        if count >= DOCSTRINGS_PER_PACKAGE:
            return
        for qualname, docstring in _parse(Path(str(distribution.locate_file(path))), path, skipped):
            for number, text in _usable(_paragraph_pieces(docstring), skipped):
                suffix = f"-{number}" if number > 1 else ""
                count += 1
                yield Document(text, f"{base}{qualname}{suffix}", path, name, "docstring")


def _parse(file: Path, path: str, skipped: Counter[str]) -> list[tuple[str, str]]:
    try:
        source = file.read_bytes()
    except FileNotFoundError:
        # RECORD may list what an installer or a slim image has since removed.
        skipped["file listed but absent"] += 1
        return []
    if len(source) > MAX_SOURCE_BYTES:
        skipped["source file too large"] += 1
        return []
    if not _may_document(source):
        skipped["source file without a long string"] += 1
        return []
    try:
        with warnings.catch_warnings(), _collector_paused():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        # Templates and files for another Python are shipped as .py.
        skipped["source file not parsed"] += 1
        return []
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: list[tuple[str, str]] = []
    pending: list[tuple[ast.AST, str]] = [(tree, module)]
    while pending:
        node, qualname = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                found.append((qualname, inspect.cleandoc(docstring)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if not child.name.startswith(("_", "test")):
                    pending.append((child, f"{qualname}.{child.name}"))
            elif isinstance(child, ast.If | ast.Try | ast.With):
                pending.append((child, qualname))
    return found


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A growing syntax tree holds no garbage, yet the collector walks it again and again: a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _may_document(source: bytes) -> bool:
    """Whether two neighbouring triple quotes, taken in pairs, are as far apart as a document is long.

    A third of the files fail this, and parsing is most of the export's time.
    """
    for quotes in (b'"""', b"'''"):
        parts = source.split(quotes)
        if any(len(part) >= MIN_CHARS for part in parts[1::2]):
            return True
    return False


def _usable(pieces: list[str], skipped: Counter[str]) -> Iterator[tuple[int, str]]:
    for number, piece in enumerate(pieces, 1):
        text = piece.strip()
        if len(text) < MIN_CHARS:
            skipped["shorter than 300 characters"] += 1
        elif len(text) > MAX_CHARS:
            skipped["one paragraph over 6,000 characters"] += 1
        elif not _is_utf8(text):
            skipped["lone surrogate"] += 1
        else:
            yield number, text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _paragraph_pieces(text: str, limit: int = MAX_CHARS) -> list[str]:
    """The text, or where it is over the limit, runs of whole paragraphs of at most `limit` characters."""
    if len(text) <= limit:
        return [text]
    pieces: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if pieces and len(pieces[-1]) + 2 + len(paragraph) <= limit:
            pieces[-1] += "\n\n" + paragraph
        else:
            pieces.append(paragraph)
    return pieces


def _sections(text: str) -> list[str]:
    """A description's sections by Markdown or reStructuredText headings, short ones joined with the next."""
    lines = text.split("\n")
    starts = [0]
    fenced = False
    for i, line in enumerate(lines):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and (
            _MARKDOWN_HEADING.match(line)
            or (line.strip() and i + 1 < len(lines) and _RST_UNDERLINE.match(lines[i + 1]) and "|" not in line)
        ):
            starts.append(i)
    sections = ["\n".join(lines[a:b]).strip() for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    joined: list[str] = []
    for section in filter(None, sections):
        if joined and len(joined[-1]) < MIN_SECTION_CHARS:
            joined[-1] += "\n\n" + section
        else:
            joined.append(section)
    return [piece for section in joined for piece in _paragraph_pieces(section)]
