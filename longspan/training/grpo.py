"""Group relative policy optimisation: sampled answers are judged beside others to the same question, without a critic.

For each labelled position G tokens are sampled from the model; the reward r_i is 1 if a token is the label, else 0. Then
(arXiv:2402.03300; the settings are those of arXiv:2603.21719)

    A_i = (r_i - mean r) / (std r + 1e-6)
    L   = - mean_i [ min(w_i A_i, clip(w_i, 1 - e, 1 + e) A_i) - beta KL_i ],    w_i = p(token) / p_sampled(token)
    KL_i = q/p - log(q/p) - 1,  q: the reference, the model as it was when sampling began

Groups with equal rewards teach nothing and are skipped; the mean counts them. Tokens are sampled anew at each step, so w = 1 and
the gradient is that of REINFORCE with these advantages.

A model that is hardly ever right has nothing to compare: training begins with cross-entropy (the warm-up).
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longspan.registry import Refused, knob, method
from longspan.training.base import IGNORE, Batch, Objective, Outcome
from longspan.training.index_perturbations import require_whole

EPSILON = 1e-6
CLIP, BETA = 0.2, 1e-3


def advantages(rewards: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """(r - mean) / (std + 1e-6) within each group, with the population's std; exactly 0 where all rewards are equal.

    Raises:
        Refused: fewer than two rewards a group; rewards that aren't finite.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise Refused(f"rewards of shape {tuple(rewards.shape)}: expected groups of at least 2, such as group=8.")
    if not bool(rewards.isfinite().all()):
        bad = rewards[~rewards.isfinite()][0].item()
        raise Refused(f"a reward is {bad}: expected finite numbers.")
    found = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, correction=0, keepdim=True) + EPSILON)
    return found.masked_fill((rewards == rewards[:, :1]).all(-1, keepdim=True), 0.0)


def clipped_loss(new: Float[Tensor, "*N"], old: Float[Tensor, "*N"], advantage: Float[Tensor, "*N"],
                 reference: Float[Tensor, "*N"] | None = None, clip: float = CLIP, beta: float = BETA) -> Float[Tensor, ""]:
    """The loss L, a mean over tokens.

    Args:
        new: log-probabilities of the sampled tokens, with gradient.
        old: the same under the policy that sampled them, a constant.
        advantage: of each token.
        reference: log-probabilities under the reference; without them there is no divergence.
        clip: e, how far w may leave 1.
        beta: weight of the divergence.
    """
    w = (new - old.detach()).exp()
    gains = torch.minimum(w * advantage, w.clamp(1 - clip, 1 + clip) * advantage)
    if reference is not None and beta:
        gains = gains - beta * divergence(new, reference)
    return -gains.mean()


def divergence(new: Float[Tensor, "*N"], reference: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """An estimate of KL(p || q) from tokens that p sampled: q/p - log(q/p) - 1, unbiased and never negative."""
    ratio = reference.detach() - new
    return ratio.exp() - ratio - 1


_references: WeakKeyDictionary[nn.Module, nn.Module | None] = WeakKeyDictionary()
"""Of each model in training, a frozen copy; None until its warm-up is over."""


@method("grpo", kind="objective", system="tablelong", paper="arXiv:2603.21719",
        summary="Sampled answers rewarded relative to their group, after a warm-up of cross-entropy.")
class Grpo(Objective):
    """For tasks whose labels are the right answers.

    Reports ``reward``, the mean probability of the label (what sampled rewards are in the mean), and the greedy ``accuracy``;
    after the warm-up also ``sampled``, the mean of the rewards, ``used``, the share of groups that teach something, and ``kl``.
    """

    group: int = knob(8, "tokens sampled for each labelled position (G)", low=2)
    clip: float = knob(CLIP, "how far the ratio of new to old probability may leave 1 (e)", low=0.0)
    beta: float = knob(BETA, "weight of the divergence from the model as it was after the warm-up; 0: none", low=0.0)
    warmup: float = knob(0.5, "share of the run that is cross-entropy", low=0.0, high=1.0)
    temperature: float = knob(1.0, "temperature of sampling", low=1e-3)

    def __call__(self, model: nn.Module, batch: Batch, state: Any = None) -> Outcome:
        require_whole(self, state)
        learns = torch.is_grad_enabled()
        if learns and batch.progress == 0.0:
            _references[model] = None
        out = model(batch.ids, valid=batch.valid, segments=batch.segments)
        asked = batch.labels != IGNORE
        labels, logits = batch.labels[asked], out.logits[asked].float()
        count = len(labels)
        nll = F.cross_entropy(logits, labels, reduction="sum") / max(1, count)
        metrics = _judged(logits.detach(), labels) | {"nll": nll.item()}
        if batch.progress < self.warmup or not count:
            return Outcome(nll, float(count), metrics, out.state)
        logs = (logits / self.temperature).log_softmax(-1)
        tokens = sample(logs.detach(), self.group, batch.index)
        rewards = self.rewards(tokens, labels, batch.index)
        advantage = advantages(rewards)
        used = advantage.ne(0).any(-1)
        new = logs[used].gather(-1, tokens[used])
        reference = self._reference(model, batch, asked, used, tokens) if learns and self.beta else None
        # The mean counts the groups that are skipped; they would have added 0.
        loss = clipped_loss(new, new, advantage[used], reference, self.clip, self.beta) if bool(used.any()) else 0.0 * nll
        share = used.float().mean()
        metrics |= {"sampled": rewards.mean().item(), "used": share.item()}
        if reference is not None:
            metrics["kl"] = divergence(new.detach(), reference).mean().item() if len(new) else 0.0
        return Outcome(loss * share, float(count), metrics, out.state)

    def rewards(self, tokens: Int[Tensor, "N G"], labels: Int[Tensor, " N"], index: int) -> Float[Tensor, "N G"]:
        """1 for the label, 0 for any other token."""
        return (tokens == labels[:, None]).float()

    @torch.no_grad()
    def _reference(self, model: nn.Module, batch: Batch, asked: Tensor, used: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of the tokens (used, G) under the model as it was at the first of these steps.

        Raises:
            Refused: a run that was resumed after its warm-up, in which that model is lost.
        """
        if model not in _references:
            raise Refused(f"grpo(beta={self.beta}): a run resumed after its warm-up no longer has the model it is held to; "
                          "expected beta=0, or a checkpoint of the warm-up.")
        frozen = _references[model]
        if frozen is None:
            frozen = _references[model] = copy.deepcopy(model).eval().requires_grad_(False)
        logits = frozen(batch.ids, valid=batch.valid, segments=batch.segments).logits[asked][used].float()
        return (logits / self.temperature).log_softmax(-1).gather(-1, tokens[used])


def sample(logs: Float[Tensor, "N V"], group: int, index: int) -> Int[Tensor, "N G"]:
    """`group` tokens for each row of log-probabilities, with dice that are a function of the batch's number."""
    dice = torch.Generator().manual_seed(index)
    return torch.multinomial(logs.exp().cpu(), group, replacement=True, generator=dice).to(logs.device)


def _judged(logits: Float[Tensor, "N V"], labels: Int[Tensor, " N"]) -> dict[str, float]:
    """The mean probability of the label at temperature 1, and how often it is the likeliest token."""
    if not len(labels):
        return {"reward": 0.0, "accuracy": 0.0}
    right = logits.softmax(-1).gather(-1, labels[:, None])
    return {"reward": right.mean().item(), "accuracy": (logits.argmax(-1) == labels).float().mean().item()}
