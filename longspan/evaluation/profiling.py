"""Making profiles: what a recipe's methods must learn about a model offline, for any model and any score.

1. *Read* a calibration text densely. When it ends the score ranks it, as it will when it compresses.
2. *Ask*. Answers are written token by token (sampled, temperature 0.7, at most 64 tokens) or given. Every written row
   attends to all keys; what text token t of head h was needed for is

       U[l,h,t] = max over written rows and the query heads of h of  attention[l,qh,t] * size[l,qh,t]
       size[l,qh,t] = |W_o^(l,qh) v_t| / sum over qh and t of the same

   Rows of text and question don't count: a token needed once by an answer is needed.
3. *Show* scores and utilities to the method, which makes its tensors of them (`longspan.models.profiles`).

Methods whose weights are trained get the texts themselves (`longspan.evaluation.trained`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from longspan.cache import Budget, CachePolicy, LayerContext, fork, gatherer, top_mask
from longspan.context.document import check_window
from longspan.decoding import end_ids, read
from longspan.evaluation.calibration import Question, Reading, calibration
from longspan.evaluation.texts import load_text
from longspan.evaluation.trained import train_weights
from longspan.models import LayerCall, Loaded, Prompt, attached, profiles
from longspan.models.load import context_window
from longspan.models.profiles import Evidence, Profile
from longspan.recipe import Recipe, Run
from longspan.registry import Card, Refused, cards

MAX_WRITTEN = 64
TEMPERATURE = 0.7
ANSWERS = ("sampled", "known")
Progress = Callable[[int, int, str], None]
"""Called with texts done, texts in all, and what comes next."""


# ------------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Made:
    """A profile on disk."""

    path: Path
    profile: Profile
    reused: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        key = self.profile.key
        return {"path": str(self.path), "method": key.method, "score": key.score, "settings": key.settings,
                "model": self.profile.notes.get("model", ""), "reused": self.reused, "seconds": round(self.seconds, 1),
                "made from": self.profile.notes}


def make_profile(loaded: Loaded, recipe: Recipe | str, progress: Progress | None = None, *, contexts: int = 8,
                 questions: int = 2, length: int | None = None, answers: str = "sampled", text: str = "pydoc", seed: int = 0,
                 out: Path | None = None, again: bool = False) -> Made:
    """Make the profile that a recipe needs on a model, or find the one that is there.

    Args:
        loaded: model and tokenizer.
        recipe: a recipe with a method that needs a profile, such as ``snapkv @ lu-kv(budget=0.2)``. A score that looks
            at the budget is shown this one.
        contexts: calibration texts.
        questions: questions about each.
        length: tokens of a text; by default 1,024, or half of a shorter window.
        answers: "sampled" by the model, or "known" ones, given.
        text: what the texts are cut from.
        out: where to write; by default where the recipe looks for it.
        again: make it even if it is there.

    Raises:
        Refused: nothing in the recipe needs a profile, or the texts can't be read under it.
    """
    made, = make_profiles(loaded, [recipe], progress, contexts=contexts, questions=questions, length=length, answers=answers,
                          text=text, seed=seed, out=out, again=again)
    return made


def make_profiles(loaded: Loaded, recipes: Sequence[Recipe | str], progress: Progress | None = None, *, contexts: int = 8,
                  questions: int = 2, length: int | None = None, answers: str = "sampled", text: str = "pydoc", seed: int = 0,
                  out: Path | None = None, again: bool = False) -> list[Made]:
    """`make_profile` for several recipes: texts are read and answers written once for all that need it.

    Raises:
        Refused: also where recipes change weights or positions in different ways, or share one file.
    """
    start = time.perf_counter()
    parsed = [Recipe.parse(r) if isinstance(r, str) else r for r in recipes]
    methods = [needing(r) for r in parsed]
    if answers not in ANSWERS:
        raise Refused(f"answers={answers!r}: expected {' or '.join(ANSWERS)}.")
    if out is not None and len(parsed) > 1:
        raise Refused(f"one file ({str(out)!r}) can't hold the profiles of {len(parsed)} recipes; leave it out.")
    if len({(r.weights, r.positions) for r in parsed}) > 1:
        raise Refused("recipes that change weights or positions in different ways can't share a reading; profile them one "
                      "by one.")
    given: dict[str, Any] = {"contexts": contexts, "length": length, "text": text, "seed": seed}
    trained: list[Made | None] = []
    for recipe, method in zip(parsed, methods):
        own = method.card.can("trains")  # else trained weights are something that comes before
        with _transformed(recipe, loaded.model):
            weights = train_weights(loaded, recipe, progress, out=out if own else None, again=again and own, **given)
        trained.append(Made(*weights, time.perf_counter() - start) if weights and own else None)
    if any(trained):
        rest = [r for r, made in zip(parsed, trained) if made is None]
        others = iter(make_profiles(loaded, rest, progress, questions=questions, answers=answers, again=again, **given) if rest
                      else [])
        return [made or next(others) for made in trained]
    with _transformed(parsed[0], loaded.model):
        keys = [profiles.key_of(loaded.model, m, str(r.scored.score)) for m, r in zip(methods, parsed)]
    paths = [out or key.path for key in keys]
    known = [None if again else _there(path, key) for path, key in zip(paths, keys)]
    missing = [n for n, profile in enumerate(known) if profile is None]
    if out is not None and out.exists() and missing and not again:
        raise Refused(f"{str(out)!r} is there and isn't the profile of {parsed[0]} on this model; name another file, or "
                      "say --again to write over it.")
    if not missing:
        return [Made(path, p, True, time.perf_counter() - start) for path, p in zip(paths, known) if p is not None]
    length = min(1024, context_window(loaded.model) // 2) if length is None else length
    readings = calibration(loaded.tokenizer, contexts=contexts, questions=questions, length=length, known=answers == "known",
                           text=text, seed=seed)
    shown = gather_all(loaded, [parsed[n] for n in missing], readings, seed=seed, progress=progress)
    notes = {"model": loaded.name, "contexts": contexts, "questions": questions, "length": length,
             "answers": answers, "text": text, "text_sha256": load_text(text).sha256, "seed": seed}
    tensors = _fits([methods[n] for n in missing], shown)
    found = {n: Profile(keys[n], fitted, notes | {"recipe": str(parsed[n])}) for n, fitted in zip(missing, tensors)}
    for n, profile in found.items():
        profiles.save(profile, paths[n])
    seconds = time.perf_counter() - start
    return [Made(path, found.get(n) or p, n not in found, seconds)  # type: ignore[arg-type]
            for n, (path, p) in enumerate(zip(paths, known))]


def _fits(methods: Sequence[Any], shown: Iterator[list[Evidence]]) -> list[dict[str, Tensor]]:
    """What each method makes of its own evidence. One alone takes it as it comes; several need all of it first."""
    if len(methods) == 1:
        return [methods[0].fit(own for own, in shown)]
    rows = list(shown)
    return [m.fit(row[n] for row in rows) for n, m in enumerate(methods)]


def _there(path: Path, key: profiles.Key) -> Profile | None:
    """The profile of this key at `path`, if it is there and whole."""
    try:
        found = profiles.load(path)
    except Refused:
        return None
    return found if found.key == key else None


def needing(recipe: Recipe) -> Any:
    """The method of a recipe that needs a profile; one that learns from evidence comes before those that are trained,
    since what it learns depends on them.

    Raises:
        Refused: none does, or it isn't part of a cache policy.
    """
    found = sorted(profiles.profiled(recipe.methods), key=lambda m: m.card.can("trains"))
    if not found or (recipe.cache is None and not found[0].card.can("trains")):
        offered = sorted((c for c in cards() if c.can("profile")), key=lambda c: c.can("trains"))
        known = [f"{'knorm @ ' if c.kind == 'budget' else ''}{c.name}" for c in offered]
        raise Refused(f"recipe {str(recipe)!r} needs no profile; expected one with a method that does, such as "
                      f"{known[0] if known else 'one of your own that declares it'}.")
    return found[0]


# ---------------------------------------------------------------------------------------------------------- evidence


def gather(loaded: Loaded, recipe: Recipe, readings: Sequence[Reading], *, seed: int = 0,
           progress: Progress | None = None) -> Iterator[Evidence]:
    """What every question about every text shows, one after another. Questions that get no answer are left out.

    Raises:
        Refused: a text is too long for the model, or too short for the score.
    """
    return (shown for shown, in gather_all(loaded, [recipe], readings, seed=seed, progress=progress))


def gather_all(loaded: Loaded, recipes: Sequence[Recipe], readings: Sequence[Reading], *, seed: int = 0,
               progress: Progress | None = None) -> Iterator[list[Evidence]]:
    """What every question shows, for several recipes at once: texts are read and answers written once for all."""
    ends = end_ids(loaded.model, loaded.tokenizer)
    for n, reading in enumerate(readings):
        if progress is not None:
            progress(n, len(readings), f"text of {len(reading.ids)} tokens")
        longest = max(len(q.ids) + (len(q.answer) or MAX_WRITTEN) for q in reading.questions)
        check_window(loaded, len(reading.ids) + longest, "calibration text, question and answer together")
        draw = torch.Generator().manual_seed(seed * 100_003 + n)
        yield from observe_all(loaded.model, recipes, reading, ends, draw)
    if progress is not None:
        progress(len(readings), len(readings), "")


def observe(model: Any, recipe: Recipe, reading: Reading, ends: Sequence[int] = (),
            draw: torch.Generator | None = None) -> list[Evidence]:
    """What the questions about one text show.

    Args:
        ends: tokens that end an answer.
        draw: random state for answers the model writes; likeliest tokens without it.
    """
    return [shown for shown, in observe_all(model, [recipe], reading, ends, draw)]


def observe_all(model: Any, recipes: Sequence[Recipe], reading: Reading, ends: Sequence[int] = (),
                draw: torch.Generator | None = None) -> list[list[Evidence]]:
    """What each question about one text shows of each recipe's score. The recipes share their transforms."""
    looks = [_Seen() for _ in recipes]
    policies = [CachePolicy(r.scored.score, _Look(r.scored, seen)) for r, seen in zip(recipes, looks)]
    ids = torch.tensor([reading.ids], device=model.device)
    found = []
    with _transformed(recipes[0], model), _watched(model, Recipe(cache=gatherer(policies))) as run:
        base = run.new_cache(Prompt(ids, len(reading.ids)))
        read(model, ids, base)
        for recipe, policy, seen in zip(recipes, policies, looks):
            fork(base, policy)
            _check_seen(seen, recipe, reading, len(base.policy_layers))
        cache = fork(base, None)
        for question in reading.questions:
            point = cache.snapshot()
            logits = read(model, torch.tensor([question.ids], device=model.device), cache)[:, 0]
            run.need = Need(looks[0].sizes)
            if _write(model, cache, logits, question, ends, draw):
                found.append([seen.evidence(run.need, cache.n_layers) for seen in looks])
            run.need = None
            cache.restore(point)
    return found


def _write(model: Any, cache: Any, logits: Float[Tensor, "1 V"], question: Question, ends: Sequence[int],
           draw: torch.Generator | None) -> int:
    """Read the answer's tokens, or write some; returns how many."""
    if question.answer:
        read(model, torch.tensor([question.answer], device=logits.device), cache)
        return len(question.answer)
    for n in range(MAX_WRITTEN):
        likely = (logits / TEMPERATURE).softmax(-1).cpu()
        token = int(torch.multinomial(likely, 1, generator=draw)) if draw is not None else int(likely.argmax())
        if token in ends:
            return n
        logits = read(model, torch.tensor([[token]], device=logits.device), cache)[:, 0]
    return MAX_WRITTEN


def _check_seen(seen: _Seen, recipe: Recipe, reading: Reading, layers: int) -> None:
    if not layers:
        raise Refused("every layer of this model has a sliding window shorter than the calibration texts and evicts by "
                      f"itself; ask for texts shorter than the window (they had {len(reading.ids)} tokens).")
    if len(seen.scores) < layers:
        raise Refused(f"calibration texts of {len(reading.ids)} tokens are too short for {recipe.scored.score}, which keeps "
                      "all of them anyway; ask for longer ones.")


@contextlib.contextmanager
def _transformed(recipe: Recipe, model: nn.Module) -> Iterator[None]:
    """The model with the recipe's transforms of weights and positions, if it has any."""
    with contextlib.ExitStack() as stack:
        if recipe.weights or recipe.positions:
            stack.enter_context(Recipe(weights=recipe.weights, positions=recipe.positions).on(model))
        yield


@contextlib.contextmanager
def _watched(model: nn.Module, recipe: Recipe) -> Iterator[_Watching]:
    run = _Watching([recipe])
    with attached(model, run) as run.parts:
        yield run


class _Watching(Run):
    """A run that shows `need` every attention call after it was answered."""

    need: Need | None = None

    def attend(self, call: LayerCall) -> Float[Tensor, "B Hq T D"]:
        out = super().attend(call)
        if self.need is not None and call.store is not None:
            self.need.see(call)
        return out


# -------------------------------------------------------------------------------------- what the score says of a text


@dataclass
class _Seen:
    """A text as the score saw it, layer by layer."""

    scores: dict[int, Float[Tensor, "H N"]] = field(default_factory=dict)
    protected: dict[int, Bool[Tensor, "H N"]] = field(default_factory=dict)
    sizes: dict[int, Float[Tensor, "H G N"]] = field(default_factory=dict)

    def take(self, scores: Float[Tensor, "1 H N"], x: LayerContext) -> None:
        self.scores[x.layer] = scores[0].cpu()
        self.protected[x.layer] = top_mask(scores[0], torch.full_like(x.lengths[0], x.protected)).cpu()
        self.sizes[x.layer] = value_sizes(x)[0]

    def evidence(self, need: Need, n_layers: int) -> Evidence:
        layers = tuple(sorted(self.scores))
        stack = lambda found: torch.stack([found[i].cpu() for i in layers])  # noqa: E731
        return Evidence(layers, n_layers, stack(self.scores), stack(need.found), stack(self.protected))


class _Look(Budget):
    """A budget that evicts nothing and hands on what it is shown.

    Scores that look at the budget see the recipe's, as far as that leaves anything to choose.
    """

    card = Card("look", "budget", "", "evaluation", "", "Evicts nothing.", __name__, "_Look")

    def __init__(self, policy: CachePolicy, seen: _Seen) -> None:
        super().__init__(policy.budget.budget)
        object.__setattr__(self, "score", policy.score)
        object.__setattr__(self, "seen", seen)

    def tokens(self, x: LayerContext) -> Tensor:
        least = max(1, self.score.protected(x))  # type: ignore[attr-defined]
        return torch.minimum(super().tokens(x), x.seen - 1).clamp(min=least)

    def keep(self, scores: Float[Tensor, "1 H N"], x: LayerContext) -> Bool[Tensor, "1 H N"]:
        self.seen.take(scores, x)  # type: ignore[attr-defined]
        return x.valid


def value_sizes(x: LayerContext) -> Float[Tensor, "B H G N"]:
    """|W_o^(qh) v_t| of every query head and token, over the sum of all in the layer (float32)."""
    H, D = x.v.shape[1], x.v.shape[3]
    weight = x.parts.o_proj(x.layer).float().transpose(0, 1)  # (Hq, hidden, D)
    gram = (weight.mT @ weight).view(H, x.group, D, D)  # |W v|^2 = v' W'W v, without the (N, hidden) product
    v = x.v.float()[:, :, None]
    sizes = ((v @ gram) * v).sum(-1).clamp(min=0).sqrt().masked_fill(~x.valid[:, :, None], 0)
    return sizes / sizes.sum((1, 2, 3), keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)


# ------------------------------------------------------------------------------------------ what answers need of it


@dataclass
class Need:
    """The most that written rows needed of every token of the text, by layer."""

    sizes: dict[int, Float[Tensor, "H G N"]]
    found: dict[int, Float[Tensor, "H N"]] = field(default_factory=dict)

    def see(self, call: LayerCall) -> None:
        """Take in the rows of one attention call (one sequence)."""
        if call.layer not in self.sizes:
            return
        size = self.sizes[call.layer]
        (H, G, N), held = size.shape, call.store.store.view()
        q = call.q[0].float().view(H, G, -1, call.q.shape[-1])
        logits = q @ held.k[0].float().mT[:, None] * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        distance = call.positions[0][:, None] - held.positions[0][:, None]
        visible = distance >= 0 if call.window is None else (distance >= 0) & (distance < call.window)
        attention = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)[..., :N]
        needed = (attention * size[:, :, None]).amax((1, 2))
        before = self.found.get(call.layer)
        self.found[call.layer] = needed if before is None else torch.maximum(before, needed)


__all__ = ["ANSWERS", "Evidence", "Made", "Need", "gather", "gather_all", "make_profile", "make_profiles", "needing", "observe",
           "observe_all", "value_sizes"]
