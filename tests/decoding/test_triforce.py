"""TriForce: exact at both levels; the released rule for the inner one is not."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.decoding import Law, Noise, Target, greedy, pick, read, verify, write
from longspan.decoding.drafts.layer_skip import LayerSkip
from longspan.decoding.drafts.suffix import Suffix
from longspan.decoding.drafts.triforce import TriForce, best_chunks, chunk_scores
from longspan.models import Prompt
from longspan.registry import Refused


def law(seed, n=4):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=g, dtype=torch.float64).pow(2) + 1e-3
    return p / p.sum()


def residual(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum() if float(left.sum()) > 0 else p


def emitted(p, drawn, q):
    """The law of what one level writes, if a proposal drawn from `drawn` is judged with `q` as its law."""
    stands = torch.minimum(torch.ones_like(p), p / q)
    return drawn * stands + (1 - (drawn * stands).sum()) * residual(p, q)


def released(p, q):
    """The law of what the released inner loop writes: after a rejection it draws from p, not from the residual."""
    stands = torch.minimum(torch.ones_like(p), p / q)
    return q * stands + (1 - (q * stands).sum()) * p


def test_two_levels_are_exact_by_enumeration_and_the_released_rule_is_not():
    worst = 0.0
    for seed in range(20):
        small, middle, target = law(seed), law(seed + 100), law(seed + 200)
        inner = emitted(middle, small, small)
        assert torch.allclose(inner, middle, atol=1e-12)
        assert torch.allclose(emitted(target, inner, middle), target, atol=1e-12)
        wrong = emitted(target, released(middle, small), middle)
        worst = max(worst, float((wrong - target).abs().max()))
        assert not torch.allclose(wrong, target, atol=1e-6)
    assert worst > 0.02


def two_levels(laws, noise, inner):
    """One place through both levels: what a round writes there first."""
    small, middle, target = laws
    x = pick(small, noise.of("draft"), 0)
    judged = torch.stack([middle, middle])  # the second row is what would be added if x stands
    proposed = inner(judged, x, noise.of("retrieval"), small)
    return verify(torch.stack([target, target]), [proposed], noise, 0, rule="reject", q=middle[None]).tokens[0]


def residual_rule(p, x, noise, q):
    return verify(p, [x], noise, 0, rule="reject", q=q[None]).tokens[0]


def released_rule(p, x, noise, q):
    return x if noise.uniform(0) * float(q[x]) < float(p[0, x]) else pick(p[0], noise.of("rest"), 0)


@pytest.mark.slow
def test_two_levels_draw_from_the_target_and_the_released_rule_does_not():
    # Laws that the wrong rule gets far wrong: a small draft that is sure of what the other two don't like.
    laws = [torch.tensor(p, dtype=torch.float64) for p in ([0.85, 0.05, 0.05, 0.05], [0.1, 0.6, 0.2, 0.1], [0.3, 0.1, 0.4, 0.2])]
    n, pvalues = 20_000, {}
    for rule in (residual_rule, released_rule):
        seen = torch.zeros(4)
        for i in range(n):
            seen[two_levels(laws, Noise((i,)), rule)] += 1
        pvalues[rule.__name__] = chisquare(seen.numpy(), (laws[2] * n).numpy()).pvalue
    assert pvalues["residual_rule"] > 1e-3 and pvalues["released_rule"] < 1e-6


# ------------------------------------------------------------------------------------------------------------ the methods


def begun(model, run, law_=None, seed=0, length=60):
    ids = tiny_ids(1, length)
    cache = run.new_cache(Prompt(ids, length))
    logits = read(model, ids, cache)[:, 0]
    return Target(model, cache, ids[0].tolist(), law_ or Law(), Noise((seed,))), logits


def written(draft, law_=None, seed=0, max_new=24):
    model = tiny("llama", layers=4)
    with Recipe().on(model) as run:
        target, logits = begun(model, run, law_, seed)
        if draft is None:
            return greedy(model, target.cache, logits, max_new, ())
        return write(target, draft, logits, max_new, ())


def small(**knobs):
    return TriForce(**{"gamma": 4, "budget": 24, "chunk": 4, "small_budget": 24, "draft": LayerSkip(skip=1), "adapt": "always",
                       **knobs})


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_text_is_the_plain_text(rule, gamma):
    done = written(small(rule=rule, gamma=gamma))
    assert done.ids == written(None).ids and done.proposed > 0


def test_sampled_text_is_the_plain_text_under_match():
    law_ = Law(1.0, top_p=0.9)
    exact = written(LayerSkip(skip=1, adapt="always"), law_, 7)
    assert written(small(rule="match"), law_, 7).ids == exact.ids and len(set(exact.ids)) > 1


def test_the_inner_level_states_the_law_that_it_draws_from():
    """Whatever was accepted, q of each proposed token is the law of the retrieval cache at its place."""
    model = tiny("llama", layers=4)
    with Recipe().on(model) as run:
        target, logits = begun(model, run, Law(1.0), 3)
        target.ids.append(int(logits.argmax()))
        drafter = small().begin(target)
        twin = small().begin(target).cache
        proposal = drafter.propose(target.ids, 9)
        logits = read(model, torch.tensor([[target.ids[-1], *proposal.tokens[:-1]]]), twin, last=4)[0]
        laws = target.law.probabilities(target.ids, logits, proposal.tokens)
        assert len(proposal.tokens) == 4 and torch.allclose(proposal.q, laws, atol=1e-5)
        assert 0 < drafter.steps <= 4


def test_everything_retrieved_means_that_all_stands():
    done = written(small(budget=4096, gamma=4), Law(1.0), 1, max_new=26)
    assert done.accepted == done.proposed == 20 and done.passes == 5


def test_after_a_rejection_both_caches_are_as_if_they_had_never_seen_it():
    model = tiny("llama", layers=4)
    ends = []
    for accepted in (1, 3):
        with Recipe().on(model) as run:
            target, logits = begun(model, run)
            target.ids.append(int(logits.argmax()))
            drafter = small(small_budget=200).begin(target)
            proposal = drafter.propose(target.ids, 9)
            if accepted == 3:  # another drafter that is told the same prefix token by token
                drafter.settle(target.ids, 0, 4)
                target.ids.append(proposal.tokens[0])
                drafter.propose(target.ids, 9)
                target.ids.append(9)
                drafter.settle(target.ids, 0, 4)
            else:
                target.ids += [proposal.tokens[0], 9]
                drafter.settle(target.ids, 1, 4)
            seen = [cache.get_seq_length() for cache in (drafter.cache, drafter.small.cache)]
            again = drafter.propose(target.ids, 9)
            ends.append((seen, again.tokens, again.q))
    assert ends[0][0] == ends[1][0] == [62, 62] and ends[0][1] == ends[1][1]
    assert torch.allclose(ends[0][2], ends[1][2], atol=1e-5)


def test_the_small_cache_stays_small():
    model, held = tiny("llama", layers=4), []
    with Recipe().on(model) as run:
        target, logits = begun(model, run)
        target.ids.append(int(logits.argmax()))
        drafter = small(small_budget=20).begin(target)
        drafter.small.cache.reads = lambda call, q, positions, store: held.append(store.width())
        for accepted in (4, 0, 2, 4):
            proposal = drafter.propose(target.ids, 9)
            target.ids += [*proposal.tokens[:accepted], 5]
            drafter.settle(target.ids, accepted, 4)
        assert max(held) <= 20
        layers = [layer for layer in drafter.small.cache.policy_layers if layer.seen]
        positions = layers[0].store.view().positions[0, 0]
        assert positions[:4].tolist() == [0, 1, 2, 3] and positions[4:].diff().eq(1).all()


def test_chunks_are_ranked_by_their_mean_key():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 8, generator=g), torch.randn(1, 2, 19, 8, generator=g)
    scores = chunk_scores(q, k, 4)
    assert scores.shape == (1, 2, 5)
    for h in range(2):
        for c in range(5):
            wanted = (q[0, 2 * h : 2 * h + 2] @ k[0, h, 4 * c : 4 * c + 4].mean(0)).mean()
            assert float(scores[0, h, c]) == pytest.approx(float(wanted), abs=1e-5)
    mask = best_chunks(scores, 19, 4, 12)
    for h in range(2):
        best = 1 + int(scores[0, h, 1:4].argmax())
        assert mask[0, h].nonzero()[:, 0].tolist() == [*range(4), *range(4 * best, 4 * best + 4), 16, 17, 18]


@pytest.mark.parametrize(("knobs", "what"), [
    ({"gamma": 0}, "at least 1"), ({"draft": Suffix()}, "suffix is no model"), ({"budget": 16, "chunk": 9}, "two chunks, 18"),
    ({"small_budget": 16, "gamma": 12}, "more than n_sink and a round's tokens"), ({"rule": "point-mass"}, "unknown choice"),
])
def test_bad_knobs_are_refused(knobs, what):
    with pytest.raises(Refused, match=what):
        TriForce(**knobs)


def test_it_is_written_in_a_recipe():
    text = "triforce(draft=layer-skip(skip=20), budget=1024)"
    assert str(Recipe.parse(text)) == text
