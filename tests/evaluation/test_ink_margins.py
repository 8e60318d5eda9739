from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan.evaluation.ink import margins as m
from longspan.models import Loaded
from longspan.registry import Refused
from longspan.training.peak import PeakMemory

DOCUMENTS, QUESTION = [(3, 8), (8, 12), (14, 20)], (22, 29)


class Padded:
    pad_token_id = 2


def loaded(family="llama", **config):
    return Loaded(tiny(family, **config), Padded(), family, "", Path())


def shown(length=30, seed=0):
    return m.Shown(tiny_ids(1, length, seed=seed)[0].tolist(), DOCUMENTS, QUESTION)


def eager(model, ids, monkeypatch):
    """Logits and weights of transformers' eager attention in every layer, (L,H,T,T)."""
    from transformers.models.llama import modeling_llama

    logits, plain = [], modeling_llama.eager_attention_forward

    def spy(module, q, k, v, mask, scaling, **more):
        logits.append(q @ k.repeat_interleave(module.num_key_value_groups, 1).mT * scaling)
        return plain(module, q, k, v, mask, scaling=scaling, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", spy)
    model.set_attn_implementation("eager")
    weights = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    model.set_attn_implementation("sdpa")
    return torch.cat(logits), torch.cat(weights.attentions), weights.logits[0, -1]


@torch.inference_mode()
def test_logits_and_masses_are_those_of_eager_attention(monkeypatch):
    model, prompt = loaded(), shown()
    logits, weights, last = eager(model.model, list(prompt.ids), monkeypatch)
    (seen,) = m.read(model, [prompt])
    rows = slice(*QUESTION)
    for column, (start, end) in enumerate(DOCUMENTS):
        assert seen.logits[:, :, column] == pytest.approx(logits[:, :, rows, start:end].mean((-2, -1)).numpy(), abs=1e-4)
        assert seen.masses[:, :, column] == pytest.approx(weights[:, :, rows, start:end].sum(-1).mean(-1).numpy(), abs=1e-5)
    others = [[i for i in range(row + 1) if not any(a <= i < b for a, b in DOCUMENTS)] for row in range(*QUESTION)]
    mean = torch.stack([logits[:, :, row, own].mean(-1) for row, own in zip(range(*QUESTION), others)]).mean(0)
    assert seen.logits[:, :, 3] == pytest.approx(mean.numpy(), abs=1e-4)
    assert seen.last == pytest.approx(last.numpy(), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_masses_sum_to_one(family):
    (seen,) = m.read(loaded(family), [shown()])
    sums = seen.masses.sum(-1)
    held = ~np.isnan(sums).any(-1)
    assert sums[held] == pytest.approx(1.0, abs=1e-5)
    assert held.tolist() == ([False, True] if family == "gemma2" else [True, True])  # a window of 16 sees no whole prompt


def test_rows_in_blocks_and_at_once_agree(monkeypatch):
    q, k = torch.randn(4, 7, 8, generator=torch.Generator().manual_seed(0)), torch.randn(2, 30, 8)
    whole = m.looks(q, k, 0.3, 22, DOCUMENTS)
    monkeypatch.setattr(m, "ROWS", 3)
    for a, b in zip(whole, m.looks(q, k, 0.3, 22, DOCUMENTS)):
        assert a == pytest.approx(b, abs=1e-6)


def test_logits_far_apart_do_not_underflow():
    q, k = torch.full((1, 1, 1), 1.0), torch.full((1, 30, 1), -300.0)
    k[0, 20:] = 0.0
    found = m.looks(q, k, 1.0, 25, DOCUMENTS)
    assert found.logits[0].tolist() == [-300, -300, -300, pytest.approx(-300 * 5 / 11)] and found.masses[0, 3] == 1


def test_no_map_of_all_tokens_is_held():
    tokens = 600
    q, k = torch.randn(4, 64, 8), torch.randn(2, tokens, 8)
    with PeakMemory() as peak:
        m.looks(q, k, 0.3, tokens - 64, [(0, 100), (100, 300)])
    assert peak.largest <= 4 * m.ROWS * tokens * 4 < 4 * tokens * tokens


def test_a_batch_is_padded_on_the_left_and_padding_is_in_no_sum():
    model, prompts = loaded(), [shown(30), shown(41, seed=1), shown(30, seed=2)]
    for alone, together in zip((m.read(model, [p])[0] for p in prompts), m.read(model, prompts)):
        assert together.logits == pytest.approx(alone.logits, abs=1e-4)
        assert together.masses == pytest.approx(alone.masses, abs=1e-5)
        assert together.last == pytest.approx(alone.last, abs=1e-3)


def test_temperature_sharpens_every_layer():
    model = loaded(layers=1)
    (plain,), (sharp,) = m.read(model, [shown()]), m.read(model, [shown()], tau=0.5)
    assert sharp.logits == pytest.approx(2 * plain.logits, abs=1e-4)
    with pytest.raises(Refused, match="temperature above 0"):
        m.read(model, [shown()], tau=0.0)


def test_a_prompt_over_the_window_is_refused():
    with pytest.raises(Refused, match="reads at most 32"):
        m.read(loaded(positions=32), [shown(41)])
    with pytest.raises(Refused, match="sliding window shorter than the prompt"):
        m.read(loaded("mistral", sliding_window=16), [shown()])


def test_documents_in_the_question_are_an_error():
    with pytest.raises(ValueError, match="end before the question"):
        m.Shown(list(range(30)), [(20, 25)], QUESTION)


# ------------------------------------------------------------------------------------------------------ retrieval heads


def test_heads_are_the_best_by_their_logit_to_gold():
    first, second = (m.read(loaded(), [shown(seed=s)])[0] for s in (0, 1))
    scores = m.head_scores([first, second], [1, 2])
    assert scores == pytest.approx((first.logits[:, :, 1] + second.logits[:, :, 2]) / 2)
    best = m.retrieval_heads(scores, 0.25)
    assert len(best) == 2 and scores[best[0]] == scores.max() and scores[best[1]] == np.sort(scores, axis=None)[-2]
    assert len(m.retrieval_heads(scores, 0.01)) == 1
    assert len(m.retrieval_heads(np.random.default_rng(0).normal(size=(30, 9)))) == 5


def test_windowed_layers_hold_no_retrieval_head():
    scores = np.array([[np.nan] * 4, [1.0, 3.0, 2.0, 0.0]])
    assert m.retrieval_heads(scores, 1.0) == [(1, 1), (1, 2), (1, 0), (1, 3)]


def test_heads_without_variance_are_refused():
    for scores in (np.ones((2, 4)), np.full((2, 4), np.nan)):
        with pytest.raises(Refused, match="expected heads with variance"):
            m.retrieval_heads(scores)
    with pytest.raises(Refused, match="share=0 of the heads"):
        m.retrieval_heads(np.eye(2), 0)


def test_margins_are_differences_of_class_means():
    logits = np.zeros((1, 2, 5), dtype=np.float32)
    logits[0, 1] = [9.0, 2.0, 4.0, 7.0, -1.0]
    masses = np.full((1, 2, 5), 0.2, dtype=np.float32)
    masses[0, 1] = [0.5, 0.05, 0.05, 0.3, 0.1]
    found = m.margins(m.Seen(logits, masses, torch.zeros(1)), ["gold", "weak", "weak", "hard"], [(0, 1)])
    assert found[:3] == (6.0, 2.0, 10.0) and found.gap == 4.0
    assert found[3:] == pytest.approx((0.5, 0.1, 0.3)) and found.competition == pytest.approx(0.75)
    clean = m.margins(m.Seen(logits, masses, torch.zeros(1)), ["gold", *["weak"] * 3], [(0, 1)])
    assert np.isnan(clean.hard) and clean.competition == 0
    with pytest.raises(ValueError, match="2 kinds for 4 passages"):
        m.margins(m.Seen(logits, masses, torch.zeros(1)), ["gold", "weak"], [(0, 1)])
