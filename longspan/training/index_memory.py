"""Training IndexMem's indexers and memories (arXiv:2605.25475) on a frozen model.

Texts are read once; what training needs of every layer is noted, so that the model itself never runs in a loop.

1. *Indexer*. The teacher says of every token t what any row and head looked at it with at most,
   T_t = max over s >= t and h of q_s^h . k_t^h * scale. The indexer's importance imp_t is brought close to it:

       L_index = KL( softmax_t(T) || softmax_t(imp) ),   the first four positions left out of both

   Parts of a text count as texts too. Indexers learn training texts by heart soon, so the state that is best on texts
   held out is taken.
2. *Memory*. The text is cut; of what lies before, the indexer evicts a share r. The rows after the cut
   attend to everything (o_full) and to what is left (o_kept); what the memory adds should make up the difference:

       L_mem = mean |o_full - o_kept - g(q) m(q)|^2 over those rows and all heads

   Choosing the top entries is no differentiable step, so this loss sends nothing to the indexer, and the two are
   trained one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longspan.cache import top_mask
from longspan.cache.index_memory import (
    SINKS,
    Indexer,
    Memory,
    deciding_rows,
    index_scores,
    memory_name,
    paired_scores,
    pooled_max,
    read,
    written,
)
from longspan.kernels import attend
from longspan.registry import Refused
from longspan.training.base import Batch, Outcome
from longspan.training.config import TrainConfig
from longspan.training.layer_notes import LayerText, groups_of, note, seeing_layers
from longspan.training.loop import train as train_loop

INDEXER = TrainConfig(steps=300, lr=1e-2, warmup=20, final_lr=0.01, weight_decay=0.05, betas=(0.9, 0.99), accumulate=4,
                      log_every=20)
MEMORY = TrainConfig(steps=200, lr=1e-2, final_lr=0.01, weight_decay=0.0, betas=(0.9, 0.99), accumulate=4, log_every=200)
EVICTED = (0.25, 0.5, 0.75, 0.9)
"""Shares that memories are trained with."""
PARTS_READ = (0.5, 0.75, 1.0)
"""How much of a text an indexer has read when it is compared with its teacher; the teacher of a part is another one."""
CUTS = (0.5, 0.875)
"""Where texts are cut for memories."""
HELD_OUT = 8
"""One text in so many isn't trained on: it says which of an indexer's states was best."""
GATE_BIAS = -4.0
"""Memories start nearly closed."""
LATER_ROWS = 256
"""Most query rows of a text that a memory is trained on."""
STORED = torch.float16
Progress = Callable[[int, int, str], None]


def train(model: Any, texts: Sequence[Sequence[int]], methods: Iterable[Any], found: dict[str, Tensor], *, again: bool = False,
          seed: int = 0, progress: Progress | None = None, indexer: TrainConfig = INDEXER,
          memory: TrainConfig = MEMORY) -> dict[str, Tensor]:
    """Train what `methods` need of a model's weights and `found` doesn't hold.

    Args:
        model: a causal LM; nothing in it changes.
        texts: token ids.
        methods: methods with ``profile_tensors()``.
        found: weights of an earlier training; what isn't trained now is taken over.
        again: train also what `found` holds.

    Returns:
        All weights by name, stacked over the layers that see the whole text, in float16.

    Raises:
        Refused: texts too short to evict anything of, or no layer sees them whole.
    """
    check_texts(texts)
    names = {name.split(".")[0] for method in methods for name in method.profile_tensors()} - {"layers"}
    layers = seeing_layers(model, texts[0])
    if found and found["layers"].tolist() != layers:
        found = {}
    have = {name.split(".")[0] for name in found}
    wanted = names if again else names - have
    if "indexer" not in have:
        wanted = wanted | {"indexer"}
    rows: list[dict[str, Tensor]] = []
    for group in groups_of(model, layers, texts):
        noted = note(model, texts, group)
        for layer in group:
            if progress is not None:
                progress(len(rows), len(layers), f"layer {layer}")
            rows.append(_train_layer(noted.pop(layer), wanted, found, len(rows), seed + 1000 * layer, indexer, memory))
    if progress is not None:
        progress(len(layers), len(layers), "")
    fresh = {name: torch.stack([row[name] for row in rows]).to(STORED).cpu() for name in rows[0]}
    return {"layers": torch.tensor(layers)} | {n: t for n, t in found.items() if n != "layers"} | fresh


def _train_layer(texts: list[LayerText], wanted: set[str], found: dict[str, Tensor], at: int, seed: int, indexer: TrainConfig,
                 memory: TrainConfig) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    if "indexer" in wanted:
        own = len(texts) - len(texts) // HELD_OUT
        chosen = fit_indexer(texts[:own], *indexer_size(texts[0]), replace(indexer, seed=seed), held_out=texts[own:])
        out |= {f"indexer.{n}": getattr(chosen, n) for n in ("query", "key", "gate")}
    else:
        chosen = Indexer(*(found[f"indexer.{n}"][at].to(texts[0].k.device, torch.float32) for n in ("query", "key", "gate")))
    for per_head in (False, True):
        name = memory_name(per_head)
        if name in wanted:
            cases = [case for text in texts for cut in CUTS for case in cases_of(text, chosen, cut=int(cut * text.length))]
            made = fit_memory(cases, replace(memory, seed=seed), per_head)
            out |= {f"{name}.{n}": getattr(made, n) for n in ("weight", "gate_weight", "gate_bias")}
    return out


def check_texts(texts: Sequence[Sequence[int]]) -> None:
    """Refuse texts that leave nothing to choose from."""
    least = min((len(ids) for ids in texts), default=0)
    if least < 8 * SINKS:
        raise Refused(f"{len(texts)} texts, the shortest of {least} tokens, are too little to train on; expected at least one, "
                      f"and {8 * SINKS} tokens in each.")


def indexer_size(text: LayerText) -> tuple[int, int]:
    """(H_i, d_i) = (max(1, round(Hq/4)), max(8, D/8))."""
    return max(1, round(text.q.shape[0] / 4)), max(8, text.q.shape[2] // 8)


# ------------------------------------------------------------------------------------------------------------- indexer


@torch.no_grad()
def teacher(text: LayerText) -> Float[Tensor, " N"]:
    """The most that any row and head looks at each token with, before the softmax, (float32)."""
    group = text.q.shape[0] // text.k.shape[0]
    k = text.k.float().repeat_interleave(group, 0)

    def block(r: slice, c: slice) -> Tensor:
        logits = text.q[:, r].float() @ k[:, c].mT * text.scale
        if text.softcap is not None:
            logits = text.softcap * torch.tanh(logits / text.softcap)
        return logits.amax(0, keepdim=True)

    return pooled_max(block, _causal(text), text.length, text.length)[0]


@torch.no_grad()
def importance(text: LayerText, indexer: Indexer) -> Float[Tensor, " N"]:
    """What the indexer says of every token after reading the text."""
    q, gates, k = _projected(text, indexer)
    N = text.length
    return pooled_max(lambda r, c: index_scores(q[:, r], gates[:, r], k[:, c]), _causal(text), N, N)[0]


def index_loss(wanted: Float[Tensor, "*B N"], found: Float[Tensor, "*B N"], n_sink: int = SINKS) -> Float[Tensor, "*B"]:
    """KL( softmax(wanted) || softmax(found) ) over all tokens but the first `n_sink`, in nats."""
    goal = wanted[..., n_sink:].float().log_softmax(-1)
    return (goal.exp() * (goal - found[..., n_sink:].float().log_softmax(-1))).sum(-1)


def _projected(text: LayerText, indexer: Indexer) -> tuple[Tensor, Tensor, Tensor]:
    hidden = text.hidden[None]
    return indexer.queries(text.flat[None]), indexer.gates(hidden), indexer.keys(hidden)


def _causal(text: LayerText) -> Callable[[slice, slice], Bool[Tensor, "1 t s"]]:
    at = torch.arange(text.length, device=text.k.device)
    return lambda r, c: (at[c] <= at[r, None])[None]


class IndexerModule(nn.Module):
    """An indexer's weights while they are trained."""

    def __init__(self, heads: int, width: int, queries: int, channels: int, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=g) * shape[-1] ** -0.5)  # noqa: E731
        self.query, self.key, self.gate = draw(heads, width, queries), draw(width, channels), draw(heads, channels)

    def indexer(self) -> Indexer:
        return Indexer(self.query, self.key, self.gate)


def fit_indexer(texts: Sequence[LayerText], heads: int, width: int, config: TrainConfig = INDEXER, *,
                held_out: Sequence[LayerText] = ()) -> Indexer:
    """Train one layer's indexer on noted texts; of its states, every `log_every` steps, the best on `held_out`, if given."""
    one = texts[0]
    module = IndexerModule(heads, width, one.q.shape[0] * one.q.shape[2], one.hidden.shape[1], config.seed).to(one.k.device)
    parts = [text.first(int(share * text.length)) for text in texts for share in PARTS_READ]
    goals = [teacher(part) for part in parts]
    order = _order(len(parts), config)
    judges = [(text, teacher(text)) for text in held_out]
    best: tuple[float, dict[str, Tensor]] = (float("inf"), {})

    def objective(model: Any, batch: Batch, state: Any = None) -> Outcome:
        at = order[batch.index]
        found = trained_importance(parts[at], model.indexer())
        return Outcome(index_loss(goals[at], found), 1.0)

    def judge(step: int, metrics: dict[str, float]) -> None:
        nonlocal best
        loss = sum(float(index_loss(goal, importance(text, module.indexer()))) for text, goal in judges)
        if loss < best[0]:
            best = loss, {n: t.detach().clone() for n, t in module.state_dict().items()}

    train_loop(module, lambda i: _batch(parts[order[i]]), config, objective, progress=judge if judges else None)
    module.load_state_dict(best[1] or module.state_dict())
    made = module.indexer()
    return Indexer(made.query.detach(), made.key.detach(), made.gate.detach())


def trained_importance(text: LayerText, indexer: Indexer) -> Float[Tensor, " N"]:
    """`importance` with gradients: only each token's deciding row is computed again."""
    with torch.no_grad():
        q, gates, k = _projected(text, indexer)
        rows = deciding_rows(lambda r, c: index_scores(q[:, r], gates[:, r], k[:, c]), _causal(text), text.length, text.length)[0]
    hidden = text.hidden[None]
    # Keys without the rounding to the model's dtype, which has no useful gradient.
    keys = indexer.keys(hidden.float())
    return paired_scores(indexer.queries(text.flat[None, :, rows]), indexer.gates(hidden[:, rows]), keys)[0]


def _order(n: int, config: TrainConfig) -> list[int]:
    """Which text each batch is: all of them in a new order, again and again."""
    g = torch.Generator().manual_seed(config.seed)
    passes = -(-config.steps * config.accumulate // n)
    return torch.cat([torch.randperm(n, generator=g) for _ in range(passes)]).tolist()


def _batch(text: LayerText) -> Batch:
    """A batch that stands for a text: the objective reads the notes themselves."""
    ids = torch.zeros(1, text.length, dtype=torch.int64)
    return Batch(ids, ids)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, eq=False)
class Case:
    """One eviction: what is written, who reads, and what the reading should give."""

    k: Float[Tensor, "1 H E D"]
    """Before rotation."""
    v: Float[Tensor, "1 H E D"]
    q: Float[Tensor, "1 Hq R D"]
    """Before rotation."""
    residual: Float[Tensor, "1 Hq R D"]
    """o_full - o_kept."""


def cases_of(text: LayerText, indexer: Indexer, ratios: Sequence[float] = EVICTED, cut: int | None = None) -> list[Case]:
    """The text cut at `cut` (its middle by default) and compressed by the indexer, once for each share evicted."""
    cut = text.length // 2 if cut is None else cut
    scores = importance(text.first(cut), indexer)
    scores[:SINKS] = torch.inf
    return [case_of(text, top_mask(scores, torch.tensor(max(SINKS, int((1 - r) * cut + 1e-9)), device=scores.device)))
            for r in ratios]


@torch.no_grad()
def case_of(text: LayerText, keep: Bool[Tensor, " cut"]) -> Case:
    """What a memory should make up for when only `keep` stays of the first tokens, for at most `LATER_ROWS` later rows."""
    cut, N = len(keep), text.length
    q, k, v = text.q[None, :, cut:], text.k[None], text.v[None]
    mask = torch.ones(N, dtype=torch.bool, device=keep.device)
    mask[:cut] = keep
    full, kept = (attend(q.float(), k.float(), v.float(), scale=text.scale, softcap=text.softcap, mask=m)[0]
                  for m in (None, mask[None, None, None]))
    rows = torch.linspace(0, N - cut - 1, min(N - cut, LATER_ROWS)).round().long().to(keep.device)
    gone = (~keep).nonzero()[:, 0]
    return Case(text.flat_k[None][:, :, gone], v[:, :, gone], text.flat[None, :, cut:][:, :, rows], (full - kept)[:, :, rows])


class MemoryModule(nn.Module):
    """A memory's weights while they are trained; W starts near the identity, the gate nearly closed."""

    def __init__(self, dim: int, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.eye(dim) + 0.02 * torch.randn(dim, dim, generator=g))
        self.gate_weight = nn.Parameter(torch.zeros(dim))
        self.gate_bias = nn.Parameter(torch.tensor(GATE_BIAS))

    def memory(self) -> Memory:
        return Memory(self.weight, self.gate_weight, self.gate_bias)


def fit_memory(cases: Sequence[Case], config: TrainConfig = MEMORY, per_head: bool = False) -> Memory:
    """Train one layer's memory."""
    module = MemoryModule(cases[0].k.shape[-1], config.seed).to(cases[0].k.device)
    order = _order(len(cases), config)
    # The loss as a share of what is missing: layers differ by orders of magnitude, learning rates don't.
    size = torch.stack([case.residual.square().mean() for case in cases]).mean().clamp(min=torch.finfo(torch.float32).tiny)

    def objective(model: Any, batch: Batch, state: Any = None) -> Outcome:
        return Outcome(memory_loss(model.memory(), cases[order[batch.index]], per_head=per_head) / size, 1.0)

    ids = torch.zeros(1, 1, dtype=torch.int64)
    train_loop(module, lambda i: Batch(ids, ids), config, objective)
    made = module.memory()
    return Memory(made.weight.detach(), made.gate_weight.detach(), made.gate_bias.detach())


def memory_loss(memory: Memory, case: Case, written_by: Case | None = None, *, per_head: bool = False) -> Float[Tensor, ""]:
    """Mean square of what is still missing after reading; of another case's state if one is given."""
    source = case if written_by is None else written_by
    everything = torch.ones(source.k.shape[:3], dtype=torch.bool, device=source.k.device)
    state = written(memory, None, source.k, source.v, everything, per_head=per_head)
    return (case.residual - read(memory, state, case.q)).square().mean()
