"""The declared schema of every file, and the check of a source shard against FineWeb's columns.

Only names, types and their check belong here; reading is `source`'s and writing is `writer`'s.
"""

from collections.abc import Iterable

import pyarrow as pa

DECISIONS = (
    "kept",
    "not_selected",
    "pruned",
    "duplicate",
    "contaminated",
    "unscored",
    "bad_embedding",
    "bad_row",
)

RAW = pa.schema(
    [
        ("doc_id", pa.string()),
        ("row", pa.int64()),
        ("decision", pa.string()),
        ("reason", pa.string()),
        ("token_count", pa.int64()),
    ]
)
SCORES = pa.schema([("doc_id", pa.string()), ("score", pa.float64()), ("reason", pa.string())])
# one row a document: its text's hash, null where raw_shards decided of it already, and the document kept instead of it
TEXT_DUPLICATES = pa.schema(
    [
        ("doc_id", pa.string()),
        ("text_hash", pa.binary(16)),
        ("kept_id", pa.string()),
        ("kept_snapshot", pa.string()),
    ]
)
# one row a contaminated document: its first match, as characters of its text and as words
CONTAMINATED = pa.schema(
    [
        ("doc_id", pa.string()),
        ("evaluation_set", pa.string()),
        ("item", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("words", pa.string()),
    ]
)
# stage: the asset that decided
PRUNED = pa.schema(
    [
        ("doc_id", pa.string()),
        ("quality", pa.float64()),
        ("decision", pa.string()),
        ("stage", pa.string()),
        ("reason", pa.string()),
    ]
)
CLUSTERS = pa.schema([("doc_id", pa.string()), ("cluster", pa.int32()), ("similarity", pa.float64())])
# spans: bytes [start, end) of the text that an earlier one has, to be cut out; bytes: of the whole text
SUBSTRINGS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("spans", pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64())]))),
        ("bytes", pa.int64()),
        ("removed_bytes", pa.int64()),
        ("removed_tokens", pa.int64()),
        ("first_doc", pa.string()),
        ("reason", pa.string()),
    ]
)
NEAR_DUPLICATES = pa.schema(
    [
        ("doc_id", pa.string()),
        ("kept_id", pa.string()),
        ("similarity", pa.float64()),
        ("cluster", pa.int32()),
    ]
)
MASKS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("selected", pa.bool_()),
        ("score", pa.float64()),
        ("rank", pa.int64()),
        ("split", pa.int32()),
        ("reason", pa.string()),
        ("kept_id", pa.string()),
        ("similarity", pa.float64()),
    ]
)
MANIFEST = pa.schema(
    [
        ("doc_id", pa.string()),
        ("snapshot", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int64()),
        ("strategy", pa.string()),
        ("decision", pa.string()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("dclm", pa.float64()),
        ("edu", pa.float64()),
        ("wiki", pa.float64()),
        ("quality", pa.float64()),
        ("cluster", pa.int32()),
        ("split", pa.int32()),
        ("score", pa.float64()),
        ("token_count", pa.int64()),
    ]
)
# what fineweb_mask adds to the source's own columns, and from which column of the manifest
ADDED = {
    "doc_id": "doc_id",
    "dclm": "dclm",
    "edu": "edu",
    "wiki": "wiki",
    "quality": "quality",
    "cluster": "cluster",
    "split": "split",
    "mask_score": "score",
}
QUARANTINED = pa.schema([("shard", pa.string()), ("reason", pa.string())])


def embeddings(dimension: int) -> pa.Schema:
    """doc_id, a unit float16 vector (null where there is none) and why there is none."""
    return pa.schema(
        [
            ("doc_id", pa.string()),
            ("embedding", pa.list_(pa.float16(), dimension)),
            ("reason", pa.string()),
        ]
    )


def check_source(path: str, schema: pa.Schema) -> None:
    """Raise BadShard unless `schema` has a text column, and the known columns it has are of usable types.

    Extra columns pass through; a missing `id` or `token_count` is filled later (CONTRACT: Documents).
    """
    kinds = {"text": _is_text, "id": _is_text, "token_count": pa.types.is_integer}
    if "text" not in schema.names:
        raise BadShard(path, f"has no column 'text'; its columns are: {', '.join(schema.names) or 'none'}")
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise BadShard(path, f"has the column {name!r} more than once")
    for name, fits in kinds.items():
        if name in schema.names and not fits(schema.field(name).type):
            wanted = "an integer" if name == "token_count" else "text"
            raise BadShard(path, f"column {name!r} is {schema.field(name).type}, not {wanted}")


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema without encodings: dictionaries as their values, views as the types they are views of.

    So a column means the same whether a shard's writer encoded it or not.
    """
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def joined(found: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """The schema of fineweb_mask: the union of the shards' (path, plain schema), and the columns that are added.

    `text` and `id` are strings, whatever a shard calls them.
    Raises ColumnClash where a shard has a column of an added name, or of another type than the shards before it.
    """
    own = pa.schema([])
    for path, schema in found:
        for name in schema.names:
            if name in ADDED:
                raise ColumnClash(f"{path}: already has a column {name!r}, which fineweb_mask adds; rename it there")
        try:
            text = pa.schema([_as_text(field) for field in schema])
            own = pa.unify_schemas([own, text], promote_options="permissive")
        except pa.ArrowTypeError as error:
            raise ColumnClash(
                f"{path}: has another column type than the shards before it ({error}); give the shards one type"
            ) from error
    return pa.schema([*own, *(pa.field(name, MANIFEST.field(column).type) for name, column in ADDED.items())])


def _as_text(field: pa.Field) -> pa.Field:
    if field.name not in ("text", "id"):
        return field
    if pa.types.is_large_binary(field.type):
        return field.with_type(pa.large_string())
    return field.with_type(pa.string()) if pa.types.is_binary(field.type) else field


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_string(value)
        or pa.types.is_large_string(value)
        or pa.types.is_string_view(value)
        or pa.types.is_binary(value)
        or pa.types.is_large_binary(value)
        or pa.types.is_binary_view(value)
        or pa.types.is_null(value)
    )


class BadShard(ValueError):
    """A source shard that cannot be read as what it should be; `path` and `why` stand in the message."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(
            f"{path}: {why}. Replace or remove the file, or set source.on_bad_shard = 'quarantine' to set it aside"
        )


class ColumnClash(ValueError):
    """Columns of a snapshot's shards that cannot stand in one table; no shard alone is to blame."""


class InconsistentFiles(RuntimeError):
    """Two files that should speak of the same documents do not."""


class ShardReplaced(InconsistentFiles):
    """A shard changed while it was read: reading what is there now may go well."""
