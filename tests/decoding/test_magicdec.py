"""MagicDec: the text stays the target's, the small cache stays small, and the target's own cache is never touched."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.cache.scores.h2o import H2O
from longspan.cache.scores.snapkv import SnapKV
from longspan.cache.scores.streaming_llm import StreamingLLM
from longspan.decoding import Law, Noise, Target, greedy, read, write
from longspan.decoding.drafts.magicdec import MagicDec, policy_of
from longspan.decoding.recent import compressed_twin
from longspan.models import Prompt
from longspan.registry import Refused

SNAP = SnapKV(window=4, kernel=3)


def begun(model, run, length=40, law=None, seed=0):
    ids = tiny_ids(1, length)
    cache = run.new_cache(Prompt(ids, length))
    logits = read(model, ids, cache)[:, 0]
    return Target(model, cache, ids[0].tolist(), law or Law(), Noise((seed,))), logits


def written(draft, law=None, seed=0, max_new=20):
    model = tiny("llama", layers=3)
    with Recipe().on(model) as run:
        target, logits = begun(model, run, law=law, seed=seed)
        if draft is None:
            return greedy(model, target.cache, logits, max_new, ())
        return write(target, draft, logits, max_new, ())


@pytest.mark.parametrize("score", [StreamingLLM(), SNAP])
@pytest.mark.parametrize("gamma", [1, 3])
def test_greedy_text_is_the_plain_text(score, gamma):
    done = written(MagicDec(gamma=gamma, budget=16, cache=score, adapt="always"))
    assert done.ids == written(None).ids and done.proposed > 0


def test_sampled_text_is_the_plain_text_under_match():
    law = Law(1.0, top_p=0.9)
    plain = written(MagicDec(budget=4096), law, 5)  # every proposal stands: this is what plain drawing writes
    assert written(MagicDec(budget=16, adapt="always"), law, 5).ids == plain.ids and len(set(plain.ids)) > 1


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_a_budget_of_everything_is_the_target_itself(rule):
    done = written(MagicDec(gamma=3, budget=256, adapt="always", rule=rule), Law(1.0), 2, max_new=21)
    assert done.accepted == done.proposed == 15 and done.passes == 5


def test_the_cache_never_holds_more_than_the_budget():
    model, held = tiny("llama", layers=3), []
    with Recipe().on(model) as run:
        target, logits = begun(model, run)
        drafter = MagicDec(gamma=3, budget=16).begin(target)
        target.ids.append(int(logits.argmax()))
        look = lambda call, q, positions, store: held.append(store.width())  # noqa: E731
        drafter.cache.reads = look
        for accepted in (3, 0, 1, 2, 3):
            proposal = drafter.propose(target.ids, 9)
            target.ids += [*proposal.tokens[:accepted], 7]
            drafter.settle(target.ids, accepted, 3)
        assert max(held) <= 16 and drafter.seen == len(target.ids) - (2 if accepted == 3 else 1)
        for heads in drafter.cache.kept_positions():
            for positions in heads:  # the sinks, then the newest without a gap
                assert positions[:4].tolist() == [0, 1, 2, 3] and positions[4:].diff().eq(1).all()
                assert int(positions[-1]) == drafter.seen - 1


def test_full_attention_until_it_first_overflows():
    model = tiny("llama", layers=3)
    with Recipe().on(model) as run:
        target, logits = begun(model, run)
        drafter = MagicDec(gamma=3, budget=45, rule="reject").begin(target)  # 41 + 4 entries
        target.ids.append(int(logits.argmax()))
        proposal = drafter.propose(target.ids, 1)
        after = read(model, torch.tensor([target.ids[-1:]]), target.cache)[0]
        assert torch.allclose(proposal.q[0], Law().probabilities(target.ids, after)[0])
        assert drafter.cache.policy_layers[0].store.width() == 41


def test_snapkv_keeps_what_it_keeps_while_reading():
    """The twin, made of a cache that watched nothing, against one that read the prompt under the policy."""
    model = tiny("llama", layers=3)
    with Recipe().on(model) as run:
        target, _ = begun(model, run)
        before = [layer.store.tail.keys.clone() for layer in target.cache.policy_layers]
        twin = compressed_twin(target, policy_of(SNAP, 12)).kept_positions()
        assert all(torch.equal(layer.store.tail.keys, k) for layer, k in zip(target.cache.policy_layers, before))
        assert target.cache.get_seq_length() == 40
    recipe = Recipe.parse('snapkv(window=4, kernel=3, budget="12 tokens")')
    with recipe.on(model) as run:
        other, _ = begun(model, run)
        wanted = other.cache.kept_positions()
    assert [[p.tolist() for p in heads] for heads in twin] == [[p.tolist() for p in heads] for heads in wanted]
    assert len(twin[0][0]) == 12


def test_snapkv_keeps_what_is_written():
    model = tiny("llama", layers=3)
    with Recipe().on(model) as run:
        target, logits = begun(model, run)
        drafter = MagicDec(gamma=3, budget=12, cache=SNAP).begin(target)
        target.ids.append(int(logits.argmax()))
        proposal = drafter.propose(target.ids, 9)
        target.ids += [*proposal.tokens[:2], 7]
        drafter.settle(target.ids, 2, 3)
        assert drafter.cache.policy_layers[0].store.width() == 12 + 3 and drafter.seen == 43


@pytest.mark.parametrize(("knobs", "what"), [
    ({"gamma": 0}, "at least 1"), ({"budget": 4}, "takes 4 entries; expected a budget of more"),
    ({"cache": H2O()}, "needs all-queries of a prompt that was read before"),
])
def test_bad_knobs_are_refused(knobs, what):
    with pytest.raises(Refused, match=what):
        MagicDec(**knobs)


def test_a_cache_that_evicts_is_refused():
    model, recipe = tiny("llama", layers=3), Recipe.parse("knorm(budget=0.5)")
    with recipe.on(model) as run:
        target, _ = begun(model, run)
        with pytest.raises(Refused, match=r"knorm.*changes it"):
            MagicDec().begin(target)


def test_it_is_written_in_a_recipe():
    text = "magicdec(budget=64, cache=snapkv(window=16))"
    assert str(Recipe.parse(text)) == text
