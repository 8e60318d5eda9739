"""Rollout steps: any drafts, same answers; bubbles are used and never paid for; nothing but the step's answers is trained on."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import tiny, tiny_ids

from longspan.decoding import Law, Noise, Target, read, write
from longspan.decoding.drafts.bubblespec import BubbleSpec
from longspan.decoding.rollouts.engine import Rank, Rollouts, rollout_step
from longspan.decoding.rollouts.pool import Rollout, RolloutPool
from longspan.decoding.rollouts.step import Policy, Running, Sampling, replay, token_logprobs
from longspan.registry import Refused

END = 2
PROMPTS = [tuple(tiny_ids(1, 5 + 3 * p, seed=p)[0].tolist()) for p in range(3)]
REQUESTS = [((1, place, sample), ids) for place, ids in enumerate(PROMPTS) for sample in range(2)]
SAMPLING = Sampling(Law(1.0, top_p=0.95), max_new_tokens=20, ends=(END,))


@pytest.fixture(scope="module")
def policy():
    return Policy(tiny("llama").double(), "v0")


@pytest.fixture(scope="module")
def plain(policy):
    return sample(policy)


def sample(policy, draft=None, stored=None, sampling=SAMPLING, requests=REQUESTS, rule="match"):
    find = None if draft is None else lambda rollout: draft.over(stored, rollout, sampling.ends)
    running = Running(policy, sampling, rule=rule, drafter=find)
    running.add(requests)
    return running.run()


def tokens(rollouts):
    return [r.tokens for r in rollouts]


def pools(plain):
    g = torch.Generator().manual_seed(0)
    noise = [Rollout(r.key, r.prompt, torch.randint(3, 128, (30,), generator=g).tolist(), "x") for r in plain]
    wrong = [Rollout(r.key, r.prompt, [(t + 1) % 128 for t in r.tokens], "x") for r in plain]
    half = [Rollout(r.key, r.prompt, [*r.tokens[: len(r.tokens) // 2], 77, 78], "x") for r in plain]
    swapped = [Rollout(r.key, r.prompt, other.tokens, "x") for r, other in zip(plain, plain[::-1])]
    return {"empty": [], "random": noise, "wrong": wrong, "half": half, "swapped": swapped, "itself": plain,
            "other prompts": [Rollout(r.key, (9, *r.prompt), r.tokens, "x") for r in plain]}


@pytest.mark.parametrize("name", ["empty", "random", "wrong", "half", "swapped", "itself", "other prompts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_pool_gives_the_plain_answers(name, dtype, policy, plain):
    if dtype == torch.float32:
        policy = Policy(tiny("llama"), "v0")
        plain = sample(policy)
    draft = BubbleSpec()
    found = sample(policy, draft, RolloutPool(128, pools(plain)[name]))
    assert tokens(found) == tokens(plain)
    assert [r.ended for r in found] == [r.ended for r in plain]
    for mine, theirs in zip(found, plain):
        assert mine.logprobs == (theirs.logprobs if dtype == torch.float64 else pytest.approx(theirs.logprobs, abs=1e-4))
        assert mine.passes <= len(mine.tokens) == theirs.passes
        assert len(mine.tokens) <= mine.passes + mine.accepted
    assert torch.equal(token_logprobs(policy.model, found), token_logprobs(policy.model, plain)), "what a learner sees"
    stored = RolloutPool(128, pools(plain)[name])
    again = replay(plain, SAMPLING, lambda rollout: draft.over(stored, rollout, (END,)))
    assert [(r.tokens, r.passes, r.proposed) for r in again] == [(r.tokens, r.passes, r.proposed) for r in found]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_a_batch_is_its_sequences_one_by_one(family):
    model = tiny(family).double()
    policy, requests = Policy(model, "v0"), [*REQUESTS, ((1, 3, 0), (7,))]
    draft = BubbleSpec()
    plain = sample(policy, requests=requests)
    stored = RolloutPool(128, pools(plain)["half"])
    together = sample(policy, draft, stored, requests=requests)
    for done, other, request in zip(plain, together, requests):
        assert sample(policy, requests=[request])[0].tokens == done.tokens == other.tokens
        whole = model(torch.tensor([[*done.prompt, *done.tokens]])).logits[0, len(done.prompt) - 1 : -1].float()
        scored = torch.stack([SAMPLING.law.probabilities((), row[None])[0] for row in whole]).log()
        assert scored[range(len(done.tokens)), done.tokens].tolist() == pytest.approx(other.logprobs, abs=1e-9)


def test_sequences_may_join_at_any_time(policy, plain):
    running, found = Running(policy, SAMPLING), []
    for request in [*REQUESTS, ((1, 3, 0), (7,))]:
        running.add([request])
        found += [r for _ in range(3) for r in running.advance()]
    found += running.run()
    assert tokens(sorted(found, key=lambda r: r.key))[:-1] == tokens(plain)
    late = Running(policy, SAMPLING)
    late.add([((1, 3, 0), (7,))])
    late.add(REQUESTS[:1])
    assert tokens(late.run()) == [plain[0].tokens, next(r.tokens for r in found if r.key == (1, 3, 0))]


def test_the_batch_writes_what_the_round_loop_writes(policy, plain):
    from transformers import DynamicCache

    for done in plain[::2]:
        cache, ids = DynamicCache(), torch.tensor([done.prompt])
        logits = read(policy.model, ids, cache)[:, 0]
        target = Target(policy.model, cache, list(done.prompt), SAMPLING.law, Noise(done.key))
        found = write(target, BubbleSpec(adapt="always"), logits, 20, [END])
        assert found.ids == [t for t in done.tokens if t != END]


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_perfect_draft_takes_the_fewest_passes(gamma, policy, plain):
    found = sample(policy, BubbleSpec(gamma=gamma, gamma_max=gamma), RolloutPool(128, plain))
    assert [r.passes for r in found] == [math.ceil(len(r.tokens) / (gamma + 1)) for r in plain]
    assert all(r.accepted == r.proposed for r in found)


def test_without_drafts_every_token_is_a_pass(policy, plain):
    running = Running(policy, SAMPLING)
    running.add(REQUESTS)
    running.run()
    assert running.passes == max(len(r.tokens) for r in plain)
    found = sample(policy, BubbleSpec(own_text=False), RolloutPool(128))
    assert [r.passes for r in found] == [len(r.tokens) for r in plain]


@pytest.mark.parametrize("rule", ["match", "point-mass", "reject"])
def test_at_temperature_zero_all_rules_are_greedy(rule, policy):
    greedy = Sampling(Law(0.0), max_new_tokens=12)
    plain = sample(policy, sampling=greedy)
    stored = RolloutPool(128, pools(plain)["half"])
    for rollout in stored:
        rollout.laws = [torch.full((128,), 1 / 128, dtype=torch.float64)] * len(rollout.tokens)
    assert tokens(sample(policy, BubbleSpec(rule=rule), stored, greedy, rule=rule)) == tokens(plain)


def test_drafts_that_are_too_long_or_end_early_change_nothing(policy):
    short = Sampling(Law(1.0), max_length=len(PROMPTS[0]) + 5, ends=(END,))
    plain = sample(policy, sampling=short, requests=REQUESTS[:2])
    assert all(len(r.tokens) <= 5 for r in plain)
    for longer in ([*range(30, 70)], [END, *range(30, 50)]):
        for done in plain:
            stored = RolloutPool(128, [Rollout(done.key, done.prompt, [*done.tokens, *longer], "x")])
            found = sample(policy, BubbleSpec(), stored, short, [(done.key, done.prompt)])[0]
            assert found.tokens == done.tokens and found.ended and END not in found.tokens[:-1]


def test_point_mass_and_reject_follow_the_law_of_the_policy():
    """First tokens over many keys, against the policy's own law."""
    model = tiny("llama", vocab=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.6)
    policy, prompt, n = Policy(model, "v1"), (3, 4, 5), 1200
    one = Sampling(Law(1.0), max_new_tokens=2)
    wanted = one.law.probabilities((), model(torch.tensor([prompt])).logits[0, -1:])[0]
    other = Running(Policy(tiny("llama", vocab=8, seed=1), "v0"), one, noise=lambda key: Noise(("draft", *key)), keep_laws=True)
    requests = [((1, 0, i), prompt) for i in range(n)]
    other.add(requests)
    stored = RolloutPool(8, other.run())
    for rule in ("point-mass", "reject"):
        draft = BubbleSpec(rule=rule, gamma=1, own_text=False)
        found = sample(policy, draft, stored, one, requests, rule)
        seen = torch.bincount(torch.tensor([r.tokens[0] for r in found]), minlength=8).double()
        assert float(((seen - n * wanted) ** 2 / (n * wanted)).sum()) < 24.3, "chi-square of 7 degrees at 1e-3"
        assert 0 < sum(r.accepted for r in found) < sum(r.proposed for r in found)


# ------------------------------------------------------------------------------------------------------------- pools


def test_pools_are_saved_and_read(tmp_path, plain):
    stored = RolloutPool(128, plain)
    stored.save(tmp_path / "pool.safetensors")
    found = RolloutPool.load(tmp_path / "pool.safetensors")
    assert [(r.key, r.prompt, r.tokens, r.version, r.ended) for r in found] == [
        (r.key, r.prompt, r.tokens, r.version, r.ended) for r in stored]
    assert next(iter(found)).logprobs == pytest.approx(plain[0].logprobs, abs=1e-5)
    assert found.vocabulary == 128 and found.tokens == sum(len(r.tokens) for r in plain)


def test_rollouts_without_a_version_are_dropped(tmp_path, plain):
    stored = RolloutPool(128, [Rollout((1, 0, 0), (5,), [6, 7]), *plain])
    assert len(stored) == len(plain) and stored.dropped == 1
    stored.save(tmp_path / "pool")
    with safe_open(tmp_path / "pool", "pt") as file:
        about = json.loads(file.metadata()["rollouts"])
        tensors = {name: file.get_tensor(name) for name in ("prompts", "tokens", "logprobs")}
    del about["rollouts"][0]["version"]
    save_file(tensors, tmp_path / "pool", metadata={"rollouts": json.dumps(about)})
    assert len(RolloutPool.load(tmp_path / "pool")) == len(plain) - 1


def test_what_is_no_pool_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")
    for name in ("text", "weights.safetensors", "none"):
        with pytest.raises(Refused, match=name):
            RolloutPool.load(tmp_path / name)
    for bad in (-1, 128):
        with pytest.raises(Refused, match=f"token {bad}: expected ids of 0 to 127"):
            RolloutPool(128, [Rollout((0, 0, 0), (5,), [bad], "v")])


# ------------------------------------------------------------------------------------------------------------- steps


def prompts_of(step):
    """Five prompts a step, two of them equal; four steps."""
    if step > 3:
        return []
    found = [tuple(tiny_ids(1, 4 + p, seed=10 * step + p)[0].tolist()) for p in range(4)]
    return [*found, found[1]]


def ranks(how, of=2):
    return [Rank(i, of, how) for i in range(of)]


def policies():
    return [Policy(tiny("llama", seed=s).double(), f"v{s}") for s in (0, 1)]


HOW = Rollouts(2, Sampling(Law(1.0), max_new_tokens=24, ends=(END, 3, 4, 5, 6, 7)), BubbleSpec(own_text=False))


@pytest.mark.parametrize("change", [{}, {"keys": "fresh"}, {"slots": 1}, {"lookahead": "none"}, {"lookahead": "one"}])
def test_a_learner_is_given_the_same_with_and_without(change):
    from dataclasses import replace

    plain, with_drafts, drafted = ranks(replace(HOW, draft=None), 3), ranks(replace(HOW, **change), 3), 0
    for step, policy in enumerate([*policies(), policies()[0]]):
        one, two = (rollout_step(r, step, policy, prompts_of) for r in (plain, with_drafts))
        for name, value in one.learner_inputs().items():
            assert torch.equal(value, two.learner_inputs()[name]), name
        assert [r.key for r in two.rollouts] == [(step, p, s) for p in range(5) for s in range(2)]
        assert all(r.version == policy.version for r in two.rollouts)
        assert two.passes <= one.passes
        for rank in with_drafts:
            assert all(r.key[0] > step for r in rank.pool), "drafts of a step are forgotten after it"
            assert rank.report.bubble_passes <= two.passes - rank.report.passes, "the barrier never waits for a draft"
        drafted += sum(r.bubble_tokens for r in two.reports)
        assert two.utilisation <= two.utilisation_with_drafts <= 1
    assert (drafted > 0) == (change.get("lookahead") != "none")


def test_the_same_policy_and_noise_makes_drafts_that_all_stand():
    policy = policies()[0]
    found = ranks(HOW)
    first = rollout_step(found, 0, policy, prompts_of)
    drafts = {r.key: list(r.tokens) for rank in found for r in rank.pool if r.key[0] == 1}
    second = rollout_step(found, 1, policy, prompts_of)
    assert drafts and first.passes > 0
    for done in second.rollouts:
        if (own := drafts.get(done.key)) is not None:
            assert done.tokens[: len(own)] == own, "a draft that was cut short is a beginning"
    assert second.accepted_length > 1 and sum(r.accepted for r in second.reports) > 0


def test_every_prompt_has_a_draft_before_any_has_two():
    rank = Rank(0, 1, HOW)
    rank.begin(0, policies()[0], prompts_of)
    keys = [key for key, _ in rank.coming]
    assert keys[:6] == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0), (1, 4, 0), (1, 0, 1)]
    assert keys[10] == (2, 0, 0) and len(keys) == 20


def test_equal_prompts_share_a_pool_and_keep_their_own_noise():
    found = rollout_step(ranks(HOW, 1), 0, policies()[0], prompts_of).rollouts
    one, other = ([r.tokens for r in found if r.key[1] == place] for place in (1, 4))
    assert one != other
    stored = RolloutPool(128, [Rollout((0, 1, 0), prompts_of(0)[1], [50, 51, 52], "v")])
    assert len(stored.of(prompts_of(0)[4])) == 1
    assert HOW.draft.over(stored, Rollout((0, 4, 0), prompts_of(0)[4])).propose([*prompts_of(0)[4], 50, 51], 4).tokens == (52,)


@pytest.mark.parametrize("rule", ["point-mass", "reject"])
def test_other_rules_run_with_fresh_noise(rule):
    from dataclasses import replace

    how = replace(HOW, draft=BubbleSpec(rule=rule), keys="fresh")
    found = ranks(how)
    for step, policy in enumerate(policies()):
        done = rollout_step(found, step, policy, prompts_of)
        assert len(done.rollouts) == 10 and all(r.ended for r in done.rollouts)
    if rule == "reject":
        with pytest.raises(Refused, match="needs the laws"):
            rank = Rank(0, 1, how, RolloutPool(128, [Rollout((0, 0, 0), prompts_of(0)[0], [9], "v")]))
            rank.begin(0, policies()[0], prompts_of)


def test_a_rank_without_prompts_waits_and_drafts():
    def few(step):
        return prompts_of(step)[: 1 if step == 0 else 5]

    found = ranks(HOW, 3)
    done = rollout_step(found, 0, policies()[0], few)
    assert [r.passes > 0 for r in done.reports] == [True, False, False]
    assert done.reports[2].bubble_tokens > 0
    assert rollout_step(ranks(HOW, 2), 9, policies()[0], prompts_of).rollouts == []


def test_a_policy_without_a_version_leaves_no_drafts():
    model = policies()[0].model
    found = ranks(HOW, 3)
    rollout_step(found, 0, Policy(model), prompts_of)
    assert all(len(rank.pool) == 0 for rank in found) and any(rank.pool.dropped for rank in found)
    second = rollout_step(found, 1, Policy(model, "v1"), prompts_of)
    assert all(r.prompt for r in second.rollouts) and second.rollouts[0].version == "v1"


def test_prompts_that_are_not_known_ahead():
    from dataclasses import replace

    policy = policies()[0]
    with pytest.raises(Refused, match="lookahead='none'"):
        rollout_step(ranks(HOW), 0, policy, lambda step: prompts_of(step) if step == 0 else None)
    done = rollout_step(ranks(replace(HOW, lookahead="none")), 0, policy, lambda step: prompts_of(step) if step == 0 else None)
    assert len(done.rollouts) == 10


@pytest.mark.parametrize(("make", "what"), [
    (lambda: BubbleSpec(gamma=0), "at least 1"), (lambda: Law(-0.5), "temperature=-0.5"),
    (lambda: Rollouts(0, SAMPLING), "samples=0"), (lambda: Rollouts(1, SAMPLING, slots=0), "slots=0"),
    (lambda: Rollouts(1, SAMPLING, keys="old"), "keys"), (lambda: Rollouts(1, SAMPLING, lookahead="three"), "lookahead"),
    (lambda: Sampling(), "max_length"), (lambda: Sampling(max_new_tokens=0), "max_new_tokens=0"),
    (lambda: Sampling(max_length=5).room(5), "max_length=5: expected more than the longest prompt's 5"),
    (lambda: Sampling(max_length=5).room(0), "no tokens"),
    (lambda: Rollouts(1, SAMPLING, BubbleSpec(rule="point-mass")), "keys='fresh'"),
    (lambda: Rollouts(1, SAMPLING, BubbleSpec(rule="reject")), "keys='fresh'"),
])
def test_what_makes_no_sense_is_refused(make, what):
    with pytest.raises(Refused, match=what):
        make()


def test_a_pool_of_another_vocabulary_is_refused():
    with pytest.raises(Refused, match="vocabulary of 64 tokens and the model has 128"):
        Rank(0, 1, HOW, RolloutPool(64)).begin(0, policies()[0], prompts_of)
    with pytest.raises(ValueError, match="eval"):
        Running(Policy(tiny("llama").train(), "v"), SAMPLING)
