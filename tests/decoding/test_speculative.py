"""The round loop: greedy text is the plain text whatever is proposed; useless drafts are put to rest."""

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan import Recipe
from longspan.decoding import Draft, Drafter, Law, Noise, Proposal, Target, greedy, pick, read, write
from longspan.decoding.speculative import Pays
from longspan.models import Prompt
from longspan.registry import Refused, method


class Scripted(Drafter):
    def __init__(self, make):
        self.make, self.settled = make, []

    def propose(self, ids, limit):
        return Proposal(tuple(self.make(ids))[:limit])

    def settle(self, ids, accepted, proposed):
        self.settled.append((len(ids), accepted, proposed))


@method("test-scripted", kind="draft", summary="Proposes what the test says.")
class ScriptedDraft(Draft):
    def begin(self, target):
        return self.make

    def with_(self, make):
        object.__setattr__(self, "make", Scripted(make))
        return self


def run(draft, recipe="full", law=None, max_new=20, seed=0, ends=(), length=40):
    model = tiny("llama")
    ids = tiny_ids(1, length)
    made = Recipe.parse(recipe)
    with made.on(model) as on:
        cache = on.new_cache(Prompt(ids, ids.shape[1]))
        logits = read(model, ids, cache)[:, 0]
        if draft is None:
            return greedy(model, cache, logits, max_new, ends)
        target = Target(model, cache, ids[0].tolist(), law or Law(), Noise((seed,)))
        done = write(target, draft, logits, max_new, ends)
        assert target.ids == ids[0].tolist() + done.ids
        return done


def drafts():
    plain = run(None, max_new=64).ids

    def good(ids):
        return plain[len(ids) - 40 :][:4]

    def bad(ids):
        return [3, 1, 4]

    def mixed(ids):
        return [*good(ids)[:2], 7]

    return {"good": good, "bad": bad, "mixed": mixed, "none": lambda ids: []}


@pytest.mark.parametrize("recipe", ["full", "knorm(budget=0.5)", "streaming-llm(budget=0.5, schedule=every(steps=8))",
                                    "keydiff @ adakv(budget=0.5)"])
@pytest.mark.parametrize("name", ["good", "bad", "mixed", "none"])
@pytest.mark.parametrize("adapt", ["auto", "always"])
def test_greedy_text_is_the_plain_text(recipe, name, adapt):
    plain = run(None, recipe)
    done = run(ScriptedDraft(adapt=adapt).with_(drafts()[name]), recipe)
    assert done.ids == plain.ids
    assert done.passes <= plain.passes


def test_good_drafts_save_passes():
    done = run(ScriptedDraft(adapt="always").with_(drafts()["good"]), max_new=21)
    assert done.passes == 4 and done.accepted == done.proposed == 16


@pytest.mark.parametrize("name", ["good", "bad", "mixed"])
def test_sampled_text_is_the_plain_text_under_match(name):
    law = Law(1.0, top_p=0.9)
    plain = run(ScriptedDraft(adapt="always").with_(lambda ids: []), law=law, seed=5)
    done = run(ScriptedDraft(adapt="always").with_(drafts()[name]), law=law, seed=5)
    assert done.ids == plain.ids
    assert len(set(plain.ids)) > 1


def test_it_ends_where_plain_writing_ends():
    plain = run(None, max_new=20).ids
    for n in (0, 1, 3, 6):
        ends = (plain[n],)
        assert run(ScriptedDraft(adapt="always").with_(drafts()["good"]), ends=ends).ids == run(None, ends=ends).ids
    for most in (1, 2, 5):
        assert run(ScriptedDraft(adapt="always").with_(drafts()["good"]), max_new=most).ids == plain[:most]


def test_a_draft_is_told_what_stood():
    draft = ScriptedDraft(adapt="always").with_(drafts()["mixed"])
    done = run(draft, max_new=10)
    assert all(accepted <= proposed for _, accepted, proposed in draft.make.settled)
    assert draft.make.settled[-1][0] == 40 + len(done.ids)


@pytest.mark.parametrize("cost", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("steps", [96, 600])
def test_useless_drafts_cost_less_than_a_tenth(cost, steps):
    pays, spent = Pays(), 0.0
    for _ in range(steps):
        propose = pays.propose()
        spent += cost if propose else 1.0
        pays.round(0, 1, cost) if propose else pays.step(1.0)
    assert spent < 1.1 * steps


def test_looking_without_finding_is_counted_too():
    pays, asked = Pays(), 0
    for _ in range(400):
        propose = pays.propose()
        asked += propose
        pays.step(1.0, 2.0 if propose else 0.0)
    assert 1 < asked < 20


def test_a_first_round_that_sets_things_up_is_forgiven():
    pays = Pays()
    for _ in range(2):
        pays.step(1.0)
    pays.round(0, 1, 500.0)
    waited = 0
    while not pays.propose():
        pays.step(1.0)
        waited += 1
    assert waited < 60


def test_drafts_that_pay_never_rest():
    pays = Pays()
    pays.step(1.0)
    pays.step(1.0)
    for _ in range(100):
        assert pays.propose()
        pays.round(2, 2, 1.8)


def test_few_tokens_are_proposed_until_some_stood():
    pays, seen = Pays(recent=[1.0, 1.0]), []
    for accepted, proposed in ((1, 1), (2, 2), (4, 4), (3, 8), (0, 6)):
        seen.append(pays.most)
        pays.round(accepted, proposed, 1.0)
    assert [*seen, pays.most] == [1, 2, 4, 8, 6, 1]


def test_old_gains_are_forgotten():
    pays = Pays()
    for _ in range(2):
        pays.step(1.0)
    for _ in range(1000):
        pays.round(7, 7, 2.0)
    tries = 0
    while pays.propose() and tries < 1000:
        pays.round(0, 7, 11.0)
        tries += 1
    assert tries < 60  # a share of the 8,000 tokens written, and the four steps saved


def test_suffix_drafts_repeat_the_text():
    from longspan.decoding.drafts.suffix import Suffix

    drafter = Suffix().begin(None)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert drafter.propose(text, 10).tokens == (4, 5, 6, 7, 8, 9)
    assert drafter.propose([*text, 4], 2).tokens == (5, 6)
    assert drafter.propose([*text, 99], 10).tokens == ()
    assert Suffix(gamma=3).begin(None).propose(text, 10).tokens == (4, 5, 6)


def test_suffix_takes_the_longest_match_then_the_latest():
    from longspan.decoding.drafts.suffix import Suffix

    text = [5, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2, 6, 5, 1, 2]
    assert Suffix(alpha=0.1).begin(None).propose(text, 10).tokens == (7,)
    assert Suffix(alpha=0.1).begin(None).propose(text[:-3] + [4, 1, 2], 10).tokens == (6,)


def test_suffix_in_a_recipe_writes_the_same_text():
    model, ids = tiny("llama"), torch.cat([tiny_ids(1, 30)] * 2, 1)
    plain = run(None).ids
    from longspan.decoding.drafts.suffix import Suffix

    assert run(Suffix()).ids == plain
    assert Recipe.parse("knorm(budget=0.5) + suffix(gamma=3)").decoding.gamma == 3
    assert model is not None and ids.shape == (1, 60)


def test_reject_needs_a_law():
    with pytest.raises(Refused, match="certain"):
        Recipe.parse("suffix(rule=reject)")


def test_a_verifier_stands_in_a_draft():
    with pytest.raises(Refused, match="verify=exact"):
        Recipe.parse("exact")
    assert pick(torch.tensor([0.0, 1.0]), Noise(), 0) == 1
