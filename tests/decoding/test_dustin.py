"""Dustin: which positions are chosen, that reading them is masked attention, and that nothing else changes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.decoding import Law, Noise, Proposal, Target, greedy, read, write
from longspan.decoding.drafts.layer_skip import LayerSkip
from longspan.decoding.drafts.suffix import Suffix
from longspan.decoding.recent import recent_queries
from longspan.decoding.sparse_verify import attend_selected, choose, head_scores
from longspan.decoding.verifiers.dustin import Dustin, DustinChecker, Setting, by_layer, described, history_scores, parse_heads
from longspan.decoding.verifiers.dustin_calibration import (
    Trace,
    best_heads,
    chosen,
    fit,
    oracle,
    recovery,
    retrieval_scores,
    traces,
)
from longspan.kernels import attend
from longspan.models import Prompt, profiles
from longspan.models.profiles import Profile
from longspan.registry import Refused

HEADS = {"target_heads": "1:0,3; 2:1", "draft_heads": "0:2,1; 3:0"}
SIZES = {"n_sink": 2, "n_recent": 3}


def small(k=12, **knobs):
    return Dustin(**{"k": k, **SIZES, **HEADS, **knobs})


@dataclass(frozen=True)
class Asked(LayerSkip):
    """Layer skipping that brings along the queries of the layers its verifier names."""

    def begin(self, target):
        drafter = super().begin(target)
        drafter.watch(tuple(parse_heads(self.verify.draft_heads)))
        return drafter


def model():
    return tiny("llama", layers=4)


def begun(run, length=40, model_=None, law=None, seed=0):
    model_ = model_ or model()
    ids = tiny_ids(1, length)
    cache = run.new_cache(Prompt(ids, length))
    logits = read(model_, ids, cache)[:, 0]
    return Target(model_, cache, ids[0].tolist(), law or Law(), Noise((seed,))), logits


def written(draft, law=None, length=40, max_new=16, seed=0):
    found = model()
    with Recipe().on(found) as run:
        target, logits = begun(run, length, found, law, seed)
        if draft is None:
            return greedy(found, target.cache, logits, max_new, ())
        return write(target, draft, logits, max_new, ())


def draft(verify, skip=2, **knobs):
    return Asked(verify=verify, skip=skip, adapt="always", **knobs)


# ------------------------------------------------------------------------------------------------------------- choosing


def scores(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def spelled_out(s_T, s_D, n, k, m, n_sink, n_recent):
    """The set S of one row as the paper says it, step by step."""
    if n <= k:
        return list(range(n))
    taken = set(range(min(n_sink, n))) | set(range(max(0, n - n_recent), n))
    free = lambda s: sorted((j for j in range(n) if j not in taken), key=lambda j: (-float(s[j]), j))  # noqa: E731
    room = k - len(taken)
    taken |= set(free(s_D)[:m])
    taken |= set(free(s_T)[: room - m])
    return sorted(taken)


@pytest.mark.parametrize("m", [0, 1, 5, 7])
@pytest.mark.parametrize("n", [5, 12, 13, 40])
def test_the_set_is_the_one_the_paper_spells_out(n, m):
    s_T, s_D = scores(n, seed=1), scores(n, seed=2)
    found = choose(s_T[None], s_D[None], torch.tensor([n]), k=12, m=m, **SIZES)[0].nonzero()[:, 0].tolist()
    assert found == spelled_out(s_T, s_D, n, 12, m, **SIZES)
    assert len(found) == min(12, n) == len(set(found)) and found == sorted(found)
    assert set(range(min(2, n))) | set(range(max(0, n - 3), n)) <= set(found)


def test_of_equal_scores_the_earlier_position_wins():
    same = torch.full((1, 20), 0.05)
    found = choose(same, same, torch.tensor([20]), k=9, m=2, **SIZES)[0].nonzero()[:, 0].tolist()
    assert found == [0, 1, 2, 3, 4, 5, 17, 18, 19]


def test_without_a_share_the_draft_changes_nothing_and_with_all_the_target_changes_nothing():
    s = [scores(1, 30, seed=i) for i in range(4)]
    n = torch.tensor([30])
    take = lambda t, d, m: choose(t, d, n, k=12, m=m, **SIZES)  # noqa: E731
    assert torch.equal(take(s[0], s[1], 0), take(s[0], s[2], 0)) and torch.equal(take(s[0], None, 0), take(s[0], s[1], 0))
    assert torch.equal(take(s[0], s[2], 7), take(s[1], s[2], 7))
    assert not torch.equal(take(s[0], s[1], 0), take(s[2], s[1], 0)) and not torch.equal(take(s[0], s[1], 7), take(s[0], s[2], 7))


def test_rows_of_a_batch_are_independent():
    lengths = torch.tensor([30, 9, 17])
    s_T, s_D = scores(3, 30, seed=5), scores(3, 30, seed=6)
    together = choose(s_T, s_D, lengths, k=12, m=4, **SIZES)
    for row, n in enumerate(lengths.tolist()):
        alone = choose(s_T[row : row + 1, :n], s_D[row : row + 1, :n], lengths[row : row + 1], k=12, m=4, **SIZES)
        assert torch.equal(together[row, :n], alone[0]) and not together[row, n:].any()


@pytest.mark.parametrize(("change", "what"), [
    ({"k": 5}, "at least 6"), ({"m": 8}, "from 0 to k"), ({"m": -1}, "from 0 to k"),
    ({"target": torch.full((1, 20), math.nan)}, "target's scores are NaN"),
    ({"draft": torch.full((1, 20), math.nan)}, "draft's scores are NaN"),
    ({"draft": torch.zeros(1, 19)}, r"expected scores \(B,N\)"),
])
def test_sizes_and_scores_that_make_no_sense_are_errors(change, what):
    given = {"target": scores(1, 20), "draft": scores(1, 20), "lengths": torch.tensor([20]), "k": 12, "m": 2, **SIZES} | change
    with pytest.raises(ValueError, match=what):
        choose(given.pop("target"), given.pop("draft"), given.pop("lengths"), **given)


# -------------------------------------------------------------------------------------------------- scores and attention


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scores_are_softmax_over_the_history_alone():
    q, k = random(2, 3, 4, 8), random(2, 3, 20, 8, seed=1)
    seen = torch.arange(20).expand(2, 3, 20) < torch.tensor([20, 13])[:, None, None]
    found = head_scores(q, k, seen, scale=0.3)
    assert torch.allclose(found.sum(-1), torch.ones(2, 3), atol=1e-6) and not found[1, :, 13:].any()
    for row, n in enumerate((20, 13)):
        wanted = (q[row] @ k[row, :, :n].mT * 0.3).softmax(-1).mean(1)
        assert torch.allclose(found[row, :, :n], wanted, atol=1e-6)
    capped = head_scores(q, k, seen, scale=0.3, softcap=0.5)
    assert torch.allclose(capped[0], (0.5 * torch.tanh(q[0] @ k[0].mT * 0.3 / 0.5)).softmax(-1).mean(1), atol=1e-6)


def test_scores_that_are_nan_are_an_error():
    k = random(1, 1, 5, 8)
    k[0, 0, 2] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        head_scores(random(1, 1, 1, 8), k, torch.ones(1, 1, 5, dtype=torch.bool), scale=1.0)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_reading_a_set_is_masked_dense_attention(window, softcap):
    q, k, v = random(1, 4, 3, 8), random(1, 2, 23, 8, seed=1), random(1, 2, 23, 8, seed=2)
    kept = torch.tensor([0, 1, 4, 9, 15, 18, 19])
    found = attend_selected(q, k, v, kept, torch.tensor([[20, 21, 22]]), scale=0.4, window=window, softcap=softcap)
    at, rows = torch.arange(23), torch.arange(20, 23)[:, None]
    mask = (torch.isin(at, kept) | (at >= 20)) & (at <= rows)
    if window is not None:
        mask = mask & (rows - at < window)
    wanted = attend(q, k, v, scale=0.4, causal=False, mask=mask, softcap=softcap)[0]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_all_positions_are_dense_attention():
    q, k, v = random(1, 4, 3, 8), random(1, 2, 23, 8, seed=1), random(1, 2, 23, 8, seed=2)
    found = attend_selected(q, k, v, torch.arange(20), torch.tensor([[20, 21, 22]]), scale=0.4)
    assert torch.allclose(found, attend(q, k, v, scale=0.4)[0], atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- verifying


def test_queries_of_the_last_tokens_are_those_of_the_prompt_and_nothing_changes():
    found = model()
    seen = {}
    with Recipe().on(found) as run:
        ids = tiny_ids(1, 20)
        cache = run.new_cache(Prompt(ids, 20))
        cache.reads = lambda call, q, positions, store: seen.__setitem__(call.layer, q)
        read(found, ids, cache)
        cache.reads = None
        before = [(layer.store.tail.keys.clone(), layer.store.tail.values.clone()) for layer in cache.policy_layers]
        again = recent_queries(Target(found, cache, ids[0].tolist()), 5)
        for layer in range(4):
            assert torch.allclose(again[layer], seen[layer][:, :, -5:], atol=1e-5)
        assert cache.get_seq_length() == 20
        for layer, (k, v) in zip(cache.policy_layers, before):
            assert torch.equal(layer.store.tail.keys, k) and torch.equal(layer.store.tail.values, v)


@pytest.mark.parametrize("length", [40, 6, 1])
def test_a_budget_of_the_whole_history_is_dense_verification(length):
    found = model()
    proposal = [5, 6, 7]
    with Recipe().on(found) as run:
        target, _ = begun(run, length, found)
        dense = read(found, torch.tensor([[3, *proposal]]), target.cache, last=4)[0]
        target.cache.crop(-4)
        checker = small(k=64, m=0).begin(target, draft(small()))
        assert torch.allclose(checker.check(3, Proposal(tuple(proposal))), dense, atol=1e-5) and checker.kept is None


@pytest.mark.parametrize("rule", ["match", "point-mass", "reject"])
def test_a_budget_of_the_whole_history_writes_what_exact_verification_writes(rule):
    law = Law(1.0, top_p=0.9)
    exact = written(LayerSkip(skip=2, adapt="always", rule=rule), law, seed=3)
    found = written(draft(small(k=64), rule=rule), law, seed=3)
    assert found.ids == exact.ids and found.accepted == exact.accepted and len(set(found.ids)) > 1


@pytest.mark.parametrize("skip", [1, 2])
def test_greedy_with_the_whole_history_is_plain_greedy(skip):
    assert written(draft(small(k=64), skip=skip)).ids == written(None).ids


def test_a_round_is_masked_dense_attention_in_every_layer():
    """The logits of a verification against those of a model whose attention is masked by brute force."""
    found = model()
    proposal = (5, 6, 7)
    with Recipe().on(found) as run:
        target, _ = begun(run, 40, found)
        checker = small(m=0).begin(target, draft(small()))
        logits = checker.check(3, Proposal(proposal))
        kept = checker.kept
        target.cache.crop(-4)

        def brute(call, q, positions, store):
            at = torch.arange(44)
            mask = (torch.isin(at, kept) | (at >= 40)) & (at <= torch.arange(40, 44)[:, None])
            return attend(q, store.tail.keys, store.tail.values, scale=call.scale, causal=False, mask=mask)[0]

        target.cache.reads = brute
        wanted = read(found, torch.tensor([[3, *proposal]]), target.cache, last=4)[0]
    assert len(kept) == 12 and torch.allclose(logits, wanted, atol=1e-5)


def test_the_choice_follows_target_and_draft():
    """S of a round against scores computed from the models' own queries and keys."""
    found = model()
    with Recipe().on(found) as run:
        target, logits = begun(run, 40, found)
        own = draft(small(m=4))
        drafter, checker = own.begin(target), own.verify.begin(target, own)
        target.ids.append(int(logits.argmax()))
        proposal = drafter.propose(target.ids, 4)
        positions = checker.positions(40, proposal)
        total = torch.zeros(40)
        for layer, heads in parse_heads(HEADS["draft_heads"]).items():
            k = drafter.cache.layers[layer].store.tail.keys[0, :, :40]
            for head in heads:
                total += (proposal.notes["queries"][layer][head] @ k[head // 2].mT * 8**-0.5).softmax(-1).mean(0)
        s_D = checker.draft_scores(40, proposal)
        assert torch.allclose(s_D[0], total / 3, atol=1e-5) and float(s_D.sum()) == pytest.approx(1, abs=1e-5)
        s_T = checker.target_scores(40)
        assert float(s_T.sum()) == pytest.approx(1, abs=1e-5)
        assert positions.tolist() == spelled_out(s_T[0], s_D[0], 40, 12, 4, **SIZES)
        drafter.close()


def test_a_draft_that_is_the_target_scores_as_the_target_attends():
    """R_D = R_T and one proposed token: s_D is the true attention of that token's row, history alone."""
    found = model()
    heads = parse_heads("0:1,2; 3:0")
    seen = {}
    with Recipe().on(found) as run:
        target, logits = begun(run, 30, found)
        target.ids.append(int(logits.argmax()))
        checker = DustinChecker(target, small(m=7), Setting(heads, heads, 0.5))
        looks = lambda call, q, positions, store: seen.__setitem__(call.layer, q)  # noqa: E731
        target.cache.reads = looks
        read(found, torch.tensor([target.ids[-1:]]), target.cache)
        target.cache.reads = None
        notes = {"queries": {n: q[0] for n, q in seen.items()}, "cache": target.cache}
        s_D = checker.draft_scores(30, Proposal((4,), None, notes))
        total = torch.zeros(30)
        for layer, own in heads.items():
            for head in own:
                k = target.cache.layers[layer].store.tail.keys[0, head // 2, :31]
                row = (seen[layer][0, head, 0] @ k.T * 8**-0.5).softmax(-1)
                total += row[:30] / row[:30].sum()
        assert torch.allclose(s_D[0], total / 3, atol=1e-5)


def test_rejected_tokens_leave_no_trace():
    found = model()
    ends = []
    for proposal in ((5, 6, 7), (5, 9)):
        with Recipe().on(found) as run:
            target, _ = begun(run, 40, found)
            checker = small(m=0).begin(target, draft(small()))
            checker.check(3, Proposal(proposal))
            checker.keep(2, 1 + len(proposal))  # what was written and the first proposal stand
            held = [(layer.store.tail.keys.clone(), layer.store.tail.values.clone()) for layer in target.cache.policy_layers]
            ends.append((held, dict(checker.last), checker.check(8, Proposal((1, 2)))))
    (first, queries, logits), (second, other, again) = ends
    for a, b in zip(first, second):
        assert a[0].shape[2] == 42 and torch.allclose(a[0], b[0], atol=1e-6) and torch.allclose(a[1], b[1], atol=1e-6)
    assert all(torch.allclose(queries[n], other[n], atol=1e-6) for n in queries) and torch.allclose(logits, again, atol=1e-5)


def test_rounds_whose_drafts_all_fail_still_write():
    done = written(draft(small(), gamma=3), max_new=12)
    assert len(done.ids) == 12 and done.passes <= 11


def test_what_is_written_is_the_same_every_time():
    assert written(draft(small())).ids == written(draft(small())).ids


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_other_families(family):
    """Soft-capped scores, and layers with a window: whole history here, so greedy text is the plain text."""
    found = tiny(family, layers=4)
    heads = {"target_heads": "1:0; 3:1", "draft_heads": "0:0; 3:1"}
    with Recipe().on(found) as run:
        ids = tiny_ids(1, 30)
        plain = greedy(found, (cache := run.new_cache(Prompt(ids, 30))), read(found, ids, cache)[:, 0], 10, ())
        cache = run.new_cache(Prompt(ids, 30))
        target = Target(found, cache, ids[0].tolist())
        logits = read(found, ids, cache)[:, 0]
        if family == "gemma2":  # every other layer has a window shorter than the prompt and keeps its own cache
            heads = {"target_heads": "1:0; 3:1", "draft_heads": "3:1"}
        k = 64
        made = Asked(verify=Dustin(k=k, **heads), skip=1, adapt="always")
        assert write(target, made, logits, 10, ()).ids == plain.ids
        if family == "gemma2":
            with pytest.raises(Refused, match="layer 0; expected one of the 2 that see the whole text"):
                Dustin(k=k, target_heads="0:0", draft_heads="3:1").begin(target, made)


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("knobs", "what"), [
    ({"k": 36}, "expected k of at least 37"), ({"k": 64, "m": 29}, "from 0 to k - n_sink - n_recent = 28"),
    ({"m": -1}, "at least 0"),
    ({"target_heads": ""}, "layers with their heads"), ({"draft_heads": "3"}, "layers with their heads"),
    ({"target_heads": "1:"}, "layers with their heads"),
])
def test_bad_knobs_are_refused(knobs, what):
    with pytest.raises(Refused, match=what):
        Dustin(**knobs)


def test_what_does_not_fit_the_models_is_refused():
    found = model()
    with Recipe().on(found) as run:
        target, _ = begun(run, 40, found)
        for knobs, what in (({"target_heads": "1:4"}, "no head 4; expected heads from 0 to 3"),
                            ({"target_heads": "4:0"}, "layer 4; expected one of the 4")):
            with pytest.raises(Refused, match=what):
                small(**knobs).begin(target, draft(small()))
        with pytest.raises(Refused, match="such as layer-skip, or m=0"):
            small().begin(target, Suffix())
        assert small(m=0).begin(target, Suffix()).draft_layers == ()
        own = draft(small(draft_heads="1:0"))
        drafter, checker = LayerSkip(skip=2).begin(target), own.verify.begin(target, own)
        drafter.watch((0, 3))
        target.ids.append(3)
        proposal = drafter.propose(target.ids, 4)
        with pytest.raises(Refused, match="no queries of layer 1; expected layers that it runs, such as 0"):
            checker.check(3, proposal)
        own = draft(small(draft_heads="0:5"))
        checker = own.verify.begin(target, own)
        with pytest.raises(Refused, match="no head 5"):
            checker.check(3, proposal)
        drafter.cache.crop(-20)
        checker = draft(small()).verify.begin(target, own)
        with pytest.raises(Refused, match="have read the same text"):
            checker.check(3, proposal)
        drafter.close()


def test_caches_that_evict_are_refused():
    found, recipe = model(), Recipe.parse("knorm(budget=0.5)")
    with recipe.on(found) as run:
        target, _ = begun(run, 40, found)
        with pytest.raises(Refused, match=r"knorm.*changes it"):
            small().begin(target, draft(small()))


def test_a_verifier_stands_in_a_draft_and_is_written_back():
    text = 'layer-skip(verify=dustin(k=256, m=8, target_heads="12:0,3; 20:1"))'
    recipe = Recipe.parse(text)
    assert str(recipe) == text and recipe.decoding.verify.k == 256
    with pytest.raises(Refused, match="layer-skip"):
        Recipe.parse("dustin")


# --------------------------------------------------------------------------------------------------------------- offline


def test_heads_as_text_and_as_rows():
    assert parse_heads(" 12: 0,3 ;20:1;12:5,3") == {12: (0, 3, 5), 20: (1,)} == by_layer([[12, 0], [12, 3], [12, 5], [20, 1]])
    assert described(LayerSkip(skip=3, gamma=7, verify=small(), rule="reject")) == "layer-skip(skip=3)"


def test_a_planted_retrieval_head_is_found():
    weights = torch.full((4, 3, 50), 0.01)
    weights[2, :, 20:24] = 0.2
    found = retrieval_scores(weights, [(20, 24)])
    assert found.tolist() == pytest.approx([0.12, 0.12, 2.4, 0.12]) and best_heads({7: found}, 1) == {7: (2,)}
    assert best_heads({7: found}, 2) == {7: (0, 2)}


def planted(seed, n=60):
    """A trace where target layer 1 knows one half of what matters and draft layer 4 the other."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(n, generator=g).pow(8) for _ in range(2))
    noise = lambda: torch.rand(n, generator=g)  # noqa: E731
    norm = lambda t: t / t.sum()  # noqa: E731
    return Trace(norm(norm(a) + norm(b)), {0: norm(noise()), 1: norm(a)}, {3: norm(noise()), 4: norm(b)})


def test_layers_and_split_that_recover_most_are_found():
    found = fit([planted(i) for i in range(8)], k=16, **SIZES)
    assert found.layer == 1 and 4 in found.draft and 0 < found.split < 1
    ends = [sum(recovery(t.mass, chosen(t, 1, found.draft, k=16, m=m, **SIZES)) for t in map(planted, range(8))) / 8
            for m in (0, 11)]
    assert found.recovery > max(ends)
    with pytest.raises(Refused, match="longer than the 64 positions"):
        fit([planted(0)], k=64, **SIZES)


def test_recovery_is_bounded_and_the_oracle_is_best():
    one = planted(3)
    rates = []
    for k in range(6, 61):
        for m in (0, k - 5):
            kept = chosen(one, 0, (3,), k=k, m=m, **SIZES)
            assert 0 <= recovery(one.mass, kept) <= recovery(one.mass, oracle(one.mass, k)) + 1e-6 <= 1 + 1e-5
        rates.append(recovery(one.mass, chosen(one, 0, (), k=k, m=0, **SIZES)))
    assert all(b >= a - 1e-6 for a, b in itertools.pairwise(rates)) and rates[-1] == pytest.approx(1, abs=1e-5)


def test_traces_are_what_target_and_draft_attend_to():
    found = model()
    heads = parse_heads("1:0,2"), parse_heads("3:1")
    with Recipe().on(found) as run:
        ids = tiny_ids(1, 40)
        cache = run.new_cache(Prompt(ids, 40))
        target = Target(found, cache, ids[0].tolist())
        made = traces(target, LayerSkip(skip=2), [20, 33], 3, *heads)
        assert [len(t.mass) for t in made] == [20, 33] and all(float(t.mass.sum()) == pytest.approx(1, abs=1e-5) for t in made)
    # once more from scratch: the first 20 tokens, then one row at a time, with all of the target's layers
    rows = {}
    with Recipe().on(found) as run:
        cache = run.new_cache(Prompt(ids[:, :20], 20))
        cache.reads = lambda call, q, positions, store: rows.setdefault(call.layer, []).append(q)
        read(found, ids[:, :20], cache)
        read(found, ids[:, 20:24], cache)
        mass = torch.zeros(20)
        for layer in range(4):
            k = cache.layers[layer].store.tail.keys[0, :, :20]
            for head in range(4):
                mass += (rows[layer][1][0, head] @ k[head // 2].T * 8**-0.5).softmax(-1).mean(0) / 16
        last = {1: rows[1][0][:, :, -1:]}
        cache.reads = None
        assert torch.allclose(made[0].mass, mass, atol=1e-5)
        assert torch.allclose(made[0].target[1], history_scores(cache, last, heads[0], 20)[0], atol=1e-5)
    assert made[0].draft.keys() == {3}


def test_the_profile_of_a_draft_is_found_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    found, own = model(), Dustin(k=12, **SIZES)
    with Recipe().on(found) as run:
        target, _ = begun(run, 40, found)
        with pytest.raises(Refused, match=r"longspan profile 'layer-skip\(verify=dustin, skip=2\)'"):
            own.begin(target, LayerSkip(skip=2, verify=own))
        tensors = {"target_heads": torch.tensor([[1, 0], [1, 3]]), "draft_heads": torch.tensor([[0, 2]]),
                   "split": torch.tensor(0.25)}
        profiles.save(Profile(profiles.trained_key(found, own.beside(LayerSkip(skip=2))), tensors))
        checker = own.begin(target, LayerSkip(skip=2, gamma=7, verify=own))
        assert checker.setting.target == {1: (0, 3)} and checker.draft_layers == (0,) and checker.m == 2
        with pytest.raises(Refused, match="skip=1"):
            own.begin(target, LayerSkip(skip=1, verify=own))
