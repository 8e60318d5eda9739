"""Plain decoding: one token after another, most likely first. Every faster way of writing is compared with this."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.models.hook import cache_keyword


@dataclass
class Generated:
    """Tokens written, and what they took."""

    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """From the first token (which the prompt's logits give) to the last."""
    stopped: bool = False
    """Whether an end token or a stop text ended it."""
    passes: int = 0
    """Calls of the model."""
    proposed: int = 0
    """Drafted tokens that were checked, and how many of them stood."""
    accepted: int = 0

    @property
    def written(self) -> dict[str, int | float]:
        """How it was written, for result rows."""
        found: dict[str, int | float] = {"passes": self.passes}
        if self.proposed:
            found |= {"proposed": self.proposed, "accepted": self.accepted,
                      "tokens_per_pass": len(self.ids) / max(1, self.passes)}
        return found


@torch.inference_mode()
def read(model: nn.Module, ids: Int[Tensor, "B T"], cache: Any, *, last: int = 1) -> Float[Tensor, "B last V"]:
    """Read tokens on top of `cache`; logits of the `last` positions, float32."""
    out = model(input_ids=ids, **{cache_keyword(model): cache}, use_cache=True, logits_to_keep=last)
    return out.logits[:, -last:].float()


def greedy(model: nn.Module, cache: Any, logits: Float[Tensor, "1 V"], max_new_tokens: int, end_ids: Sequence[int],
           stop: Sequence[str] = (), tokenizer: Any = None) -> Generated:
    """Write greedily after a prompt that `cache` has read and whose next-token logits are given.

    Args:
        end_ids: tokens that end the answer (not part of it).
        stop: texts that end the answer, found in the decoded text; need a tokenizer.
    """
    done = Generated()
    start = time.perf_counter()
    for _ in range(max_new_tokens):
        token = int(logits.argmax(-1))
        if token in end_ids:
            done.stopped = True
            break
        done.ids.append(token)
        if stop and any(s in tokenizer.decode(done.ids) for s in stop):
            done.stopped = True
            break
        if len(done.ids) < max_new_tokens:
            logits = read(model, torch.tensor([[token]], device=logits.device), cache)[:, 0]
            done.passes += 1
    done.seconds = time.perf_counter() - start
    return done


def token_nlls(model: nn.Module, cache: Any, logits: Float[Tensor, "1 V"], ids: Sequence[int],
               chunk: int | None = None) -> list[float]:
    """Negative log-likelihood of each token of a given continuation, in nats, teacher forced.

    Args:
        logits: of the token before the first one.
        chunk: tokens read at a time; all at once when None. A bounded cache that compresses as it goes needs pieces.
    """
    if not ids:
        return []
    step = chunk or len(ids)
    target = torch.tensor([list(ids)], device=logits.device)
    found, previous = [], logits[:, None]
    for start in range(0, len(ids), step):
        piece = target[:, start : start + step]
        # The last token's own logits are needed only if more follows.
        after = read(model, piece, cache, last=piece.shape[1])
        scores = torch.cat([previous, after[:, :-1]], 1).log_softmax(-1)
        found += (-scores.gather(-1, piece[..., None])[0, :, 0]).tolist()
        previous = after[:, -1:]
    return found


def end_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Tokens that end an answer, from the model's generation config and the tokenizer."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return sorted({i for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None})
