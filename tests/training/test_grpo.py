"""GRPO: advantages, the clipped loss, and the objective, against their formulas."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused
from longspan.training import IGNORE, Batch, TrainConfig, Trainer, evaluate
from longspan.training.command import TrainOptions
from longspan.training.command import train as run_training
from longspan.training.grpo import Grpo, advantages, clipped_loss, divergence, sample
from longspan.training.next_token import NextToken
from longspan.training.table_lookup import TableLookup

TASK = TableLookup(rows=2, columns=2, keys=4, values=4, batch=16)


def decoder(dtype=torch.float32, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(DecoderConfig(TASK.vocab_size, dim=16, n_heads=2)).to(dtype)


def draw(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grads(model, loss):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


# ------------------------------------------------------------------------------------------------------------ functions


def test_advantages_sum_to_zero_and_are_scale_free():
    rewards = draw(5, 8)
    found = advantages(rewards)
    assert found.sum(-1).abs().max() < 1e-12
    torch.testing.assert_close(advantages(10 * rewards + 3), found, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.std(-1, correction=0), torch.ones(5, dtype=torch.float64), rtol=1e-4, atol=0)
    one = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64))
    std = math.sqrt(3) / 4
    torch.testing.assert_close(one, torch.tensor([[0.75, -0.25, -0.25, -0.25]], dtype=torch.float64) / (std + 1e-6))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_rewards_give_no_advantage(value):
    assert advantages(torch.full((2, 7), value)).unique().tolist() == [0.0]  # 0.1 seven times has no exact mean


def test_rewards_that_cannot_be_compared_are_refused():
    with pytest.raises(Refused, match="groups of at least 2"):
        advantages(torch.ones(3, 1))
    with pytest.raises(Refused, match="a reward is nan: expected finite"):
        advantages(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(Refused, match="at least 2"):
        Grpo(group=1)


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    logits, tokens = draw(6, 5).requires_grad_(), torch.randint(0, 5, (6, 8), generator=torch.Generator().manual_seed(1))
    advantage = advantages(draw(6, 8, seed=2))
    new = logits.log_softmax(-1).gather(-1, tokens)
    (found,) = torch.autograd.grad(clipped_loss(new, new, advantage), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(advantage * new).mean(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_the_ratio_is_clipped_where_that_lowers_the_gain():
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1], dtype=torch.float64)).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    loss = clipped_loss(new, torch.zeros_like(new), advantage, clip=0.2)
    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8 + 2.2) / 5)
    loss.backward()
    torch.testing.assert_close(new.grad, -torch.tensor([0.0, 0.5, -1.5, 0.0, 2.2], dtype=torch.float64) / 5)


def test_the_divergence_is_unbiased_and_never_negative():
    p, q = draw(1, 6).log_softmax(-1), draw(1, 6, seed=3).mul(3).log_softmax(-1)
    each = divergence(p, q)
    assert (each >= 0).all() and divergence(p, p).abs().max() == 0
    torch.testing.assert_close((p.exp() * each).sum(), (p.exp() * (p - q)).sum())
    zero = torch.zeros_like(p)
    assert clipped_loss(p, p, zero, q, beta=0.5).item() == pytest.approx(0.5 * each.mean().item())


def test_samples_follow_the_model_and_the_batch_number():
    logs = torch.tensor([[0.7, 0.2, 0.1]]).log()
    found = sample(logs, 20_000, 3)
    assert torch.equal(found, sample(logs, 20_000, 3)) and not torch.equal(found, sample(logs, 20_000, 4))
    torch.testing.assert_close(found[0].bincount() / 20_000, torch.tensor([0.7, 0.2, 0.1]), atol=0.02, rtol=0)


# ------------------------------------------------------------------------------------------------------------ objective


def test_the_objective_is_the_loss_of_its_samples():
    model, batch = decoder(), dataclasses.replace(TASK(5), index=5)
    outcome = Grpo(group=6, beta=0.0)(model, batch)
    asked = batch.labels != IGNORE
    logs, labels = model(batch.ids).logits[asked].log_softmax(-1), batch.labels[asked]
    tokens = sample(logs.detach(), 6, 5)
    rewards = (tokens == labels[:, None]).float()
    new, advantage = logs.gather(-1, tokens), advantages(rewards)
    assert 0 < outcome.metrics["used"] < 1 and outcome.weight == len(labels)
    torch.testing.assert_close(grads(model, outcome.loss), grads(model, -(advantage * new).mean()), rtol=1e-4, atol=1e-7)
    assert outcome.metrics["sampled"] == pytest.approx(rewards.mean().item())
    assert outcome.metrics["reward"] == pytest.approx(logs.exp().gather(-1, labels[:, None]).mean().item(), rel=1e-5)


def test_in_the_warm_up_it_is_cross_entropy():
    model, batch = decoder(), dataclasses.replace(TASK(0), progress=0.4)
    found, plain = Grpo(warmup=0.5)(model, batch), NextToken()(model, batch)
    torch.testing.assert_close(found.loss, plain.loss)
    assert found.weight == plain.weight and "sampled" not in found.metrics
    assert "sampled" in Grpo(warmup=0.3, beta=0.0)(model, batch).metrics


def test_labels_that_are_never_sampled_teach_nothing():
    class Fixed(torch.nn.Module):
        """Logits that are the same everywhere; the last token has no chance."""

        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([0.0] * (TASK.vocab_size - 1) + [-1e4]))

        def forward(self, ids, **given):
            return SimpleNamespace(logits=self.logits.expand(*ids.shape, -1), state=None)

    model, batch = Fixed(), TASK(0)
    never = dataclasses.replace(batch, labels=batch.labels.where(batch.labels == IGNORE, TASK.vocab_size - 1))
    outcome = Grpo(beta=0.0)(model, never)
    assert outcome.metrics["used"] == outcome.metrics["sampled"] == outcome.loss.item() == 0.0 and outcome.weight == 16
    assert torch.autograd.grad(outcome.loss, model.logits)[0].unique().tolist() == [0.0]


def test_the_reference_is_the_model_after_the_warm_up():
    model = decoder()
    found = Trainer(model, TASK, TrainConfig(steps=6, lr=0.05, log_every=1), Grpo(warmup=0.5, beta=0.1)).run().history
    assert ["kl" in row for row in found] == [False] * 3 + [True] * 3  # steps at 0, .2, .4, then .6, .8, 1
    assert found[3]["kl"] == pytest.approx(0.0, abs=1e-7) and found[5]["kl"] > 1e-6
    assert "kl" not in evaluate(model, TASK, 1, Grpo())


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    config = TrainConfig(steps=8, lr=0.01, checkpoint_every=2, keep_last=10)
    whole, stopped, resumed = decoder(), decoder(), decoder()
    objective = Grpo(warmup=0.25, beta=0.0)
    Trainer(whole, TASK, dataclasses.replace(config, checkpoint_every=0), objective).run()

    class Killed(Exception):
        pass

    def killed(index):
        if index == 5:
            raise Killed
        return TASK(index)

    with pytest.raises(Killed):
        Trainer(stopped, killed, config, objective, out=tmp_path).run()
    Trainer(resumed, TASK, config, objective, out=tmp_path).run(resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values()))


def test_a_run_that_lost_its_reference_is_refused():
    with pytest.raises(Refused, match=r"grpo\(beta=0.001\): a run resumed after its warm-up"):
        Grpo()(decoder(), dataclasses.replace(TASK(0), progress=0.9))


def test_pieces_are_refused_and_nothing_asked_weighs_nothing():
    model, batch = decoder(), TASK(0)
    with pytest.raises(Refused, match="grpo reads whole sequences; expected segments=1"):
        Trainer(model, TASK, TrainConfig(steps=1, segments=2), Grpo(warmup=0.0)).run()
    empty = Batch(batch.ids, torch.full_like(batch.labels, IGNORE))
    assert Grpo()(model, empty).weight == 0.0


def test_it_learns_a_small_table():
    model, held_out = decoder(), dataclasses.replace(TASK, split="held-out")
    objective = Grpo(beta=0.0, warmup=0.0)
    before = evaluate(model, held_out, 4, objective)["reward"]
    Trainer(model, TASK, TrainConfig(steps=60, lr=5e-3, log_every=60), objective).run()
    assert evaluate(model, held_out, 4, objective)["reward"] > before + 0.1  # at first any token, then a value


def test_the_command_trains_with_it():
    options = TrainOptions(task="table-lookup", objective=Grpo(group=8), dim=16, heads=2, context=34, steps=4, batch=4,
                           eval_batches=1)
    report = run_training(options)
    assert report["data"] == "table-lookup" and {"reward", "sampled", "kl"} <= set(report["train"])
