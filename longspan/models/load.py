"""Loading a causal language model and its tokenizer, whatever form it comes in.

``load()`` runs the bundled model. A source may be a model folder, a ``.gguf`` file, or a hub id ``owner/name``; all of
them end as one local folder of safetensors that transformers reads, so the same rules hold everywhere:

* safetensors only: a folder that holds nothing but pickled weights is refused, and none is ever downloaded;
* no code from a model folder runs unless ``trust_remote_code=True``;
* the dtype follows the hardware (`default_dtype`), the device is what PyTorch finds, ``device_map`` passes through.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.block_diffusion import BlockDiffusion, ByteTokenizer, is_block_diffusion
from longspan.models.bundled import BUNDLED_NAME, BUNDLED_NAMES, bundled_gguf, converted
from longspan.models.retrofitted import read_retrofit
from longspan.registry import Refused, nearest

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
TRAINED = Path(__file__).parent / "trained"
"""What was trained here and comes with the package; a folder of it that is a model can be loaded by its name."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
_FROM_HUB = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer; unpacks as ``model, tokenizer = load()``.

    Attributes:
        model: a causal LM of transformers, or a `BlockDiffusion`, in eval mode.
        tokenizer: pads on the left and has a padding token.
        name: what the user called it, short.
        fingerprint: see `fingerprint`.
        folder: the local folder of safetensors it was read from.
    """

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str
    folder: Path

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))


def load(source: str | Path | None = None, *, dtype: torch.dtype | str | None = None,
         device: torch.device | str | None = None, device_map: Any = None, trust_remote_code: bool = False,
         cache_dir: str | Path | None = None) -> Loaded:
    """Load a causal LM and its tokenizer.

    Args:
        source: None or a name in `BUNDLED_NAMES` (the bundled model), ``"block-diffusion"`` (a small model trained here),
            a model folder, a ``.gguf`` file, or a hub id ``owner/name``. An existing path wins over a hub id;
            ``HF_HUB_OFFLINE`` is respected.
        dtype: a floating dtype or its name; ``"auto"`` as stored; by default what `default_dtype` says (float32 for a
            model that denoises blocks).
        device: where the model goes; by default the accelerator PyTorch finds, else the CPU.
        device_map: handed to accelerate (``"auto"`` or a dict); excludes `device`.
        trust_remote_code: run Python code that comes with the model.
        cache_dir: where conversions and downloads go; by default `cache_folder()` and the hub's own cache.

    Raises:
        Refused: no such model, pickled weights only, remote code that isn't asked for, or an unknown dtype.
    """
    if device is not None and device_map is not None:
        raise Refused(f"device={str(device)!r} and device_map={device_map!r} exclude each other; give one of them.")
    wanted_dtype = _as_dtype(dtype)
    folder, name = _resolve(source, trust_remote_code, None if cache_dir is None else Path(cache_dir))
    place = default_device() if device is None else torch.device(device)
    if is_block_diffusion(folder):
        return _read_block_diffusion(folder, name, wanted_dtype, place, device_map)
    if wanted_dtype is None:
        wanted_dtype = default_dtype(place)[0]
    model = (read_retrofit(folder, wanted_dtype, place, device_map)
             or _read_model(folder, name, wanted_dtype, place, device_map, trust_remote_code))
    tokenizer = _read_tokenizer(folder, name, trust_remote_code)
    return Loaded(model, tokenizer, name, fingerprint(folder), folder)


def default_device() -> torch.device:
    """The accelerator PyTorch was built for and finds, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def default_dtype(device: torch.device | str = "cpu") -> tuple[torch.dtype, str]:
    """The dtype a model runs in on `device` when none is asked for, and why in a few words."""
    kind = torch.device(device).type
    if kind == "cpu":
        can = torch.cpu.get_capabilities()
        fast = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if can.get(name)]
        if fast:
            return torch.bfloat16, f"this CPU multiplies bfloat16 in hardware ({fast[0]})"
        return torch.float32, "this CPU has no bfloat16 instructions"
    if kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float32, "this GPU has no bfloat16 arithmetic"
    return torch.bfloat16, f"an accelerator ({kind})"


def context_window(model: Any) -> int:
    """Positions the model was trained for, from its config; a tokenizer's ``model_max_length`` is often meaningless."""
    config = model.config.get_text_config(decoder=True)
    found = getattr(config, "max_position_embeddings", None)
    if found is None:
        raise Refused(f"{type(model).__name__}: its config has no max_position_embeddings, so its window is unknown.")
    return int(found)


def encode(tokenizer: Any, text: str | list[str], **options: Any) -> Any:
    """Tokenize plain text, adding special tokens only where the text doesn't already begin with BOS.

    A chat template often writes BOS itself; tokenizing what it wrote the usual way would put a second one before it.
    """
    first = text if isinstance(text, str) else (text[0] if text else "")
    has_bos = bool(tokenizer.bos_token) and first.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not has_bos, **options)


# ------------------------------------------------------------------------------------------------ from source to folder


def resolve(source: str | Path | None = None) -> tuple[Path, str]:
    """The local folder of safetensors of a model (converted or downloaded if need be), and its short name."""
    return _resolve(source, False, None)


def _resolve(source: str | Path | None, trust_remote_code: bool, cache: Path | None) -> tuple[Path, str]:
    """The local folder of safetensors that `source` names, and its short name."""
    if source is None or str(source).lower() in BUNDLED_NAMES:
        return converted(bundled_gguf(), cache), BUNDLED_NAME
    if str(source) in trained_here():
        return TRAINED / str(source), str(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _checked(_gguf_inside(path, cache), str(source)), path.resolve().name
    if path.is_file():
        return _from_file(path, cache), path.stem
    text = str(source)
    if isinstance(source, str) and _HUB_ID.fullmatch(text) and not _sibling(path):
        return _checked(_from_hub(text, trust_remote_code, cache), text), text
    raise Refused(f"model {text!r}: no such folder or file; {_suggestion(path)}")


def trained_here() -> list[str]:
    """Names of the models that were trained here and come with the package."""
    return sorted(file.parent.name for file in TRAINED.glob("*/config.json"))


def _from_file(path: Path, cache: Path | None) -> Path:
    if path.suffix.lower() == ".gguf":
        return converted(path, cache)
    if path.suffix == ".safetensors":
        raise Refused(f"{str(path)!r} is one file of a model; name its folder, {str(path.parent)!r}.")
    raise Refused(f"{str(path)!r}: expected a model folder, a .gguf file or a hub id; weights in "
                  f"{path.suffix or 'such'} files are not read, since only safetensors can't run code.")


def _gguf_inside(folder: Path, cache: Path | None) -> Path:
    """A folder that holds one GGUF file and no config stands for that file."""
    files = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").is_file() or not files:
        return folder
    if len(files) > 1:
        raise Refused(f"{str(folder)!r} holds {len(files)} GGUF files; name one of them, such as {str(files[0])!r}.")
    return converted(files[0], cache)


def _checked(folder: Path, name: str) -> Path:
    """`folder`, if it is a model in safetensors."""
    if not (folder / "config.json").is_file():
        raise Refused(f"{name!r}: no config.json in it; expected a folder with config.json and model.safetensors.")
    for base, kind in (("model", "model"), ("adapter_model", "adapter")):
        if kind == "adapter" and not (folder / "adapter_config.json").is_file():
            continue
        if (folder / f"{base}.safetensors").is_file() or (folder / f"{base}.safetensors.index.json").is_file():
            continue
        pickled = next((f.name for pattern in (f"{base}*.bin", *_PICKLED) for f in sorted(folder.glob(pattern))), None)
        if pickled is None:
            raise Refused(f"{name!r}: no {base}.safetensors in it; expected the {kind}'s weights in safetensors.")
        raise Refused(
            f"{name!r} holds its {kind} only as {pickled}, a format that can run code when it is opened; convert it "
            "where you trust it with transformers' from_pretrained(folder).save_pretrained(new_folder), which writes "
            "safetensors, and load that folder."
        )
    return folder


def _from_hub(name: str, trust_remote_code: bool, cache: Path | None) -> Path:
    """The local snapshot of a hub repository: its safetensors, configs and tokenizer, never its pickles."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = _FROM_HUB + (["*.py"] if trust_remote_code else [])
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, cache_dir=cache and cache / "hub"))
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub can't be reached"
        raise Refused(f"model {name!r}: no such folder, and no copy of the hub's is on this machine ({why}); "
                      f"give a folder, a .gguf file, or {BUNDLED_NAME!r}.") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise Refused(f"model {name!r}: no such folder, and the hub answers: {str(error).splitlines()[0]}") from error


def _sibling(path: Path) -> str | None:
    """The name most like `path`'s that exists beside where it should be."""
    try:
        names = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix.lower() == ".gguf"]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return str(path.parent / close[0]) if close else None


def _suggestion(path: Path) -> str:
    if beside := _sibling(path):
        return f"did you mean {beside!r}?"
    if close := difflib.get_close_matches(str(path).lower(), [*BUNDLED_NAMES, *trained_here()], n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    return f"expected a model folder, a .gguf file, a hub id owner/name, or {BUNDLED_NAME!r}."


# -------------------------------------------------------------------------------------------------------------- reading


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    if dtype is None or dtype == "auto":
        return dtype
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None:
        raise Refused(f"dtype {dtype!r}: {nearest(str(dtype), [*DTYPES, 'auto'], 'dtype')}")
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise Refused(f"dtype {dtype}: expected a floating dtype, one of {', '.join(DTYPES)}.")
    return found


def _read_model(folder: Path, name: str, dtype: Any, device: torch.device, device_map: Any, trust: bool) -> Any:
    from transformers import AutoModelForCausalLM

    if device_map is None and device.type != "cpu":
        device_map = {"": device}  # straight to the device, without a copy in host memory
    try:
        with _bar_only_on_a_terminal():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, device_map=device_map, use_safetensors=True, trust_remote_code=trust,
                local_files_only=not trust)
    except (ValueError, KeyError) as error:
        raise _refusal(name, error, trust) from error
    return model.eval()


def _read_tokenizer(folder: Path, name: str, trust: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=trust,
                                                  local_files_only=not trust)
    except (ValueError, KeyError, OSError) as error:
        if "trust_remote_code" in str(error):
            raise _refusal(name, error, trust) from error
        raise Refused(f"{name!r}: it has no tokenizer that can be read ({str(error).splitlines()[0]}); expected "
                      "tokenizer.json beside the weights.") from error
    if tokenizer.pad_token is None:  # any id does: padding is known from the mask, never from ids
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read_block_diffusion(folder: Path, name: str, dtype: Any, device: torch.device, device_map: Any) -> Loaded:
    """A model that denoises blocks, in float32 unless asked otherwise: it is too small for a narrower dtype to pay."""
    if device_map is not None:
        raise Refused(f"device_map={device_map!r}: {name} stands on one device; give device={str(device)!r} instead.")
    return Loaded(BlockDiffusion.load(folder, dtype, device), ByteTokenizer(), name, fingerprint(folder), folder)


@contextlib.contextmanager
def _bar_only_on_a_terminal() -> Iterator[None]:
    """transformers' progress bar helps whoever watches a big model load, and spoils every log."""
    from transformers.utils import logging

    hide = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def _refusal(name: str, error: Exception, trust: bool) -> Refused:
    if "trust_remote_code" in str(error) and not trust:
        return Refused(f"{name!r} needs Python code of its own, which is not run unless you ask for it; pass "
                       "trust_remote_code=True if you trust whoever wrote it.")
    return Refused(f"{name!r} can't be loaded as a causal language model: {str(error).splitlines()[0]}")


# ---------------------------------------------------------------------------------------------------------- fingerprint

_ROWS, _COLUMNS = 4, 64
_VOLATILE = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "auto_map", "name_or_path",
             "quantization_config"}


def fingerprint(model_or_folder: Any) -> str:
    """A key for a model's content: equal keys mean that saved caches fit.

    SHA-256 over the config (without what saving or running changes) and a sample of each weight, four rows of 64
    values rounded to bfloat16, so that the dtype a model was loaded in doesn't matter. A loaded model and its folder
    have the same key where checkpoint names are parameter names (every family with a plain layout). A change to a few
    single weights can escape the sample; training or merging can't.

    Args:
        model_or_folder: a model, or the folder of safetensors it was saved in.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(model_or_folder, (str, Path)):
        return _digest(_config_of(Path(model_or_folder)), _stored_samples(Path(model_or_folder)))
    model = model_or_folder
    kept = Path(model.config._name_or_path or "-")
    if any(p.is_meta for p in model.parameters()) and (kept / "config.json").is_file():
        return fingerprint(kept)  # weights that accelerate keeps on disk
    return _digest(model.config.to_dict(), _sampled(model))


edited_weights: dict[int, int] = {}
"""Addresses of weights that are changed for a while, and how many changes are on: a fingerprint's sample may miss them."""


def edits_digest(model: Any) -> str:
    """A key of the weights of a model that are changed for a while; empty where none is."""
    changed = [(n, p) for n, p in model.named_parameters() if not p.is_meta and p.data_ptr() in edited_weights]
    if not changed:
        return ""
    total = hashlib.sha256()
    for name, p in changed:
        total.update(name.encode())
        total.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _digest(config: dict[str, Any], samples: Iterator[tuple[str, tuple[int, ...], Tensor]]) -> str:
    stable = {k: v for k, v in config.items() if k not in _VOLATILE and not k.startswith("_")}
    stable = {k: v for k, v in stable.items() if not k.endswith("_token_id")}
    total = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
    for name, shape, values in sorted(samples, key=lambda sample: sample[0]):
        total.update(f"{name}{shape}".encode())
        total.update(values.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return total.hexdigest()


def _config_of(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except (ValueError, KeyError):  # a config class of its own, whose code we don't run for this
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _where(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The slices of the sample: a few rows along the first dimension, a short run along the last."""
    if len(shape) < 2:
        return [tuple(slice(0, _COLUMNS) for _ in shape)]
    rows = sorted({round(i * (shape[0] - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    middle = [slice(0, 1)] * (len(shape) - 2)
    return [(slice(row, row + 1), *middle, slice(0, _COLUMNS)) for row in rows]


def _sampled(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    for name, p in model.named_parameters():
        shape = tuple(p.shape)
        yield name, shape, torch.cat([p.detach()[where].flatten() for where in _where(shape)])


def _stored_samples(folder: Path) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a mapping)
                part = stored.get_slice(name)
                shape = tuple(part.get_shape())
                yield name, shape, torch.cat([part[where].flatten() for where in _where(shape)])
