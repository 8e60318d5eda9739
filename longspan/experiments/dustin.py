"""Does mixing what the target looked at with what the drafts look at choose positions well, and do few of them suffice?

The published figures are speeds of Qwen2.5-72B on four GPUs. Here the bundled model in float32 drafts for itself without a
run of its middle layers and reads windows of 3,072 tokens; counted and compared is what the method is made of:

(a) the attention recovery rate (ARR) of sets of 128 positions at 40 places, teacher-forced: by the last accepted token alone,
    by the drafts alone, by both, by position, and by an oracle. Heads, layers and split are found on other texts;
(b) greedy answers of 64 tokens verified against 256 positions: how often a token is the one that the dense model writes
    after the same text, and how many rows of the cache are read;
(c) numbers hidden among 50, asked for with 128 positions;
(d) with exact verification, of this draft and of one that is the whole model on a small cache: the plain text token for
    token, and tokens a round against (1 - a^(g+1)) / (1 - a), a being the share of judged drafts that stand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.context.document import frame
from longspan.decoding import Checker, Draft, Proposal, Target, greedy, read, verify
from longspan.decoding.drafts.layer_skip import LayerSkip, without_layers
from longspan.decoding.drafts.magicdec import MagicDec
from longspan.decoding.verifiers.dustin import Dustin, DustinChecker, Heads, Setting
from longspan.decoding.verifiers.dustin_calibration import (
    Fit,
    Needle,
    Trace,
    best_heads,
    chosen,
    fit,
    needle_scores,
    oracle,
    recovery,
    traces,
)
from longspan.evaluation.dustin_texts import begun, needle, summed
from longspan.evaluation.statistics import mean_interval
from longspan.evaluation.texts import load_text
from longspan.evaluation.words import ADJECTIVES, NOUNS
from longspan.experiments.base import Experiment, Outcome, by_checks
from longspan.experiments.hidden import hide, plain_prose
from longspan.models import Loaded, Parts, find_parts, load
from longspan.recipe import Recipe
from longspan.registry import Refused

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"tokens": 260, "agreement": 64, "runs": [10], "needles": 1, "windows": 1, "places": 3, "k": 64, "k_text": 96,
              "k_needle": 96, "prompts": 1, "written": 8, "lines": 3, "asked": 1},
    "small": {"tokens": 3072, "agreement": 512, "runs": list(range(2, 20, 2)), "needles": 2, "windows": 2, "places": 20, "k": 128,
              "k_text": 256, "k_needle": 128, "prompts": 3, "written": 64, "lines": 50, "asked": 4},
}
SKIP = 10
GAMMA, N_SINK, N_RECENT = 4, 4, 32
EXACT = ("layer-skip", "magicdec")
"""Drafts of (d)."""
SIGNALS = ("sink+recent", "history", "draft", "hybrid", "oracle")
AGREE_LEAST, SLACK, FORMULA = 0.9, 0.005, 0.1
"""Least agreement of (b), how far the mix may stay behind a single signal in (a), and the formula's largest error in (d)."""
SEED = 11


# ---------------------------------------------------------------------------------------------------------- the texts


class Texts:
    """Windows of the installed prose that don't overlap, and prompts made of it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.at, self.n = tokenizer, 0, 0
        self.ids = self.encode(load_text("pydoc").text)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def window(self, tokens: int) -> list[int]:
        """The next `tokens` tokens of the text."""
        found = self.ids[self.at : self.at + tokens]
        self.at += tokens
        return found

    def prompt(self, tokens: int) -> list[int]:
        """A window in the model's chat form, to be summed up; `tokens` in all."""
        head, foot = (self.encode(part) for part in frame(self.tokenizer))
        ask = self.encode("\n\nSummarise the text above in a few sentences.")
        return [*head, *self.window(tokens - len(head) - len(ask) - len(foot)), *ask, *foot]

    def numbers(self, tokens: int, lines: int, *, judged: bool) -> Needle:
        """Prose with `lines` numbers, a question about one of them, and its answer. The prose is of another half of the text
        than the windows, and what is judged of another quarter than what settings are found on."""
        self.n += 1
        prose = plain_prose()
        half, quarter = len(prose) // 2, len(prose) * 3 // 4
        rng = random.Random(f"dustin/{SEED}/{self.n}")
        names = rng.sample([f"{a} {n}" for a in ADJECTIVES for n in NOUNS], lines)
        facts = {name: str(rng.randrange(10_000, 100_000)) for name in names}
        said = [f"The special magic number for {name} is: {number}." for name, number in facts.items()]
        head, foot = frame(self.tokenizer)
        prose = prose[quarter:] if judged else prose[half:quarter]
        body = " ".join(hide(said, prose, tokens, lambda text: len(self.encode(text)), rng))
        name = rng.choice(names)
        asks = f"\n\nWhat is the special magic number for {name} mentioned in the text?{foot}"
        asks += f"The special magic number for {name} is:"
        return needle(self.encode(head + body), self.encode(asks), self.encode(f" {facts[name]}"))


# ---------------------------------------------------------------------------------------------------------- one sequence


@dataclass
class Written:
    """What one way of writing wrote, round by round."""

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Drafts that stood, in each round of `GAMMA` proposals."""
    rows: int = 0
    """Positions of the history that verifications read (in each layer and key head), and how many there were."""
    held: int = 0
    calls: int = 0
    """Verifications."""


def drafted(target: Target, draft: Draft, checker: Checker, logits: Tensor, tokens: int) -> Written:
    """Write greedily with drafts: the loop of `longspan.decoding.write`, with its rounds noted."""
    done, drafter = Written([int(logits.argmax())]), draft.begin(target)
    layers = getattr(checker, "draft_layers", ())
    if layers:
        drafter.watch(layers)  # type: ignore[attr-defined]
    target.ids.append(done.ids[0])
    try:
        while len(done.ids) < tokens:
            room = tokens - len(done.ids) - 1
            proposal = drafter.propose(target.ids, room) if room else Proposal()
            history = target.cache.get_seq_length()
            p = target.law.probabilities(target.ids, checker.check(target.ids[-1], proposal), proposal.tokens)
            kept = getattr(checker, "kept", None)
            done.calls += 1
            done.rows, done.held = done.rows + (history if kept is None else len(kept)), done.held + history
            verdict = verify(p, proposal.tokens, target.noise, len(target.ids))
            checker.keep(1 + verdict.accepted, 1 + len(proposal.tokens))
            target.ids += verdict.tokens
            done.ids += verdict.tokens
            if room:
                drafter.settle(target.ids, verdict.accepted, len(proposal.tokens))
            if len(proposal.tokens) == GAMMA:
                done.accepted.append(verdict.accepted)
    finally:
        drafter.close()
    return done


class ByPosition(DustinChecker):
    """Reads the first positions and the newest ones, whatever they hold."""

    def positions(self, history: int, proposal: Proposal) -> Tensor:
        k = self.dustin.k
        return torch.cat([torch.arange(N_SINK), torch.arange(history - (k - N_SINK), history)]).to(self.target.device)


@contextmanager
def prompted(model: Any, ids: Sequence[int]) -> Iterator[Callable[[], tuple[Target, Tensor]]]:
    """Read a prompt once; every call of what is given starts again at its end."""
    with begun(model, ids) as target:
        logits = read(model, torch.tensor([list(ids)], device=model.device), target.cache)[:, 0]
        point = target.cache.snapshot()

        def again() -> tuple[Target, Tensor]:
            target.cache.restore(point)
            target.ids[:] = list(ids)
            return target, logits

        yield again


def agreement(target: Target, logits: Tensor, ids: Sequence[int]) -> float:
    """Share of the tokens that are what the dense model would write after the text up to them."""
    after = read(target.model, torch.tensor([list(ids[:-1])], device=target.device), target.cache, last=len(ids) - 1)[0]
    wanted = [int(logits.argmax()), *after.argmax(-1).tolist()]
    return float(np.mean([a == b for a, b in zip(ids, wanted)]))


# ---------------------------------------------------------------------------------------------------------- the parts


def best_run(loaded: Loaded, ids: Sequence[int], skip: int, runs: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The run of `skip` layers without which the model's next tokens stay the same most often."""
    text = torch.tensor([list(ids)], device=loaded.model.device)
    with Recipe().on(loaded.model), torch.inference_mode():
        whole = loaded.model(input_ids=text, use_cache=False).logits.argmax(-1)
        rates = {first: float((without_layers(loaded.model, range(first, first + skip))(input_ids=text, use_cache=False)
                               .logits.argmax(-1) == whole).float().mean()) for first in runs}
    return max(rates, key=rates.__getitem__), rates


def places(tokens: int, n: int) -> list[int]:
    """Lengths of history, evenly through the later half of a window."""
    last = tokens - GAMMA - 1
    return sorted({tokens // 2 + (last - tokens // 2) * (i + 1) // n for i in range(n)})


def signal_rates(seen: Sequence[Trace], found: Fit, k: int) -> dict[str, list[float]]:
    """(a): ARR of every signal on every trace."""
    free = k - N_SINK - N_RECENT
    out: dict[str, list[float]] = {name: [] for name in SIGNALS}
    for t in seen:
        at = torch.arange(len(t.mass))
        sets = {"sink+recent": (at < N_SINK) | (at >= len(at) - (k - N_SINK)), "oracle": oracle(t.mass, k)}
        for name, m in (("history", 0), ("draft", free), ("hybrid", round(found.split * free))):
            sets[name] = chosen(t, found.layer, found.draft, k=k, m=m, n_sink=N_SINK, n_recent=N_RECENT)
        for name in SIGNALS:
            out[name].append(recovery(t.mass, sets[name].to(t.mass.device)))
    return out


def scoring_share(setting: Setting, parts: Parts) -> float:
    """Query-key pairs scored to choose S, as a share of those that reading the whole history for a round takes."""
    count = lambda heads: sum(map(len, heads.values()))  # noqa: E731
    return (count(setting.target) + GAMMA * count(setting.draft)) / (parts.n_layers * parts.n_heads * (GAMMA + 1))


def verifier(k: int) -> Dustin:
    """Dustin with the sizes of this experiment; heads and split come from elsewhere."""
    return Dustin(k=k, n_sink=N_SINK, n_recent=N_RECENT)  # type: ignore[call-arg]


def end_to_end(model: Any, ids: Sequence[int], draft: LayerSkip, setting: Setting, k: int, tokens: int) -> dict[str, Any]:
    """(b) and (d) on one prompt."""
    dustin = verifier(k)
    out: dict[str, Any] = {}
    with prompted(model, ids) as again:
        target, logits = again()
        plain = greedy(model, target.cache, logits, tokens, ()).ids
        small_cache = MagicDec(gamma=GAMMA, adapt="always")  # type: ignore[call-arg]
        ways: dict[str, tuple[Draft, Callable[[Target], Checker]]] = {
            "layer-skip": (draft, Checker), "magicdec": (small_cache, Checker),
            "hybrid": (draft, lambda t: DustinChecker(t, dustin, setting)),
            "sink+recent": (draft, lambda t: ByPosition(t, dustin, setting))}
        for name, (one, make) in ways.items():
            target, logits = again()
            done = drafted(target, one, make(target), logits, tokens)
            target, logits = again()
            out[name] = {"same": agreement(target, logits, done.ids), "done": done,
                         "prefix": next((i for i, (a, b) in enumerate(zip(done.ids, plain)) if a != b), tokens)}
        out["identical"] = all(out[name]["done"].ids == plain for name in EXACT)
    return out


def asked(model: Any, one: Needle, draft: LayerSkip, setting: Setting, k: int) -> dict[str, bool]:
    """(c): who writes the number."""
    cut = len(one.ids) - one.answer
    wanted, dustin = list(one.ids[cut:]), verifier(k)
    with prompted(model, one.ids[:cut]) as again:
        target, logits = again()
        found = {"dense": greedy(model, target.cache, logits, one.answer, ()).ids == wanted}
        for name, kind in (("hybrid", DustinChecker), ("sink+recent", ByPosition)):
            target, logits = again()
            found[name] = drafted(target, draft, kind(target, dustin, setting), logits, one.answer).ids == wanted
    return found


# ------------------------------------------------------------------------------------------------------ the measurement


def measure(scale: str, progress: Callable[[str], None]) -> Outcome:
    """Find the settings on some texts, judge on others."""
    if scale == "paper":
        raise Refused("the published figures are speeds of Qwen2.5-72B with a 0.5B draft on four H200 with paged kernels; "
                      "expected --scale small, or `longspan compare` with layer-skip(verify=dustin) on a model of your own.")
    size, loaded = SIZES[scale], load(dtype="float32")
    model, texts, tokens = loaded.model, Texts(loaded.tokenizer), size["tokens"]
    progress("choosing the draft")
    first, runs = best_run(loaded, texts.window(size["agreement"]), SKIP, size["runs"])
    draft = LayerSkip(gamma=GAMMA, skip=SKIP, first=first, adapt="always")
    needles = [texts.numbers(tokens, size["lines"], judged=False) for _ in range(size["needles"])]
    own, other = retrieval(model, needles, draft, progress)
    seen: dict[str, list[Trace]] = {"found": [], "judged": []}
    for part, into in seen.items():
        for _ in range(size["windows"]):
            progress(f"attention of a window ({part})")
            with begun(model, texts.window(tokens)) as target:
                into += traces(target, draft, places(tokens, size["places"]), GAMMA, own, other)
    found = fit(seen["found"], k=size["k"], n_sink=N_SINK, n_recent=N_RECENT)
    setting = Setting({found.layer: own[found.layer]}, {n: other[n] for n in found.draft}, found.split)
    rates = signal_rates(seen["judged"], found, size["k"])
    ends, numbers = [], []
    for _ in range(size["prompts"]):
        progress("writing")
        ends.append(end_to_end(model, texts.prompt(tokens), draft, setting, size["k_text"], size["written"]))
    for _ in range(size["asked"]):
        progress("asking for a number")
        numbers.append(asked(model, texts.numbers(tokens, size["lines"], judged=True), draft, setting, size["k_needle"]))
    facts = {"layers left out": [first, first + SKIP - 1],
             "next-token agreement by first layer left out": {n: round(rate, 3) for n, rate in runs.items()},
             "target heads": setting.target, "draft heads": setting.draft, "split": found.split,
             "scoring share": round(scoring_share(setting, find_parts(model)), 4)}
    return outcome(scale, size, facts, rates, ends, numbers)


def retrieval(model: Any, texts: Sequence[Needle], draft: LayerSkip, progress: Callable[[str], None]) -> tuple[Heads, Heads]:
    """The retrieval heads of target and draft."""
    scores = []
    for one in texts:
        progress("retrieval heads")
        with begun(model, one.ids) as target:
            scores.append(needle_scores(target, draft, one))
    own, other = (best_heads(summed([pair[side] for pair in scores])) for side in (0, 1))
    return own, other


def outcome(scale: str, size: dict[str, Any], facts: dict[str, Any], rates: dict[str, list[float]], ends: list[dict[str, Any]],
            numbers: list[dict[str, bool]]) -> Outcome:
    """Means, and the statements about them."""
    arr = {name: float(np.mean(found)) for name, found in rates.items()}
    same = {name: float(np.mean([e[name]["same"] for e in ends])) for name in ("hybrid", "sink+recent")}
    rounds = {name: per_round([n for e in ends for n in e[name]["done"].accepted]) for name in EXACT}
    done = [e["hybrid"]["done"] for e in ends]
    rows, held, calls = (sum(getattr(d, name) for d in done) for name in ("rows", "held", "calls"))
    right = {name: sum(n[name] and n["dense"] for n in numbers) for name in ("dense", "hybrid", "sink+recent")}
    measured = facts | {
        f"ARR of {size['k']} positions": {n: [round(x, 4) for x in mean_interval(found)] for n, found in rates.items()},
        f"agreement at {size['k_text']} positions": {n: round(v, 3) for n, v in same.items()},
        "first token that differs from the dense text": {n: [e[n]["prefix"] for e in ends] for n in (*same, *EXACT)},
        "rows read a round, of": [round(rows / calls, 1), round(held / calls, 1)],
        f"numbers found at {size['k_needle']} positions, of {len(numbers)}": right,
        "tokens a round": {name: {n: round(v, 3) for n, v in found.items()} for name, found in rounds.items()}}
    single = max(arr["history"], arr["draft"])
    checks = {
        "ARR: by position below history": arr["sink+recent"] < arr["history"],
        f"ARR: both within {SLACK} of the better signal": arr["hybrid"] >= single - SLACK,
        "ARR: both above history": arr["hybrid"] > arr["history"],
        "ARR: the oracle is best, and all below 1": max(arr.values()) == arr["oracle"] < 1,
        f"agreement of both at least {AGREE_LEAST:.0%}": same["hybrid"] >= AGREE_LEAST,
        "agreement by position is lower": same["sink+recent"] < same["hybrid"],
        "every number that the dense model finds is found, none by position":
            right["dense"] > 0 and right["hybrid"] == right["dense"] and right["sink+recent"] == 0,
        "rows read are exactly those chosen": rows == size["k_text"] * calls,
        "with exact verification the text is the plain one": all(e["identical"] for e in ends),
        f"tokens a round within {FORMULA:.0%} of the formula":
            all(abs(found["measured"] / found["formula"] - 1) <= FORMULA for found in rounds.values()),
    }
    expected = {"ARR": "sink+recent < history < hybrid < oracle < 1; hybrid within 0.005 of the better signal or above",
                "agreement": ">= 90 % at K=256, lower by position", "numbers": "found by hybrid at K=128, missed by position",
                "rows read": "fall by N/K", "tokens a round": "within 10 % of the formula, greedy text identical"}
    if scale == "smoke":
        verdict, reason = "mechanism-only", "a few places in one short window say nothing about means."
    else:
        verdict, reason = by_checks(checks)
    table = [{"place": i} | {n: round(rates[n][i], 4) for n in SIGNALS} for i in range(len(rates["oracle"]))]
    return Outcome(measured, expected, checks, verdict, reason, [SEED], table)


def per_round(accepted: Sequence[int]) -> dict[str, float]:
    """Tokens a round, and what a share a of standing drafts gives if drafts were independent: (1 - a^(g+1)) / (1 - a)."""
    judged = sum(min(n + 1, GAMMA) for n in accepted)
    alpha = sum(accepted) / max(1, judged)
    formula = sum(alpha**i for i in range(GAMMA + 1))
    return {"measured": 1 + sum(accepted) / max(1, len(accepted)), "formula": formula, "share that stands": alpha,
            "rounds": len(accepted)}


EXPERIMENT = Experiment(
    id="dustin", system="dustin", run=measure,
    claim="Positions chosen by target and draft together recover more of the target's attention than by either alone, and "
          "verifying against a few hundred of them keeps the text.",
)
