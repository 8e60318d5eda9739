"""The loop learns, reports, accumulates, and stops when numbers go wrong."""

import dataclasses
import json
import math
import sys

import pytest
import torch

from longspan.registry import Refused
from longspan.training import IGNORE, Diverged, TrainConfig, checkpoints, evaluate, train
from longspan.training.next_token import NextToken


def test_it_learns_associative_recall(make, task):
    model = make("linear")
    held_out = dataclasses.replace(task, split="held-out")
    before = evaluate(model, held_out, 4)
    result = train(model, task, TrainConfig(steps=120, lr=1e-2, warmup=10))
    after = evaluate(model, held_out, 4)
    chance = math.log(task.values)
    assert after["nll"] < chance - 0.3 < chance < before["nll"] and result.last["loss"] < chance - 0.3
    assert after["accuracy"] > 1.5 / task.values > before["accuracy"]


def test_progress_and_history(make, task, tmp_path):
    seen = []
    config = TrainConfig(steps=7, log_every=3, lr=1e-2)
    result = train(make(), task, config, out=tmp_path, progress=lambda step, m: seen.append((step, m)))
    assert [step for step, _ in seen] == [3, 6, 7]
    assert set(seen[0][1]) == {"loss", "nll", "accuracy", "lr", "grad_norm", "tokens_per_s"}
    assert [{"step": s} | m for s, m in seen] == result.history
    assert [json.loads(line) for line in (tmp_path / "history.jsonl").open()] == result.history


def test_accumulated_halves_equal_the_whole(make, task):
    """Also with unequal numbers of labels: the mean is over tokens, not over batches."""

    def whole(index):
        batch = task(index)
        labels = batch.labels.clone()
        labels[:2] = IGNORE
        return dataclasses.replace(batch, labels=labels)

    def halves(index):
        half = slice(0, 3) if index % 2 == 0 else slice(3, None)
        return whole(index // 2).map(lambda t: t[half])

    a, b = make(), make()
    one = train(a, whole, TrainConfig(steps=3, log_every=1))
    two = train(b, halves, TrainConfig(steps=3, log_every=1, accumulate=2))
    torch.testing.assert_close(a.embed.weight, b.embed.weight, atol=1e-6, rtol=1e-5)
    for x, y in zip(one.history, two.history):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-4)


def test_segments_train_with_the_state_carried(make, task):
    a, b = make("linear"), make("linear")
    train(a, task, TrainConfig(steps=3))
    train(b, task, TrainConfig(steps=3, segments=3, detach_every=0))
    torch.testing.assert_close(a.embed.weight, b.embed.weight, atol=1e-5, rtol=1e-4)
    with pytest.raises(Refused, match="segments=99: expected at most the 12 tokens"):
        train(make(), task, TrainConfig(segments=99))


def test_bfloat16_keeps_float32_weights(make, task):
    for kind in ("softmax", "linear"):
        model, dtypes = make(kind), []
        hook = model.stack.layers[0].mlp.gate.register_forward_hook(lambda m, i, out, d=dtypes: d.append(out.dtype))
        result = train(model, task, TrainConfig(steps=3, precision="bfloat16", lr=1e-2))
        hook.remove()
        assert set(dtypes) == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}
        full = train(make(kind), task, TrainConfig(steps=3, lr=1e-2))
        assert result.last["loss"] == pytest.approx(full.last["loss"], abs=0.05)
        assert result.last["loss"] != full.last["loss"]


def test_a_loss_that_is_no_number_names_step_and_checkpoint(make, task, tmp_path):
    def poisoned(model, batch, state=None):
        outcome = NextToken()(model, batch, state)
        return dataclasses.replace(outcome, loss=outcome.loss * (math.nan if batch.index == 4 else 1.0))

    model = make()
    with pytest.raises(Diverged) as stopped:
        train(model, task, TrainConfig(steps=9, checkpoint_every=3), poisoned, out=tmp_path)
    assert "step 5: the loss is nan" in str(stopped.value) and "step-00000003" in str(stopped.value)
    assert [c.step for c in checkpoints(tmp_path)] == [3]
    assert all(p.isfinite().all() for p in model.parameters())
    with pytest.raises(Diverged, match="step 5: the loss is nan; there is no checkpoint yet"):
        train(make(), task, TrainConfig(steps=9), poisoned)


def test_a_gradient_that_is_infinite_stops_before_the_weights_move(make, task):
    def steep(model, batch, state=None):
        outcome = NextToken()(model, batch, state)
        zero = model.embed.weight.sum() * 0.0
        return dataclasses.replace(outcome, loss=outcome.loss + zero.abs().sqrt())

    model = make()
    before = model.embed.weight.detach().clone()
    with pytest.raises(Diverged, match="step 1: the gradient norm is nan"):
        train(model, task, TrainConfig(steps=2), steep)
    assert torch.equal(model.embed.weight, before)


def test_batches_without_a_label_are_an_error(make, task):
    def silent(index):
        batch = task(index)
        return dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORE))

    with pytest.raises(ValueError, match="step 1: the batches hold no labelled token"):
        train(make(), silent, TrainConfig(steps=1))


def test_the_callers_dice_and_mode_are_left_alone(make, task):
    model = make(dropout=0.5).eval()
    torch.manual_seed(11)
    want = torch.rand(3)
    torch.manual_seed(11)
    train(model, task, TrainConfig(steps=2))
    evaluate(model, task, 1)
    assert torch.equal(torch.rand(3), want) and not model.training


def test_evaluation_is_without_dropout_and_weighted_by_tokens(make, task):
    model = make(dropout=0.5).train()
    got = evaluate(model, task, 3)
    assert got == evaluate(model, task, 3) and model.training
    model.eval()
    assert got["loss"] == pytest.approx(sum(NextToken()(model, task(i)).loss.item() for i in range(3)) / 3)


def test_tensorboard_writes_events(make, task, tmp_path):
    pytest.importorskip("tensorboard")
    train(make(), task, TrainConfig(steps=2, log_every=1), tensorboard=tmp_path / "logs")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2]


def test_without_tensorboard_the_extra_is_named(make, task, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Refused, match=r"expected the extra longspan\[train\]"):
        train(make(), task, TrainConfig(steps=2), tensorboard=tmp_path)
