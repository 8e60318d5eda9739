"""FlashBlock's rule for video models: which heads read the prefix again is decided beforehand, head by head and step by step.

On a few prompts the prefix's part is computed in every step, and for each (step, layer, head) two means are noted: the
cosine between its outputs in this step and the one before, and how much its log-sum-exp changed. While a block is
denoised, a head reads the prefix again in the steps where it was found to move (cosine below 0.85, or a change above
0.05), and otherwise keeps what it has. A block's first step, its saving pass and steps beyond the calibrated ones read
everything.

    python -m longspan.decoding.denoising.flashblock_heads text.txt --out heads.safetensors
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.decoding.block_sampler import ONE_A_STEP, Sampling, denoise
from longspan.decoding.blocks import BlockReader, Denoising, Part, Prefix, PrefixPart, read_blocks
from longspan.kernels import attend
from longspan.models.block_diffusion import BlockDiffusion
from longspan.registry import Refused, knob, method

PROMPTS = 5


@method("flashblock-heads", kind="denoising", system="flashblock", paper="arXiv:2602.05305",
        summary="Keep a block's attention to the prefix in the heads and steps that a calibration found to be still.")
class FlashBlockHeads(Denoising):
    """Reuse by head (FlashBlock's rule for video). `profile` is a file that `calibrate` wrote, of the same model."""

    profile: str = knob("", "file with the calibration: python -m longspan.decoding.denoising.flashblock_heads")
    cosine: float = knob(0.85, "a head whose outputs are less alike reads the prefix again", low=-1.0, high=1.0)
    change: float = knob(0.05, "a head whose log-sum-exp changes more reads the prefix again", low=0.0)

    def begin(self, prefix: Prefix, length: int, block: int) -> BlockReader:
        found = _read(self.profile)
        if found["cosine"].shape[1] != len(prefix.k):
            raise Refused(f"flashblock-heads(profile={self.profile!r}): it is of a model with {found['cosine'].shape[1]} layers, "
                          f"this one has {len(prefix.k)}; calibrate it on this model.")
        return HeadReader(self, found, prefix, length)


@functools.lru_cache(maxsize=4)
def _read(path: str) -> dict[str, Float[Tensor, "steps L H"]]:
    if not path:
        raise Refused("flashblock-heads needs a calibration; expected flashblock-heads(profile=\"heads.safetensors\"), a file "
                      "that `python -m longspan.decoding.denoising.flashblock_heads` writes.")
    if not Path(path).is_file():
        raise Refused(f"flashblock-heads(profile={path!r}): no such file; expected one that "
                      "`python -m longspan.decoding.denoising.flashblock_heads` wrote.")
    found = load_file(path)
    if set(found) != {"cosine", "change"} or found["cosine"].ndim != 3 or found["cosine"].shape != found["change"].shape:
        raise Refused(f"flashblock-heads(profile={path!r}): not a calibration; expected a file that "
                      "`python -m longspan.decoding.denoising.flashblock_heads` wrote.")
    return found


class HeadReader(BlockReader):
    """One block's kept parts, of which some heads are computed anew in every step."""

    def __init__(self, method: FlashBlockHeads, found: dict[str, Tensor], prefix: Prefix, length: int) -> None:
        super().__init__(prefix, length)
        self.moves = (found["cosine"] < method.cosine) | (found["change"] > method.change)

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        kept = self.parts[layer]
        if kept is not None:
            kept.check(q)
        if kept is None or self.save or self.step >= len(self.moves):
            part = self.fresh(layer, q)
            if not self.save:
                self.parts[layer] = PrefixPart(*part)
            return part
        moves = self.moves[self.step, layer].to(q.device)
        if moves.shape[0] != q.shape[1]:
            raise ValueError(f"the calibration is of {moves.shape[0]} query heads, the queries have {q.shape[1]}")
        k, v = self.prefix.k[layer], self.prefix.v[layer]
        wanted = moves.view(k.shape[1], -1)  # a key-value head is read when any of its query heads moves
        read = wanted.any(1).nonzero()[:, 0]
        if len(read):
            grouped = q.unflatten(1, wanted.shape)[:, read].flatten(1, 2)
            valid = self.prefix.valid
            out, lse = attend(grouped, k[:, read], v[:, read], causal=False, mask=None if valid is None else valid[:, None, None])
            self.count(len(read) * (k.shape[0] * k.shape[2] - int(self.prefix.padding.sum())))
            heads = torch.arange(len(moves), device=q.device).view(wanted.shape)[read].flatten()
            kept.o[:, heads[moves[heads]]] = out[:, moves[heads]].to(kept.o.dtype)
            kept.lse[:, heads[moves[heads]]] = lse[:, moves[heads]]
        return kept.o, kept.lse


class _Noting(Denoising):
    """Dense denoising that sums up how far every head moves."""

    def __init__(self) -> None:
        self.readers: list[_NotingReader] = []

    def begin(self, prefix: Prefix, length: int, block: int) -> BlockReader:
        self.readers.append(_NotingReader(prefix, length))
        return self.readers[-1]


class _NotingReader(BlockReader):
    def __init__(self, prefix: Prefix, length: int) -> None:
        super().__init__(prefix, length)
        self.before: dict[int, Part] = {}
        self.cosine: list[list[Tensor]] = []
        self.change: list[list[Tensor]] = []

    def begin(self, step: int, save: bool = False) -> None:
        super().begin(step, save)
        self.cosine.append([])
        self.change.append([])

    def part(self, layer: int, q: Float[Tensor, "B H T D"]) -> Part:
        out, lse = self.fresh(layer, q)
        if layer in self.before:
            old, old_lse = self.before[layer]
            self.cosine[-1].append(torch.cosine_similarity(out, old, dim=-1).mean((0, 2)))
            self.change[-1].append((lse - old_lse).abs().mean((0, 2)))
        self.before[layer] = (out, lse)
        return out, lse


def calibrate(model: BlockDiffusion, prefixes: Sequence[Prefix],
              sampling: Sampling = ONE_A_STEP) -> dict[str, Float[Tensor, "steps L H"]]:
    """Mean cosine of outputs and mean change of log-sum-exp between neighbouring steps, by step, layer and head.

    The first step has no neighbour: 0 and infinity there. Steps that not every prompt took are left out.

    Raises:
        Refused: no prompt, or one without a whole block.
    """
    if not prefixes or any(not p.length for p in prefixes):
        raise Refused("a calibration needs prompts of at least one block each, such as five of them.")
    noting, block = _Noting(), model.config.block
    for prefix in prefixes:
        masks = torch.full((prefix.rows, block), model.config.mask_id, device=model.device)
        denoise(model, prefix, masks, noting, sampling, finish=False)
    steps = min(len(r.cosine) for r in noting.readers)
    means = {name: torch.stack([torch.stack([torch.stack(getattr(r, name)[t]) for r in noting.readers]).mean(0)
                                for t in range(1, steps)]).cpu() for name in ("cosine", "change")}
    first = {"cosine": 0.0, "change": torch.inf}
    return {name: torch.cat([torch.full_like(t[:1], first[name]), t]) for name, t in means.items()}


def main(words: Sequence[str] | None = None) -> None:
    """Calibrate a block-diffusion model on pieces of a text file."""
    from longspan.models import load

    parser = argparse.ArgumentParser(prog="python -m longspan.decoding.denoising.flashblock_heads", description=main.__doc__)
    parser.add_argument("text", type=Path, help="UTF-8 text the prompts are cut from")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--model", default="block-diffusion", help="block-diffusion, or a folder")
    given = parser.parse_args(words)
    loaded = load(given.model)
    model, block = loaded.model, loaded.model.config.block
    ids = loaded.tokenizer(given.text.read_text(encoding="utf-8"))["input_ids"]
    length = min(model.config.window - block, len(ids) // PROMPTS) // block * block
    starts = [i * len(ids) // PROMPTS for i in range(PROMPTS)]
    pieces = torch.tensor([ids[start : start + length] for start in starts], dtype=torch.long, device=model.device)
    save_file(calibrate(model, [read_blocks(model, Prefix.empty(model), piece[None]) for piece in pieces]), given.out)
    print(given.out)


if __name__ == "__main__":
    main()
