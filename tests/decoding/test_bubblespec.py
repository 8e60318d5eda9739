"""Drafts from stored rollouts: what is proposed, and that it never changes what is written."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.decoding import Law, Noise, Target, greedy, pick, read, verify, write
from longspan.decoding import verify as verify_function
from longspan.decoding.drafts.bubblespec import BubbleSpec
from longspan.decoding.drafts.index import RunIndex
from longspan.decoding.rollouts.pool import Rollout, RolloutPool
from longspan.models import Prompt
from longspan.registry import Refused

PROMPT = (5, 6, 7)
END = 2


def pool(*answers, vocabulary=128, prompt=PROMPT):
    return RolloutPool(vocabulary, [Rollout((1, 0, i), prompt, list(a), "v0") for i, a in enumerate(answers)])


def drafter(stored, sample=0, **knobs):
    return BubbleSpec(**knobs).over(stored, Rollout((1, 0, sample), PROMPT), (END,))


# ------------------------------------------------------------------------------------------------------ what is proposed


def test_its_own_draft_is_proposed_while_it_fits():
    found = drafter(pool(range(10, 30), range(50, 70)), sample=1, gamma=4)
    assert found.propose(list(PROMPT), 9).tokens == (50, 51, 52, 53)
    assert found.propose([*PROMPT, 50], 2).tokens == (51, 52)
    assert found.propose([*PROMPT, 50, 51, 52], 9).tokens == (53, 54, 55, 56)
    assert found.propose([*PROMPT, *range(50, 68)], 9).tokens == (68, 69)


def test_then_what_follows_the_longest_match_in_drafts_of_the_same_prompt():
    stored = pool([10, 11, 12, 13], [40, 41, 20, 21, 30, 31], [20, 21, 50])
    found = drafter(stored, alpha=1.0, own_text=False)
    assert found.propose([*PROMPT, 9, 41, 20, 21], 9).tokens == (30, 31), "three tokens match, not two"
    assert found.propose([*PROMPT, 9, 9, 20, 99], 9).tokens == ()
    assert found.propose([*PROMPT, 9, 9, 20, 99, 10, 11], 9).tokens == (12, 13), "once it left its draft it is one of many"


def test_the_most_frequent_continuation_of_a_match():
    stored = pool([1, 1, 8, 9, 3], [7, 8, 9, 4, 5], [6, 8, 9, 4, 6], [8, 9, 4, 6])
    assert drafter(stored, alpha=1.0).propose([*PROMPT, 77, 8, 9], 9).tokens == (4, 6)
    assert drafter(stored, alpha=2.0).propose([*PROMPT, 77, 8, 9], 9).tokens == (4, 6), "nothing more is known"
    assert drafter(stored, alpha=2.0, gamma=1).propose([*PROMPT, 77, 8, 9], 9).tokens == (4,)


def test_a_match_may_begin_in_the_prompt():
    assert drafter(pool([], [30, 31, 32]), own_text=False, alpha=1.0).propose(list(PROMPT), 9).tokens == (30, 31, 32)


def test_finished_answers_of_the_group_are_found_at_once():
    stored = pool([10, 11])
    found = drafter(stored, alpha=1.0)
    assert found.propose([*PROMPT, 40, 41], 9).tokens == ()
    stored.add(Rollout((1, 0, 3), PROMPT, [40, 41, 42, 43], "v0"))
    assert found.propose([*PROMPT, 40, 41], 9).tokens == (42, 43)


def test_other_prompts_are_no_source():
    assert drafter(pool([30, 31, 32], prompt=(9, 9, 9)), own_text=False).propose([*PROMPT, 30, 31], 9).tokens == ()


def test_the_text_itself_is_searched_if_asked():
    text = [*PROMPT, 60, 61, 62, 9, 60, 61]
    assert drafter(pool(), alpha=1.0).propose(text, 9).tokens == (62, 9)
    assert drafter(pool(), own_text=False).propose(text, 9).tokens == ()


def test_proposals_end_where_an_answer_ends():
    assert drafter(pool([10, END, 11, 12])).propose(list(PROMPT), 9).tokens == (10, END)
    assert drafter(pool([], [10, END, 11, 12])).propose([*PROMPT, 7, 10], 9).tokens in ((), (END,))
    assert drafter(pool([], [10, 11, END, 12]), alpha=2.0).propose([*PROMPT, 10, 11], 9).tokens == (END,)


def test_gamma_doubles_and_halves():
    found = drafter(pool(range(3, 99)))
    assert found.gamma == 8
    for accepted, proposed, gamma in [(8, 8, 16), (16, 16, 32), (32, 32, 32), (16, 32, 32), (15, 32, 16), (0, 0, 16), (0, 9, 8),
                                      (0, 9, 4), (0, 4, 2), (0, 2, 1), (0, 1, 1), (1, 1, 2)]:
        found.settle([], accepted, proposed)
        assert found.gamma == gamma
    fixed = drafter(pool(range(3, 99)), gamma=5, gamma_max=5)
    fixed.settle([], 5, 5)
    assert fixed.gamma == 5


def test_the_index_finds_what_a_search_finds():
    rng = random.Random(0)
    for shortest, longest in ((1, 5), (2, 16), (3, 7)):
        texts = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
        index = RunIndex(shortest, longest)
        for text in texts:
            index.add(text)
        for _ in range(50):
            ids = [rng.randrange(3) for _ in range(20)]
            lengths = {}
            for t, text in enumerate(texts, 1):
                for end in range(1, len(text)):
                    n = 0
                    while n < min(longest, end) and text[end - 1 - n] == ids[-1 - n]:
                        n += 1
                    lengths[t, end] = n
            best = max(lengths.values())
            found = index.find(ids)
            assert found.length == (best if best >= shortest else 0)
            assert set(found.places) == ({p for p, n in lengths.items() if n == best} if best >= shortest else set())


# ------------------------------------------------------------------------------------------------------- exactness


class Scripted(Noise):
    """Uniform numbers that the test chooses."""

    def uniform(self, position, what="accept"):
        return UNIFORM.get(position, 1.0)


UNIFORM: dict[int, float] = {}


def outcomes(monkeypatch, p, proposed, rule, q=None):
    """Every outcome of `verify` as (probability, tokens): thresholds by bisection, draws by the law asked for."""
    import sys

    module = sys.modules[verify_function.__module__]
    asked = []
    UNIFORM.clear()
    monkeypatch.setattr(module, "pick", lambda law, noise, at: asked.append(law) or 0)

    def accepted(n):
        return verify(p, proposed, Scripted(), 0, rule=rule, q=q).accepted >= n

    reach = 1.0
    for k in range(len(proposed)):
        low, high = 0.0, 1.0
        for _ in range(60):
            UNIFORM[k] = (low + high) / 2
            low, high = (UNIFORM[k], high) if accepted(k + 1) else (low, UNIFORM[k])
        if low < 1 - 1e-12:
            UNIFORM[k] = 1.0
            verify(p, proposed, Scripted(), 0, rule=rule, q=q)
            for token, chance in enumerate(asked[-1].tolist()):
                yield reach * (1 - low) * chance, (*proposed[:k], token)
        reach *= low
        UNIFORM[k] = 0.0
        if reach <= 1e-15:
            return
    yield reach, tuple(proposed)


def law(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(2).mul(4).softmax(-1)


@pytest.mark.parametrize("seed", range(3))
def test_two_tokens_by_enumeration(seed, monkeypatch):
    first, second, q1, q2 = law(seed, 5), law(seed + 10, 5, 5), law(seed + 20, 5), law(seed + 30, 5, 5)
    wanted = first[:, None] * second
    drafted = torch.zeros(5, 5, dtype=torch.float64)
    for x, y in itertools.product(range(5), repeat=2):
        p = torch.stack([first, second[x], second[y]])
        certain = torch.zeros(5, 5, dtype=torch.float64)
        for rule, q, into, weight in (("point-mass", None, certain, 1.0),
                                      ("reject", torch.stack([q1, q2[x]]), drafted, float(q1[x] * q2[x, y]))):
            for chance, tokens in outcomes(monkeypatch, p, [x, y], rule, q):
                if len(tokens) == 1:
                    into[tokens[0]] += weight * chance * second[tokens[0]]
                else:
                    into[tokens] += weight * chance
        torch.testing.assert_close(certain, wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(drafted, wanted, atol=1e-12, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "point-mass", "reject"])
def test_a_hundred_thousand_draws(rule):
    p, q, n = torch.stack([law(1, 5), law(2, 5)]), law(3, 1, 5), 100_000
    drafts = torch.multinomial(q[0], n, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    seen = torch.zeros(5)
    for i, x in enumerate(drafts):
        seen[verify(p, [x], Noise((i,)), 3, rule=rule, q=q if rule == "reject" else None).tokens[0]] += 1
    assert chisquare(seen.numpy(), (p[0] * n).numpy()).pvalue > 1e-3


def test_shared_noise_meets_its_bound_between_two_policies():
    """The coupling of two models' draws at the same contexts: at least (1 - TV) / (1 + TV) of them agree."""
    ids = tiny_ids(1, 12)
    logits = [m(ids).logits[0, -4:] for m in (tiny("llama"), tiny("llama", seed=1))]
    p, q = Law(1.0).probabilities([], 0.5 * logits[0]), Law(1.0).probabilities([], 0.5 * logits[0] + logits[1])
    tv = (p - q).abs().sum(-1) / 2
    bound = float(((1 - tv) / (1 + tv)).mean())
    n = 1500
    same = sum(pick(p[i % 4], Noise((i,)), 0) == pick(q[i % 4], Noise((i,)), 0) for i in range(n)) / n
    assert 0.2 < float(tv.mean()) < 0.9
    assert same >= bound - 3 * math.sqrt(same * (1 - same) / n)
    assert same > float((p * q).sum(-1).mean()), "better than drawing apart"


# ------------------------------------------------------------------------------------------------------- in a recipe


def written(draft, *, ids, law=None, max_new=24, model=None):
    model = model or tiny("llama")
    with Recipe.parse("full").on(model) as on:
        cache = on.new_cache(Prompt(ids, ids.shape[1]))
        logits = read(model, ids, cache)[:, 0]
        if draft is None:
            return greedy(model, cache, logits, max_new, [END])
        return write(Target(model, cache, ids[0].tolist(), law or Law(), Noise((3,))), draft, logits, max_new, [END])


def test_a_file_of_rollouts_in_a_recipe(tmp_path):
    ids = tiny_ids(1, 20)
    plain = written(None, ids=ids).ids
    file = str(tmp_path / "pool.safetensors")
    pool([*plain[:15], 99, 98], prompt=tuple(ids[0].tolist())).save(file)
    recipe = Recipe.parse(f"bubblespec(pool='{file}', adapt=always)")
    done = written(recipe.decoding, ids=ids)
    assert done.ids == plain and done.accepted >= 10 and done.passes < 16
    assert Recipe.parse(str(recipe)).decoding == recipe.decoding


@pytest.mark.parametrize("rule", ["match", "point-mass"])
@pytest.mark.parametrize("law", [Law(), Law(1.0, top_p=0.9)])
def test_earlier_answers_to_the_same_prompt_are_drafts(rule, law):
    model, ids = tiny("llama"), tiny_ids(1, 20)
    draft = BubbleSpec(adapt="always", rule=rule, own_text=False)
    first = written(draft, ids=ids, law=law, model=model)
    again = written(draft, ids=ids, law=law, model=model)
    other_noise = draft.begin(Target(model, None, ids[0].tolist(), law, Noise((4,))))
    other = written(draft, ids=tiny_ids(1, 20, seed=1), law=law, model=model)
    assert first.proposed == 0
    if rule == "match" or law.greedy:
        assert again.ids == first.ids and again.passes <= 5
    else:
        assert again.proposed == 0, "an answer of the same noise is no draft for a rule that may not depend on it"
    assert other_noise.own.tokens == again.ids
    assert other.proposed == 0, "another prompt has no draft"


def test_at_temperature_zero_every_rule_is_greedy(tmp_path):
    ids = tiny_ids(1, 20)
    plain = written(None, ids=ids).ids
    file = str(tmp_path / "pool.safetensors")
    pool([*plain[:9], 99, 98], prompt=tuple(ids[0].tolist())).save(file)
    for rule in ("match", "point-mass"):
        assert written(BubbleSpec(pool=file, rule=rule, adapt="always"), ids=ids).ids == plain


@pytest.mark.parametrize(("text", "what"), [
    ("bubblespec(gamma=0)", "at least 1"), ("bubblespec(alpha=0.5)", "at least 1"), ("bubblespec(alpha=3.0)", "at most 2"),
    ("bubblespec(min_match=9, max_match=4)", "min_match=9"), ("bubblespec(rule=guess)", "match"),
])
def test_knobs_that_make_no_sense(text, what):
    with pytest.raises(Refused, match=what):
        Recipe.parse(text)


def test_what_a_file_cannot_give_is_refused(tmp_path):
    ids = tiny_ids(1, 20)
    with pytest.raises(Refused, match="rule=reject needs the laws"):
        written(BubbleSpec(rule="reject"), ids=ids)
    with pytest.raises(Refused, match="no such file"):
        written(BubbleSpec(pool=str(tmp_path / "none")), ids=ids)
    other = tmp_path / "other.safetensors"
    pool([5], vocabulary=64, prompt=(1,)).save(other)
    with pytest.raises(Refused, match="vocabulary of 64 tokens and the model has 128"):
        written(BubbleSpec(pool=str(other)), ids=ids)
