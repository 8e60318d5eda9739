"""Small models with random weights, one of each family's real transformers class: `tiny("llama")`."""

from __future__ import annotations

from typing import Any

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3")
"""Every family that longspan supports by name; each has four query heads in two key-value groups."""

_CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3", "gemma": "Gemma",
    "gemma2": "Gemma2", "gemma3": "Gemma3",
}
_EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None, "pad_token_id": 0, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 20.0},
    "gemma3": {"sliding_window": 16, "query_pre_attn_scalar": 12,
               "layer_types": ["sliding_attention", "full_attention"]},
}


def tiny_config(family: str, *, layers: int = 2, hidden: int = 32, heads: int = 4, kv_heads: int = 2,
                head_dim: int = 8, vocab: int = 128, positions: int = 256, **changes: Any) -> Any:
    """The family's own config class with small numbers; `changes` go on top.

    Gemma2 and Gemma3 alternate sliding (16 tokens) and full layers, Phi3 rotates half of each head; Mistral and Phi3
    have no window unless ``sliding_window=`` is given.
    """
    import transformers

    numbers = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": positions, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }
    extra = dict(_EXTRA.get(family, {}))
    if "layer_types" in extra:
        extra["layer_types"] = [extra["layer_types"][i % 2] for i in range(layers)]
    name = _CLASSES[family] + ("TextConfig" if family == "gemma3" else "Config")
    return getattr(transformers, name)(**{**numbers, **extra, **changes})


def tiny(family: str = "llama", *, seed: int = 0, **config: Any) -> Any:
    """A causal LM of `family` with random weights from `seed`: float32, CPU, eval mode.

    Weights are larger than the usual initialisation, so that attention is far from uniform and mistakes show.
    Weights don't ask for gradients; a test that trains calls ``requires_grad_()``. Arguments are those of
    `tiny_config`. The global random state is left alone.
    """
    import transformers

    made = tiny_config(family, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{_CLASSES[family]}ForCausalLM")(made).float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.8 * weight.shape[-1] ** -0.5)
            else:
                weight.data += 0.1 * torch.randn_like(weight)
    return model.requires_grad_(False)


def tiny_ids(rows: int = 1, length: int = 24, *, vocab: int = 128, seed: int = 0) -> torch.Tensor:
    """Random token ids (rows, length), none of them special."""
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def _letters() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b if b in own else next(spare)) for b in range(256)]


TOKENS = ["<unk>", "<s>", "</s>", *_letters(), "th", "the"]
"""The vocabulary of `tiny_tokenizer`: three special tokens, every byte, and two merges."""
MERGES = ["t h", "th e"]


def tiny_tokenizer(**extra: Any) -> Any:
    """A byte-level BPE tokenizer with the `TOKENS`; give its model ``vocab=len(TOKENS)``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS)}, [tuple(m.split()) for m in MERGES]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **named, **extra)
