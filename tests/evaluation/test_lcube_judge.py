"""L-CUBE's models: inputs, loss, training by the project's loop, and the command over any mixer."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from longspan import registry
from longspan.evaluation.lcube import (
    GaussianBatches,
    GaussianNLL,
    LCube,
    Predicted,
    Size,
    WithBackbone,
    at_length,
    build,
    fit,
    judged,
    nll,
    oracle,
    score,
    shifted,
    utilisation_of,
)
from longspan.evaluation.lcube.command import JudgeOptions, judge, plan_of
from longspan.registry import Refused

SMALL = Size(LCube(3), dim=16, layers=1, heads=2, steps=3, batch=4, held_out=16)


def test_batches_are_functions_of_their_number():
    batches = GaussianBatches(LCube(3), 4, seed=1)
    one, again, other = batches(0), batches(0), batches(1)
    assert torch.equal(one.extra["x"], again.extra["x"]) and not torch.equal(one.extra["x"], other.extra["x"])
    held_out = dataclasses.replace(batches, split="held-out")(0)
    assert not torch.equal(one.extra["x"], held_out.extra["x"])
    assert (one.extra["before"][:, 0] == 0).all() and torch.equal(one.extra["before"][:, 1:], one.extra["x"][:, :-1])


class Oracle(nn.Module):
    """The exact rule as a model, from inputs alone."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def forward(self, before, places, state=None):
        # Nothing asks for the last token, so its place may hold anything.
        mu, var = oracle(self.plan)(torch.cat((before[:, 1:], torch.zeros_like(before[:, :1])), 1))
        return Predicted(mu, var.log())


def test_the_loss_of_the_truth_is_its_likelihood():
    plan = LCube(4)
    batch = GaussianBatches(plan, 512)(0)
    found = GaussianNLL(plan)(Oracle(plan), batch)
    x = batch.extra["x"]
    constant = 0.5 * plan.H * math.log(2 * math.pi)
    assert found.loss.item() == pytest.approx(float(nll(oracle(plan)(x), x).mean()) / plan.length - constant, abs=1e-5)
    assert found.weight == 512 * 16 and found.metrics["utilisation"] == pytest.approx(1.0, abs=0.05)


def test_a_clamped_variance():
    plan = LCube(1)

    class Sure(nn.Module):
        def forward(self, x):
            return torch.full_like(x, 1e4)

    model = WithBackbone(plan, Sure(), 2)
    with torch.no_grad():
        model.write.weight.fill_(1.0)
    assert model(torch.zeros(1, 2, 1), torch.arange(2)[None]).log_var.max() == 4.0
    assert score(plan, model.predict, plan.sample(4, torch.Generator().manual_seed(0))).overall < 0.0


@pytest.mark.parametrize("mixer", ["softmax", "linear-attention", "rfa"])
def test_models_look_back_only_and_pieces_agree(mixer):
    model = build({"mixer": mixer}, SMALL, seed=0).eval()
    batch = GaussianBatches(SMALL.plan, 2)(0)
    with torch.no_grad():
        whole = model(batch.extra["before"], batch.ids)
        changed = batch.extra["before"].clone()
        changed[:, 5:] += 1.0
        assert torch.allclose(whole.mu[:, :5], model(changed, batch.ids).mu[:, :5], atol=1e-5)
        state, found = None, []
        for piece in batch.pieces(3):
            mu, _, state = model(piece.extra["before"], piece.ids, state)
            found.append(mu)
    torch.testing.assert_close(torch.cat(found, 1), whole.mu, atol=1e-5, rtol=1e-5)


def test_a_reading_that_starts_later_stands_where_its_tokens_stand():
    model = build({"mixer": "softmax", "position": "nope"}, SMALL, seed=0)
    x = SMALL.plan.sample(2, torch.Generator().manual_seed(0))
    late = model.predict(x, 4)
    assert late.mu.shape == (2, 4, 3)
    changed = x.clone()
    changed[:, :4] += 1.0
    assert torch.equal(late.mu, model.predict(changed, 4).mu)
    with torch.no_grad():
        same = model(shifted(x[:, 4:]), torch.arange(4, 8).expand(2, -1)).mu
    assert torch.equal(late.mu, same) and not torch.allclose(late.mu, model.predict(x, 0).mu[:, 4:])
    assert model.training


def test_training_lowers_the_loss_and_repeats():
    size = dataclasses.replace(SMALL, steps=40, batch=32)
    seen = []
    first = utilisation_of({"mixer": "softmax"}, size, 0, lambda step, metrics: seen.append((step, metrics["loss"])))
    assert seen[-1][0] == 40 and seen[-1][1] < seen[0][1]
    assert 0.0 < first.overall < 1.0
    assert torch.equal(first.kl, utilisation_of({"mixer": "softmax"}, size, 0).kl)


PARTS = [card for kind in ("mixer", "side-path", "stack") for card in registry.cards(kind=kind)]


@pytest.mark.parametrize("card", PARTS, ids=lambda card: card.name)
def test_every_part_can_be_judged(card):
    size = dataclasses.replace(SMALL, plan=LCube(4), dim=32, layers=2, steps=2)
    parts = {card.kind.replace("-", "_"): card.name}
    found = utilisation_of({"mixer": "softmax"} | parts, size)
    assert math.isfinite(found.overall) and found.kl.shape == (16, 4)


def test_any_module_will_do():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

    model = WithBackbone(SMALL.plan, Running(), 8, table=False)
    fit(model, SMALL)
    assert math.isfinite(judged(model, SMALL).overall)
    narrow = WithBackbone(SMALL.plan, nn.Linear(8, 4), 8)
    with pytest.raises(Refused, match="same shape"):
        judged(narrow, SMALL)


def test_several_copies_are_judged_too():
    size = dataclasses.replace(SMALL, plan=LCube(3, r=2, lowest=2))
    assert math.isfinite(utilisation_of({"mixer": "softmax"}, size).across())


def test_other_lengths_keep_the_settings():
    assert at_length(dataclasses.replace(SMALL, plan=LCube(3, rho=0.5)), 32).plan == LCube(5, rho=0.5)


def test_the_command_at_one_length(tmp_path):
    options = JudgeOptions(mixer="linear-attention", context=8, dim=16, layers=1, heads=2, steps=3, batch=4, segments=2,
                           task="l-cube(rho=0.8)", out=tmp_path / "run")
    dice = torch.random.get_rng_state()
    report = judge(options)
    assert torch.equal(dice, torch.random.get_rng_state())
    assert report["mixer"] == "linear-attention" and report["position"] == "nope" and report["length"] == 8
    assert set(report["levels"]) == {1, 2, 4} and (tmp_path / "run" / "history.jsonl").is_file()
    assert report["parameters"] > 0 and report["utilised length"] is None
    assert "by length" not in report


def test_the_command_at_several_lengths():
    report = judge(JudgeOptions(context=[8, 4], dim=16, layers=1, heads=2, steps=2, batch=4))
    assert list(report["by length"]) == [4, 8] and report["by length"][8]["length"] == 8


@pytest.mark.parametrize(("options", "said"), [
    ({"context": 48}, "power of two"), ({"context": []}, "at least one length"), ({"held_out": 8}, "held_out=8"),
    ({"batch": 0}, "batch=0"), ({"task": "l-cub"}, "l-cub"), ({"task": "l-cube(bta=0.5)"}, "beta"),
    ({"task": "l-cube(beta=2.0)"}, "beta=2.0"), ({"task": "l-cube + copy"}, "expected l-cube"), ({"mixer": "sofmax"}, "softmax"),
    ({"text": "topics"}, "text='topics'"), ({"objective": "next-token"}, "objective='next-token'"),
])
def test_the_command_refuses(options, said):
    with pytest.raises(Refused, match=said):
        judge(JudgeOptions(**options))


def test_settings_in_a_text():
    assert plan_of("l-cube(beta=0.6, r=2, lowest=2)", 16) == LCube(4, beta=0.6, r=2, lowest=2)
