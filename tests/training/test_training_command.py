"""What the command runs: from options to a report, resumable, refused early."""

import json
import time

import pytest
import torch

from longspan.layers.attention.softmax import Softmax
from longspan.models.decoder import Decoder
from longspan.registry import Refused
from longspan.training.command import TrainOptions, train

TINY = {"dim": 16, "heads": 2, "batch": 8, "eval_batches": 2, "log_every": 5}


def test_recall_is_learned_and_reported():
    seen = []
    options = TrainOptions(task="recall", context=16, steps=60, lr=1e-2, side_path="short-conv", **TINY)
    report = train(options, lambda step, metrics: seen.append(step))
    assert report["held_out_after"]["nll"] < 0.8 * report["held_out_before"]["nll"]
    assert seen[-1] == 60 and report["steps"] == 60 and report["resumed_from"] is report["model"] is None
    assert (report["mixer"], report["position"], report["side_path"], report["stack"]) == (
        "softmax",
        "rope",
        "short-conv",
        "plain",
    )
    # keys and values of 16 tokens in 2 layers, the convolution's last 3 inputs, and 4 counters
    assert report["state_bytes"] == 2 * (2 * 16 * 16 * 4 + 3 * 16 * 4) + 4 * 8
    json.dumps(report)


def test_bytes_of_a_text_and_a_sample(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = TrainOptions(text=tmp_path / "text.txt", context=24, steps=40, lr=1e-2, **TINY)
    report = train(options)
    assert report["held_out_after"]["nll"] < 0.6 * report["held_out_before"]["nll"]
    assert len(report["sample"]) > 0 and report["data"].endswith("text.txt")


def test_a_killed_command_resumes_to_the_same_model(tmp_path):
    def options(name, resume=False):
        return TrainOptions(
            Softmax(window=4), task="copy", context=12, steps=9, dropout=0.1, out=tmp_path / name, checkpoint_every=2,
            resume=resume, **TINY,
        )

    def kill(step, metrics):
        raise KeyboardInterrupt

    want = train(options("a"))
    with pytest.raises(KeyboardInterrupt):
        train(options("b"), kill)
    got = train(options("b", resume=True))
    assert got["resumed_from"] == 4 and got["held_out_after"] == want["held_out_after"]
    a, b = Decoder.load(want["model"]), Decoder.load(got["model"])
    assert a.config.mixer == Softmax(window=4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    with pytest.raises(Refused, match="already holds a run"):
        train(options("a"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"task": "recal"}, "unknown task 'recal'; did you mean 'recall'"),
        ({"task": "copy", "text": "topics"}, "expected one of the two"),
        ({"text": "no-such-text"}, "unknown text 'no-such-text'"),
        ({"mixer": "softmx", "task": "copy"}, "did you mean 'softmax'"),
        ({"steps": 0, "task": "copy"}, "steps=0"),
        ({"batch": 0, "task": "copy"}, "batch=0"),
        ({"device": "gpu", "task": "copy"}, "device='gpu'"),
        ({"dim": 10, "heads": 4, "task": "copy"}, "dim=10"),
        ({"objective": "next-tokn", "task": "copy"}, "did you mean 'next-token'"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(Refused) as refused:
        train(TrainOptions(**bad))
    assert message in str(refused.value)


@pytest.mark.slow
def test_defaults_learn_visibly_in_twenty_seconds():
    started = time.process_time()
    report = train(TrainOptions())
    assert report["held_out_before"]["nll"] > 5.0 > 2.5 > report["held_out_after"]["nll"]
    assert time.process_time() - started < 20


@pytest.mark.parametrize(("change", "said"), [
    ({"mixer": "selective"}, "the model's mixer is"),
    ({"mixer": Softmax(window=4)}, "the model's mixer is"),
    ({"position": "alibi"}, "the model's position is"),
    ({"batch": 4}, "the data's batch is 4, but the run began with 8"),
    ({"context": 24}, "the model's vocab_size is 24"),
    ({"task": "copy"}, "the model's vocab_size is"),
])  # fmt: skip
def test_another_model_or_other_data_do_not_resume_a_run(tmp_path, change, said):
    options = {"task": "recall", "context": 16, "steps": 2, "out": tmp_path} | TINY
    train(TrainOptions(**options))
    with pytest.raises(Refused, match=said):
        train(TrainOptions(**(options | change), resume=True))
    assert train(TrainOptions(**options, resume=True))["resumed_from"] == 2
