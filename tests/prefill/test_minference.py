"""MInference: each head's pattern is read, the search finds planted patterns, and without patterns it is refused."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan.models import find_parts, profiles
from longspan.models.profiles import Profile
from longspan.prefill.a_shape import AShape
from longspan.prefill.base import ReadContext, forced, readable
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.minference import CANDIDATES, Candidate, MInference
from longspan.prefill.minference_calibration import pairs_of, retained_attention, train
from longspan.prefill.reading import read_rows
from longspan.prefill.vertical_slash import VerticalSlash
from longspan.recipe import Recipe
from longspan.registry import Refused

A_SHAPE, COLUMNS, BLOCKS = 0, 3, 5
SMALL = {"scaled_to": 4096, "block": 16, "last_q": 16}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


def context(T=300, heads=4, D=16, seed=0, parts=None, layer=0, B=1, valid=None) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, h, T, D, generator=draw) for h in (heads, 2))
    return ReadContext(q * 2, k, k, D**-0.5, layer=layer, n_layers=2, parts=parts, valid=valid)


def patterned(method: MInference, *layers: list[int]):
    """The parts of a tiny model whose heads have these patterns."""
    model = tiny("llama")
    profiles.save(Profile(profiles.trained_key(model, method), {"pattern": torch.tensor(layers)}))
    return find_parts(model)


def test_every_head_reads_its_own_pattern():
    method = MInference(**SMALL)
    parts = patterned(method, [A_SHAPE, COLUMNS, BLOCKS, COLUMNS], [BLOCKS] * 4)
    x = context(parts=parts)
    plan = method.plan(x)
    share = 300 / 4096
    own = {A_SHAPE: AShape(sink=round(100 * share), window=round(800 * share), block=16),
           COLUMNS: VerticalSlash(vertical=round(500 * share), slash=round(700 * share), last_q=16, block=16),
           BLOCKS: MeanPool(k=round(100 * share), block=16)}  # fmt: skip
    diagonal = (forced(x, 16, sink=0) & readable(x, 16))[0, 0]
    for head, place in enumerate([A_SHAPE, COLUMNS, BLOCKS, COLUMNS]):
        alone = own[place].plan(x)
        mask = alone.block_map.expand(1, 4, -1, -1)[0, head]
        assert torch.equal(plan.block_map[0, head], mask | diagonal), head
        columns = alone.column_map
        listed = plan.column_map[0, head, 0]
        assert torch.equal(listed, columns[0, head, 0] if columns is not None else torch.zeros(300, dtype=torch.bool))
    assert 0 < plan.density < 1
    assert method.plan(context(parts=parts, layer=1)).column_map is None


def test_full_sizes_are_dense():
    method = MInference(scaled_to=1, block=16)
    x = context(parts=patterned(method, [0, 2, 4, 5], [0] * 4))
    plan = method.plan(x)
    assert plan.density == 1.0
    later = torch.ones(300, 300, dtype=torch.bool).triu(1)
    logits = (x.q @ x.k.repeat_interleave(2, 1).mT * x.scale).masked_fill(later, -torch.inf)
    assert torch.allclose(read_rows(x, method)[0], logits.softmax(-1) @ x.v.repeat_interleave(2, 1), atol=1e-5)


def test_sizes_shrink_with_the_prompt_down_to_the_least():
    assert Candidate("vertical-slash", (3500, 100)).scaled(0.5) == (1750, 50)
    assert Candidate("vertical-slash", (3500, 100)).scaled(0.001) == (30, 50)
    assert Candidate("vertical-slash", (3500, 100)).scaled(7.0) == (3500, 100)
    assert Candidate("a-shape", (100, 800)).scaled(0.25) == (25, 200)
    assert MInference().selector(CANDIDATES[BLOCKS], 10**6) == MeanPool(k=100, block=64)
    assert MInference().selector(CANDIDATES[BLOCKS], 8192) == MeanPool(k=25, block=64)


def test_a_planted_column_and_diagonal_are_kept_whatever_the_other_heads_do():
    method = MInference(**{**SMALL, "scaled_to": 2400})  # 83 columns for head 0, 133 diagonals for head 2
    x = context(T=400, parts=patterned(method, [COLUMNS, A_SHAPE, 1, BLOCKS], [A_SHAPE] * 4))
    x.q[0, 0, :, 0], x.k[0, 0, 217, 0] = 9.0, 9.0
    turn, offset = torch.arange(400)[:, None] * torch.linspace(0.1, 2.0, 8), 133
    x.k[0, 1] = torch.cat((turn.cos(), turn.sin()), -1)
    x.q[0, 2] = 20 * torch.cat(((turn - offset * turn[1]).cos(), (turn - offset * turn[1]).sin()), -1)
    mask = method.plan(x).token_mask()[0]
    assert mask[0, 217:, 217].all() and not mask[1, 380:, 217].any()
    rows = torch.arange(offset, 400)
    assert mask[2, rows, rows - offset].all()


@pytest.mark.parametrize("padded", [False, True])
def test_batches_and_padding(padded):
    method = MInference(**SMALL)
    valid = torch.ones(2, 304, dtype=torch.bool)
    valid[0, :48] = not padded
    parts = patterned(method, [A_SHAPE, COLUMNS, BLOCKS, 4], [A_SHAPE] * 4)
    x = context(T=304, B=2, parts=parts, valid=valid if padded else None)
    out, pairs = read_rows(x, method)
    assert torch.isfinite(out).all() and 0 < pairs < x.causal_pairs
    assert not method.plan(x).token_mask()[..., torch.arange(303), torch.arange(1, 304)].any()
    assert method.plan(context(T=304, B=2, parts=x.parts, layer=1)).density < 1


# -------------------------------------------------------------------------------------------------------------- search


def brute_share(x: ReadContext, candidate: Candidate, last_q: int, share: float, first: int) -> torch.Tensor:
    logits = x.q[0] @ x.k[0].repeat_interleave(2, 0).mT * x.scale
    weights = logits.masked_fill(~torch.ones(x.k_len, x.k_len, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    mask = pairs_of(candidate, x, last_q, share)(torch.arange(x.k_len))
    return (weights * mask)[:, first:].sum((-1, -2)) / (x.k_len - first)


def test_retained_attention_is_the_masks_share_of_the_later_rows():
    x = context(T=400)
    found = retained_attention(x, 16, 0.1)
    assert found.shape == (4, 6) and (found > 0).all() and (found < 1).all()
    for at, candidate in enumerate(CANDIDATES):
        assert torch.allclose(found[:, at], brute_share(x, candidate, 16, 0.1, 200), atol=1e-5), candidate


def test_pairs_of_candidates():
    x, rows = context(T=320), torch.arange(320)
    distance = rows[:, None] - rows
    assert torch.equal(pairs_of(CANDIDATES[0], x, 16, 0.1)(rows)[0], (rows < 10) | (distance < 80))
    both = pairs_of(CANDIDATES[3], x, 16, 0.1)(rows)  # 50 columns, 70 diagonals
    assert both[:, :, :30].all() and both[:, distance.clamp(min=0) < 70][:, ::7].all()
    assert ((both & (distance >= 0)).sum(-1) <= 120).all()
    blocks = pairs_of(CANDIDATES[5], x, 16, 0.1)(rows)
    assert (blocks.sum(-1) == 2 * 32).all()  # an eighth of ten blocks, rounded up


def test_the_search_finds_what_a_head_does():
    """One head looks at everything alike within a window, one at a few far columns."""
    x = context(T=800, heads=4)
    x.q[:], x.k[:] = x.q * 0.1, x.k * 0.1
    x.k[0, 0, ::9, 0], x.q[0, 0, :, 0] = 12.0, 12.0  # 89 columns
    near = torch.arange(800.0)[:, None] / 400
    x.k[0, 1, :, 1:2], x.q[0, 2, :, 1:2] = near, 60.0  # later keys are liked better
    assert retained_attention(x, 64, 0.2)[0].argmax() in (3, 4) and retained_attention(x, 64, 0.05)[2, 0] > 0.6


def test_training_reads_the_longest_text_and_leaves_the_model_alone():
    model, method = tiny("llama", positions=512), MInference()
    before = model.config._attn_implementation
    ids = tiny_ids(1, 300)[0].tolist()
    steps: list[int] = []
    made = train(model, [ids[:40], ids], [method], {}, progress=lambda done, total, what: steps.append(done))
    assert made["pattern"].shape == (2, 4) and made["retained"].shape == (2, 4, 6) and steps == [0, 1, 2]
    assert torch.equal(made["pattern"], made["retained"].argmax(-1))
    assert train(model, [], [method], made) is made
    assert model.config._attn_implementation == before
    with pytest.raises(Refused, match="at least 256"):
        train(model, [ids[:40]], [method], {})
    profiles.save(Profile(profiles.trained_key(model, method), made))
    with Recipe.parse("minference(block=16)").on(model) as run, torch.no_grad():
        model.generate(tiny_ids(1, 200), max_new_tokens=2, do_sample=False, pad_token_id=2)
        assert run.cache.get_seq_length() == 201 and 0 < run.pairs.density < 1


def test_it_composes_with_a_token_subset():
    model, method = tiny("llama"), MInference(scaled_to=4096)
    profiles.save(Profile(profiles.trained_key(model, method), {"pattern": torch.tensor([[0, 3, 5, 1]] * 2)}))
    text = "token-sparse-attention(tau=0.4, window=8, min_tokens=16, layers=all) + minference(scaled_to=4096, block=16)"
    with Recipe.parse(text).on(model) as run, torch.no_grad():
        model.generate(tiny_ids(1, 200), max_new_tokens=2, do_sample=False, pad_token_id=2)
        assert run.cache.get_seq_length() == 201 and 0 < run.pairs.density < 0.9


# ------------------------------------------------------------------------------------------------------------- refusals


def test_without_patterns_it_is_refused_with_the_command():
    model = tiny("llama")
    with pytest.raises(Refused, match=r"longspan profile minference .*--model MODEL"):
        MInference().plan(context(parts=find_parts(model)))
    with pytest.raises(Refused, match=r"longspan profile 'minference\(scaled_to=4096\)'"):
        MInference(scaled_to=4096).plan(context(parts=find_parts(model)))
    with pytest.raises(ValueError, match="names no model"):
        MInference().plan(context())


def test_bad_knobs_and_other_heads_are_refused():
    for bad in ({"scaled_to": 0}, {"last_q": 0}, {"block": 0}):
        with pytest.raises(Refused):
            MInference(**bad)
    method = MInference(**SMALL)
    with pytest.raises(ValueError, match="got layer 0 with 6"):
        method.plan(context(heads=6, parts=patterned(method, [0] * 4, [0] * 4)))


def test_the_patterns_of_the_bundled_model_come_with_the_package():
    (path,) = profiles.SHIPPED.glob("*minference-patterns*")
    shipped = profiles.load(path)
    assert shipped.key.shipped == path  # what a model's key would name
    assert shipped.key.settings == json.dumps(MInference().profile_settings(), sort_keys=True)
    assert torch.equal(shipped.tensors["pattern"], shipped.tensors["retained"].argmax(-1))
    assert shipped.tensors["pattern"].shape == (30, 9) and not profiles.missing(shipped, [MInference()])
