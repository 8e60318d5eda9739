"""A small block-diffusion language model: bytes are written block by block, each block by denoising.

Text is cut into blocks of B tokens. A block attends in both directions inside itself and to all blocks before it, never
to later ones. While a block is written its unknown tokens are a mask token, and the model says at every position which
byte stands there; what it is sure of is committed, and the block is read again. A finished block is read once more, and
its keys and values join the frozen prefix (block diffusion: Arriola et al., arXiv:2503.09573; SDAR, arXiv:2510.06303).

In training every sequence is read twice in one row, [noised; clean] with equal positions: noised block b sees itself and
the clean blocks before it, clean block b sees the clean blocks up to itself. That is what writing sees, for all blocks
at once.

The model knows nothing of prefixes: whoever calls it says how a layer's queries attend.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longspan.kernels import attend
from longspan.layers.positions import inverse_frequencies, rotate
from longspan.models.decoder import CONFIG_FILE, WEIGHTS_FILE, SwiGLU
from longspan.registry import Refused, nearest

MODEL_TYPE = "longspan-block-diffusion"
"""What ``config.json`` says of such a model."""
BYTES = 256

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attention(layer, q, k, v) -> out``: how the queries (B,H,T,D) of a layer attend, given the same tokens' keys and
values (B,Hkv,T,D); `out` is like `q`."""


@dataclass(frozen=True)
class BlockDiffusionConfig:
    """Sizes of the model. `window` is the length it was trained on; the mask token's id is `vocab_size`."""

    block: int = 16
    dim: int = 96
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 4
    mlp_dim: int = 256
    window: int = 256
    vocab_size: int = BYTES
    theta: float = 10_000.0
    eps: float = 1e-6
    name_or_path: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise Refused(f"block diffusion: {field.name}={value!r}; expected a whole number of at least 1.")
        if self.dim % self.n_heads or self.n_heads % self.n_kv_heads:
            raise Refused(f"block diffusion: dim={self.dim}, n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}; expected "
                          "each to be a multiple of the next.")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def mask_id(self) -> int:
        """The token that stands for what isn't written yet."""
        return self.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """The window under the name that transformers gives it."""
        return self.window

    @property
    def _name_or_path(self) -> str:
        return self.name_or_path

    def get_text_config(self, decoder: bool = True) -> Self:
        """The config itself, as transformers' text models have it."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        found = dataclasses.asdict(self)
        del found["name_or_path"]
        return {"model_type": MODEL_TYPE} | found

    @classmethod
    def from_dict(cls, data: dict[str, Any], name_or_path: str = "") -> Self:
        """The config that `to_dict` wrote. Raises `Refused` for another kind of model and for unknown entries."""
        if data.get("model_type") != MODEL_TYPE:
            raise Refused(f"model_type={data.get('model_type')!r}: expected {MODEL_TYPE!r}.")
        known = {f.name for f in dataclasses.fields(cls)} - {"name_or_path"}
        given = {k: v for k, v in data.items() if k != "model_type"}
        for name in given:
            if name not in known:
                raise Refused(f"block diffusion config: {nearest(name, known, 'entry')}")
        return cls(**given, name_or_path=name_or_path)


@dataclass(frozen=True, eq=False)
class Denoised:
    """What one pass over some tokens found."""

    logits: Float[Tensor, "B T V"]
    """Of the byte at each position, not the one after it; never of the mask."""
    k: list[Float[Tensor, "B Hkv T D"]]
    """Per layer, rotated to their positions: what joins the prefix if these tokens stay."""
    v: list[Float[Tensor, "B Hkv T D"]]


class BlockLayer(nn.Module):
    """One pre-norm layer: attention as the caller has it, then a gated MLP."""

    def __init__(self, config: BlockDiffusionConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_dim, kv = index, config.head_dim, config.n_kv_heads * config.head_dim
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.dim, eps=config.eps) for _ in range(2))
        self.q_proj, self.o_proj = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(config.dim, kv, bias=False) for _ in range(2))
        self.mlp = SwiGLU(config.dim, config.mlp_dim)

    def forward(self, x: Float[Tensor, "B T C"], places: Int[Tensor, "B T"], inv_freq: Float[Tensor, " half"],
                attention: Attention) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B Hkv T D"], Float[Tensor, "B Hkv T D"]]:
        normed = self.attention_norm(x)
        q, k, v = (self._heads(project(normed)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, places, inv_freq), rotate(k, places, inv_freq)
        out = attention(self.index, q, k, v)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x)), k, v

    def _heads(self, x: Float[Tensor, "B T HD"]) -> Float[Tensor, "B H T D"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class BlockDiffusion(nn.Module):
    """A block-diffusion language model over bytes."""

    denoises_blocks: ClassVar[bool] = True
    """Says to shared code that this model writes block by block, and has no hook for caches and selectors."""

    def __init__(self, config: BlockDiffusionConfig | None = None) -> None:
        super().__init__()
        self.config = config or BlockDiffusionConfig()
        self.embed = nn.Embedding(self.config.vocab_size + 1, self.config.dim)
        self.layers = nn.ModuleList(BlockLayer(self.config, i) for i in range(self.config.n_layers))
        self.norm = nn.RMSNorm(self.config.dim, eps=self.config.eps)
        self.head = nn.Linear(self.config.dim, self.config.vocab_size, bias=False)
        self._inv_freq = inverse_frequencies(self.config.head_dim, self.config.theta)  # float64, whatever the weights are

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def forward(self, ids: Int[Tensor, "B T"], places: Int[Tensor, "B T"], attention: Attention) -> Denoised:
        """One pass over tokens that stand at `places`, attending as `attention` says.

        Raises ValueError when the shapes don't fit or there is no token.
        """
        if ids.ndim != 2 or not ids.shape[1] or ids.shape != places.shape:
            raise ValueError(f"expected ids and places (B,T) with T >= 1, got {tuple(ids.shape)} and {tuple(places.shape)}")
        x, inv_freq, ks, vs = self.embed(ids), self._inv_freq.to(ids.device), [], []
        for layer in self.layers:
            x, k, v = layer(x, places, inv_freq, attention)
            ks.append(k)
            vs.append(v)
        return Denoised(self.head(self.norm(x)), ks, vs)

    def noised_logits(self, noised: Int[Tensor, "B T"], clean: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits of the noised half of [noised; clean]: every block as writing sees it, all at once."""
        time = clean.shape[1]
        places = torch.arange(time, device=clean.device).repeat(2).expand(len(clean), -1)
        mask = training_mask(time, self.config.block, clean.device)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, causal=False, mask=mask, return_lse=False)[0]

        return self(torch.cat([noised, clean], 1), places, attention).logits[:, :time]

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write ``model.safetensors`` (in `dtype`, by default the weights' own) and ``config.json`` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().to("cpu", dtype or p.dtype).contiguous() for name, p in self.named_parameters()}
        save_file(weights, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype | str | None = None,
             device: torch.device | str | None = None) -> Self:
        """The model that `save` wrote, in evaluation mode; float32 unless another `dtype` is asked for (``"auto"``: as stored).

        Raises:
            Refused: the folder holds none, or weights of other shapes.
        """
        folder = Path(folder)
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
        if missing:
            raise Refused(f"{str(folder)!r}: no {missing[0]} there; expected a folder that BlockDiffusion.save wrote.")
        data = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        with torch.random.fork_rng(devices=[]):  # the initial weights are thrown away; the caller's dice stay put
            model = cls(BlockDiffusionConfig.from_dict(data, str(folder)))
        weights = load_file(folder / WEIGHTS_FILE)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            why = str(error).strip().splitlines()[-1].strip()
            raise Refused(f"{str(folder)!r}: the weights don't fit config.json ({why}).") from error
        wanted: Any = weights["embed.weight"].dtype if dtype == "auto" else dtype or torch.float32
        return model.to(device=device, dtype=wanted).eval()


def is_block_diffusion(folder: Path) -> bool:
    """Whether a model folder holds a block-diffusion model."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return False
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("model_type") == MODEL_TYPE
    except (ValueError, AttributeError):  # whoever reads the config next says what is wrong with it
        return False


def block_mask(time: int, block: int, device: torch.device | str | None = None) -> Bool[Tensor, "T T"]:
    """True where a token may look: everywhere in its own block and in the blocks before it."""
    number = torch.arange(time, device=device) // block
    return number[None] <= number[:, None]


def training_mask(time: int, block: int, device: torch.device | str | None = None) -> Bool[Tensor, "2T 2T"]:
    """Who sees whom in [noised; clean]: noised block b sees itself and clean blocks < b, clean block b clean blocks <= b."""
    number = torch.arange(time, device=device) // block
    same, before = number[None] == number[:, None], number[None] < number[:, None]
    return torch.cat([torch.cat([same, before], 1), torch.cat([torch.zeros_like(same), same | before], 1)], 0)


class ByteTokenizer:
    """UTF-8 bytes as tokens, with the methods of a transformers tokenizer that this package calls."""

    vocab_size = BYTES
    is_fast = False
    padding_side = "left"
    chat_template = bos_token = bos_token_id = eos_token = eos_token_id = pad_token = pad_token_id = None

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], **options: Any) -> dict[str, Any]:
        """``{"input_ids": …}`` of a text or of several. Options are taken and change nothing: there are no special tokens."""
        return {"input_ids": self.encode(text) if isinstance(text, str) else [self.encode(t) for t in text]}

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Any, **options: Any) -> str:
        """Text of a list or tensor of ids; bytes that are no valid UTF-8 become replacement characters."""
        found = ids.tolist() if isinstance(ids, Tensor) else ids
        return bytes(int(i) for i in ([found] if isinstance(found, int) else found)).decode("utf-8", errors="replace")
