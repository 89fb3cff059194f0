"""Web pages as subjects: a language model trained on some of them, and two references of other text.

Here: reading the shared data, the tokenizer, which page is for what. Not here: what is measured.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.documents import MINILM
from benchmarks.influence_study.subjects import REFERENCE_TOKENS, Documents, Sizes, Subject
from dagster_datamask import keyed
from dagster_datamask.influence.pretraining import pretrain
from dagster_datamask.influence.reference import Example, Kept, build_reference
from dagster_datamask.influence.tokens import encode, pack, sequences, train_tokenizer

SHARED = MINILM.parent
# the place of a subject, by its reference
REFERENCES = {"human-judged pages": 0, "WikiText-2": 1}
# characters of a page that are read: more than the model's context needs
_READ = 3000
# more than a token has on the average
_CHARACTERS = 6


def is_there() -> bool:
    return MINILM.exists()


def of_text(reference: str, sizes: Sizes, done: Callable[[int], None]) -> Subject:
    """The web pages with one of REFERENCES; its number is the seed, so that the two have a model each."""
    seed = REFERENCES[reference]
    ids, texts = pages()
    order = np.argsort(keyed.hash64(ids, seed, "study-page"), kind="stable")
    ids, texts = [ids[i] for i in order.tolist()], [texts[i] for i in order.tolist()]
    wanted = sizes.probe + sizes.test * sizes.steps + sizes.pool
    # the tokenizer and the warm-up see the pages that nothing else does
    apart = wanted + wanted // 7
    characters = np.cumsum([len(text) for text in texts[apart:]])
    trained = (sizes.warm_up + sizes.later) * sizes.batch * sizes.model.context
    enough = int(np.searchsorted(characters, _CHARACTERS * trained)) + 1
    ids, texts, rest = ids[:apart], texts[:apart], texts[apart : apart + enough]
    examples = split(reference, sizes)
    for name, some in (("pages to probe and select", texts), ("pages to train on", rest)):
        Kept.of(examples).refuse(name, ((f"page {k}", text) for k, text in enumerate(some)))
    tokenizer = train_tokenizer(rest, sizes.model.vocabulary)
    found = encode(tokenizer, ids, texts, sizes.model.context)
    # shorter pages would be told from others by their length alone
    full = np.flatnonzero(found.cut)[:wanted]
    if full.size < wanted:
        raise ValueError(f"{wanted} pages of {sizes.model.context} tokens are needed, and there are {full.size}")
    with tempfile.TemporaryDirectory(prefix="datamask-study-") as folder:
        pack(tokenizer, rest, sizes.model.context, Path(folder) / "pages.npy")
        packed = np.array(sequences(Path(folder) / "pages.npy"))
    first = sizes.warm_up * sizes.batch
    early = pretrain(
        sizes.model, packed[:first], sizes.training(seed), until=sizes.warm_up, progress=lambda *_: done(1)
    ).checkpoint
    later = pretrain(
        early,
        packed[first : first + sizes.later * sizes.batch],
        sizes.training(seed),
        until=sizes.warm_up + sizes.later,
        progress=lambda *_: done(1),
    ).checkpoint
    vectors = embeddings()
    documents = Documents(
        [found.ids[i] for i in full.tolist()],
        np.array([found.tokens[i] for i in full.tolist()]),
        np.array([vectors[found.ids[i]] for i in full.tolist()], np.float32),
    )
    a, b = sizes.probe, sizes.probe + sizes.test * sizes.steps
    return Subject(
        f"web pages, {reference}",
        reference,
        seed,
        sizes,
        early,
        later,
        build_reference(tokenizer, examples["reference"], min(REFERENCE_TOKENS, sizes.model.context)),
        build_reference(tokenizer, examples["held-out reference"], sizes.model.context),
        documents.at(slice(0, a)),
        documents.at(slice(a, b)),
        documents.at(slice(b, wanted)),
        "all-MiniLM-L6-v2",
    )


def pages() -> tuple[list[str], list[str]]:
    """(ids, beginnings of texts) of the English pages, as FineWeb keeps English alone."""
    tables = [
        pq.read_table(path, columns=["id", "text", "language"])
        for path in sorted((SHARED / "fineweb_layout/data").glob("*/*.parquet"))
    ]
    table = pa.concat_tables(tables)
    english = [
        (id_, text[:_READ])
        for id_, text, language in zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
        if language == "en"
    ]
    return [id_ for id_, _ in english], [text for _, text in english]


def embeddings() -> dict[str, np.ndarray]:
    table = pq.read_table(MINILM)
    vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)
    return dict(zip(table["id"].to_pylist(), vectors, strict=True))


def split(reference: str, sizes: Sizes) -> dict[str, list[Example]]:
    """Reference and held-out reference: documents of their own each, in a keyed order."""
    if reference == "WikiText-2":
        table = pq.read_table(SHARED / "wikitext2_valid_test.parquet", columns=["split", "text"])
        rows = list(zip(table["split"].to_pylist(), table["text"].to_pylist(), strict=True))
        halves = [[text for part, text in rows if part == name] for name in ("valid", "test")]
    else:
        table = pq.read_table(SHARED / "quality_labels.parquet", columns=["text", "label", "kind"])
        columns = (table[name].to_pylist() for name in ("text", "label", "kind"))
        good = [text for text, label, kind in zip(*columns, strict=True) if kind == "human_quality" and label == 1]
        side = keyed.hash64(good, 0, "study-reference-side") % np.uint64(2)
        halves = [[text for text, half in zip(good, side.tolist(), strict=True) if half == k] for k in (0, 1)]
    found = {}
    sets = {"reference": sizes.reference, "held-out reference": sizes.held_out}
    for (name, count), texts in zip(sets.items(), halves, strict=True):
        ranks = np.argsort(keyed.hash64(texts, 0, f"study-{name}"), kind="stable")[:count]
        found[name] = [Example(f"{reference} {i}", "", texts[i][:_READ]) for i in ranks.tolist()]
    return found
