"""A run that was killed and resumed ends with the very bits of one that wasn't."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from longspan.registry import Refused
from longspan.training import TrainConfig, Trainer, checkpoints, train

CONFIG = TrainConfig(steps=8, lr=3e-3, warmup=2, accumulate=2, checkpoint_every=3, log_every=1, seed=5)


class Killed(BaseException):
    pass


def killed_at(step):
    def progress(now, metrics):
        if now == step:
            raise Killed

    return progress


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rows(result):
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in result.history]


@pytest.mark.parametrize(("kind", "step"), [("softmax", 1), ("softmax", 7), ("softmax", 5), ("linear", 5)])
def test_resuming_is_exact(make, task, tmp_path, kind, step):
    straight, broken = make(kind, dropout=0.2), make(kind, dropout=0.2)
    want = train(straight, task, CONFIG, out=tmp_path / "a")
    with pytest.raises(Killed):
        train(broken, task, CONFIG, out=tmp_path / "b", progress=killed_at(step))
    resumed = make(kind, seed=99, dropout=0.2)  # other weights: all must come from the checkpoint
    if step == 1:
        resumed = make(kind, dropout=0.2)  # killed before the first checkpoint: the run starts again
    torch.rand(7)  # dice that were thrown elsewhere don't matter
    got = train(resumed, task, CONFIG, out=tmp_path / "b", resume=True)
    assert got.resumed_from == {1: None, 5: 3, 7: 6}[step]
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert rows(got) == rows(want)
    assert [json.loads(line)["step"] for line in (tmp_path / "b/history.jsonl").open()] == list(range(1, 9))


def test_dropout_and_data_matter(make, task):
    """What the exactness test could miss: without the same dice the weights do differ."""
    runs = []
    for seed in (5, 6):
        model = make(dropout=0.2)
        train(model, task, TrainConfig(steps=2, seed=seed))
        runs.append(model.embed.weight.detach().clone())
    assert not torch.equal(*runs)


def test_optimiser_state_is_needed(make, task, tmp_path):
    """Resuming with fresh moments would give other weights; so the checkpoint really carries them."""
    with pytest.raises(Killed):
        train(make(), task, CONFIG, out=tmp_path, progress=killed_at(5))
    forgetful, exact = make(), make()
    trainer = Trainer(forgetful, task, CONFIG, out=tmp_path)
    trainer._earlier(True)
    step = trainer._resume()
    trainer.optimiser.state.clear()
    for s in range(step, CONFIG.steps):
        trainer._step(s)
    train(exact, task, CONFIG, out=tmp_path, resume=True)
    assert not torch.equal(forgetful.embed.weight, exact.embed.weight)


def test_only_the_newest_are_kept_and_nothing_is_pickled(make, task, tmp_path):
    train(make(), task, TrainConfig(steps=7, checkpoint_every=2, keep_last=2), out=tmp_path)
    assert [c.step for c in checkpoints(tmp_path)] == [6, 7]
    files = sorted(p.name for p in checkpoints(tmp_path)[-1].folder.iterdir())
    assert files == ["config.json", "dice.safetensors", "model.safetensors", "optimiser.safetensors", "run.json"]


def test_a_checkpoint_is_a_model(make, task, tmp_path):
    model = make()
    result = train(model, task, TrainConfig(steps=2), out=tmp_path)
    assert torch.equal(type(model).load(result.checkpoint).embed.weight, model.embed.weight)


def test_half_written_checkpoints_are_passed_over(make, task, tmp_path):
    with pytest.raises(Killed):
        train(make(), task, CONFIG, out=tmp_path, progress=killed_at(5))
    (tmp_path / ".step-00000006").mkdir()
    (tmp_path / "step-00000007").mkdir()
    assert [c.step for c in checkpoints(tmp_path)] == [3]
    train(make(), task, CONFIG, out=tmp_path, resume=True)
    assert not (tmp_path / ".step-00000006").exists()


def test_a_finished_run_resumes_to_itself(make, task, tmp_path):
    model = make()
    train(model, task, CONFIG, out=tmp_path)
    again = make(seed=3)
    result = train(again, task, CONFIG, out=tmp_path, resume=True)
    assert result.resumed_from == 8 and torch.equal(again.embed.weight, model.embed.weight)
    assert result.last["step"] == 8


def test_refusals(make, task, tmp_path):
    train(make(), task, TrainConfig(steps=2), out=tmp_path)
    with pytest.raises(Refused, match="already holds a run at step 2"):
        train(make(), task, TrainConfig(steps=2), out=tmp_path)
    with pytest.raises(Refused, match=r"lr=0.5, but the run began with 0.001"):
        train(make(), task, TrainConfig(steps=2, lr=0.5), out=tmp_path, resume=True)
    with pytest.raises(Refused, match="the model's mixer is"):
        train(make("linear"), task, TrainConfig(steps=2), out=tmp_path, resume=True)
    with pytest.raises(Refused, match="expected the folder of the run"):
        train(make(), task, TrainConfig(steps=2), resume=True)
    with pytest.raises(Refused, match="expected a folder to write to"):
        train(make(), task, TrainConfig(steps=2, checkpoint_every=1))


class Frozen(nn.Module):
    """A frozen model with a small trained part, as retrofits have."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, ids, **given):
        given.pop("state")
        return self.base(embeds=self.base.embed(ids) + self.shift, **given)


def test_frozen_weights_can_be_left_out(make, task, tmp_path):
    config = TrainConfig(steps=6, checkpoint_every=2, lr=0.01)
    straight, broken = Frozen(make()), Frozen(make())
    train(straight, task, config, trainable_only=True, out=tmp_path / "a")
    with pytest.raises(Killed):
        train(
            broken,
            task,
            TrainConfig(steps=6, checkpoint_every=2, lr=0.01, log_every=1),
            trainable_only=True,
            out=tmp_path / "b",
            progress=killed_at(5),
        )
    assert checkpoints(tmp_path / "b")[-1].folder.joinpath("model.safetensors").stat().st_size < 300
    resumed = Frozen(make())
    train(resumed, task, config, trainable_only=True, out=tmp_path / "b", resume=True)
    assert torch.equal(resumed.shift, straight.shift) and straight.shift.any()


@pytest.mark.slow
def test_a_process_killed_by_the_system_resumes_exactly(make, task, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        sys.path.insert(0, sys.argv[1])
        from conftest import TASK, make_model
        from test_training_checkpoint import CONFIG
        from longspan.training import train
        def progress(step, metrics):
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        train(make_model(dropout=0.2), TASK, CONFIG, out=sys.argv[2], progress=progress)
        """)
    )
    from pathlib import Path

    done = subprocess.run([sys.executable, str(script), str(Path(__file__).parent), str(tmp_path / "b")])
    assert done.returncode == -9
    straight, resumed = make(dropout=0.2), make(seed=1, dropout=0.2)
    train(straight, task, CONFIG, out=tmp_path / "a")
    assert train(resumed, task, CONFIG, out=tmp_path / "b", resume=True).resumed_from == 3
    assert all(torch.equal(t, resumed.state_dict()[n]) for n, t in straight.state_dict().items())
