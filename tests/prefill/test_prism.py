"""Prism: the closed form of pooled rotations, bands and temperatures, the chosen blocks, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tiny_models import tiny

from longspan.kernels.block_sparse import block_sparse_attention
from longspan.models import find_parts
from longspan.prefill import read_rows
from longspan.prefill.base import ReadContext, masked_softmax, pooled_map, readable
from longspan.prefill.mean_pool import MeanPool
from longspan.prefill.prism import (
    Prism,
    Rotation,
    band_weights,
    block_means,
    pooling_gain,
    rms,
    rotation_of,
    temperature,
)
from longspan.recipe import Recipe
from longspan.registry import Refused

BLOCK = 16


def context(T=256, S=None, B=1, heads=4, key_heads=2, D=16, seed=0, valid=None, scale=None, parts=None) -> ReadContext:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, h, n, D, generator=draw) * 3 for h, n in ((heads, T), (key_heads, S or T)))
    return ReadContext(q, k, torch.randn(k.shape, generator=draw), scale or D**-0.5, valid=valid, parts=parts)


def turned(x: torch.Tensor, base: float, layout: str = "half") -> torch.Tensor:
    """Rotary positions 0, 1, … on (..., T, D), written out with complex numbers."""
    D = x.shape[-1]
    theta = base ** (-torch.arange(D // 2, dtype=torch.float64) * 2 / D)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(x.shape[-2])[:, None] * theta)
    pairs = x.unflatten(-1, (2, -1)).mT if layout == "half" else x.unflatten(-1, (-1, 2))
    out = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn)
    return (out.mT if layout == "half" else out).flatten(-2).to(x.dtype)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """Channels of the half layout in the order of the interleaved one."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


# ------------------------------------------------------------------------------------------------------- the blind spot


@pytest.mark.parametrize(("D", "base"), [(64, 1e5), (128, 1e6)])
def test_pooling_a_rotation_shortens_it_as_the_closed_form_says(D, base):
    """The block mean of frequency j has lambda_j times the token's norm, for constant content."""
    content = torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys = turned(content.expand(1, 1, 512, D), base)
    norms = block_means(keys, 128).double().unflatten(-1, (2, -1)).norm(dim=-2)
    theta = base ** (-torch.arange(D // 2, dtype=torch.float64) * 2 / D)
    expected = pooling_gain(theta, 128) * content.unflatten(-1, (2, -1)).norm(dim=-2)
    assert (norms - expected).abs().max() < 1e-5
    cut = D * math.log(128 / (2 * math.pi)) / math.log(base)
    channel = 2 * torch.arange(D // 2)
    assert pooling_gain(theta, 128)[channel < cut].max() < 0.25  # blind
    assert pooling_gain(theta, 128)[channel > 2 * cut].min() > 0.99  # unharmed


def test_pooling_gain_at_its_ends():
    theta = torch.tensor([0.0, 2 * math.pi / 8, 1e-9], dtype=torch.float64)
    assert torch.allclose(pooling_gain(theta, 8), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), atol=1e-12)
    assert torch.equal(pooling_gain(torch.rand(5), 1), torch.ones(5))


# ------------------------------------------------------------------------------------------------ bands, temperatures


def test_bands_follow_the_frequencies():
    assert Rotation(128, "half", 14).band_sizes() == (64, 96)  # base 1e6
    assert Rotation(128, "half", 15).band_sizes() == (64, 96)  # base 5e5
    assert Rotation(64, "half", 9).band_sizes() == (32, 48)  # base 1e5
    assert Rotation(8, "half", 0).band_sizes() == (2, 8) and Rotation(8, "half", 4).band_sizes() == (8, 2)
    for D, sizes in ((64, (32, 48)), (128, (64, 96))):
        assert rotation_of(context(T=8, D=D), 128).band_sizes() == sizes


def test_channels_of_the_bands():
    """Fast pairs come first; channels that don't turn join the slow band."""
    half, neighbours = Rotation(8, "half", 1), Rotation(8, "interleaved", 1)
    assert [c.tolist() for c in half.band_channels(10, 4, 6)] == [[0, 1, 4, 5], [1, 2, 3, 5, 6, 7, 8, 9]]
    assert [sorted(c.tolist()) for c in neighbours.band_channels(10, 4, 6)] == [[0, 1, 2, 3], [2, 3, 4, 5, 6, 7, 8, 9]]


def means(x: ReadContext, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    return block_means(x.q, block), block_means(x.k, block).repeat_interleave(x.heads // x.k.shape[1], 1)


def test_temperatures():
    q, k = means(context())
    channels = torch.tensor([0, 1, 8, 9])
    tau = temperature(q, k, channels)
    share = [(t[..., channels].square().sum((-1, -2)) / t.square().sum((-1, -2))).sqrt() for t in (q, k)]
    assert torch.allclose(tau[..., 0, 0], math.sqrt(16 / 4) * share[0] * share[1], atol=1e-6)
    assert ((tau >= 0) & (tau <= math.sqrt(16 / 4))).all()
    assert torch.equal(temperature(q, k, torch.arange(16)), torch.ones(1, 4, 1, 1))  # one band of all channels
    assert torch.allclose(temperature(q * 7, k * 0.01, channels), tau, rtol=1e-5)
    alone = [torch.zeros_like(t).index_copy_(-1, channels, t[..., channels]) for t in (q, k)]
    assert torch.allclose(temperature(*alone, channels), torch.full((1, 4, 1, 1), 2.0))  # all energy in the band
    assert not temperature(*alone, torch.tensor([2, 3])).any()
    size = math.sqrt(4) * rms(q[..., channels]) * rms(k[..., channels]) / tau  # logits are as large as with all channels
    assert torch.allclose(size, math.sqrt(16) * rms(q) * rms(k), rtol=1e-6)


def test_one_band_of_all_channels_is_mean_pooling():
    x = context()
    q, k = means(x)
    weights = band_weights(q, k, torch.arange(16), torch.ones(1), x.scale, readable(x, BLOCK))
    assert torch.allclose(weights, pooled_map(x, BLOCK), atol=1e-6)
    pooling = MeanPool(p=0.7, block=BLOCK).plan(x).block_map
    for same in (Prism(p=0.7, block=BLOCK, bands="full"), Prism(p=0.7, block=BLOCK, bands="high", dh=16),
                 Prism(p=0.7, block=BLOCK, bands="low", dl=16)):
        assert torch.equal(same.plan(x).block_map, pooling)


def test_weights_against_brute_force():
    x = context(T=64, D=8)
    q, k = means(x)
    channels, tau = torch.tensor([0, 1, 4, 5]), torch.tensor([0.5, 1.0, 0.1, 2.0]).view(1, 4, 1, 1)
    found = band_weights(q, k, channels, tau, x.scale, readable(x, BLOCK))
    for h, u in itertools.product(range(4), range(4)):
        rows = x.q[0, h, 16 * u : 16 * u + 16].mean(0)[channels]
        logits = [float(rows @ x.k[0, h // 2, 16 * v : 16 * v + 16].mean(0)[channels]) for v in range(u + 1)]
        raised = [math.exp(z / (2 * float(tau[0, h]))) for z in logits]  # sqrt(dz) = 2
        expected = torch.tensor([r / sum(raised) for r in raised] + [0.0] * (3 - u))
        assert torch.allclose(found[0, h, u], expected, atol=1e-5)
    mask = readable(x, BLOCK)
    logits = q @ k.mT
    assert torch.allclose(masked_softmax(logits + torch.randn(1, 4, 4, 1), mask), masked_softmax(logits, mask), atol=1e-6)


# -------------------------------------------------------------------------------------------------------- chosen blocks


def brute_force(x: ReadContext, method: Prism) -> torch.Tensor:
    """The blocks that Prism reads, row by row, as the specification says it."""
    B, heads, D, block = x.q.shape[0], x.heads, x.q.shape[-1], method.block
    n_q, n_k = -(-x.q_len // block), -(-x.k_len // block)
    dh, dl = method.dh or D // 2, method.dl or D * 3 // 4
    pairs = list(range(D // 2))
    fast, slow = pairs[: dh // 2], pairs[D // 2 - dl // 2 :]
    bands = [[j for j in band] + [j + D // 2 for j in band] for band in (fast, slow)]
    kept = torch.zeros(B, heads, n_q, n_k, dtype=torch.bool)
    for b, h in itertools.product(range(B), range(heads)):
        def blocks(t: torch.Tensor, n: int) -> torch.Tensor:
            return torch.stack([t[i * block : (i + 1) * block].sum(0) / block for i in range(n)])
        q, k = blocks(x.q[b, h], n_q), blocks(x.k[b, h * x.k.shape[1] // heads], n_k)
        for band in bands:
            energies = [float(t[:, band].square().mean().sqrt() / t.square().mean().sqrt()) for t in (q, k)]
            tau = math.sqrt(len(band) / D) * energies[0] * energies[1] if method.calibrate else 1.0
            for u in range(n_q):
                last = x.k_len - x.q_len + min((u + 1) * block, x.q_len) - 1
                logits = torch.stack([q[u, band] @ k[v, band] for v in range(last // block + 1)])
                weights = (logits / (math.sqrt(len(band)) * tau)).softmax(0)
                total = 0.0
                for v in weights.argsort(descending=True, stable=True).tolist():
                    if total >= method.p:
                        break
                    kept[b, h, u, v] = True
                    total += float(weights[v])
        for u in range(n_q):
            first = x.k_len - x.q_len + u * block
            kept[b, h, u, first // block : (x.k_len - x.q_len + min((u + 1) * block, x.q_len) - 1) // block + 1] = True
    kept[..., 0] = True
    return kept


@pytest.mark.parametrize(("T", "S"), [(256, 256), (96, 208), (100, 181)])
@pytest.mark.parametrize("knobs", [{}, {"calibrate": False}, {"dh": 4, "dl": 10, "p": 0.3}], ids=str)
def test_against_brute_force(T, S, knobs):
    x, method = context(T, S, B=2), Prism(**{"p": 0.6, "block": BLOCK, **knobs})
    plan = method.plan(x)
    assert torch.equal(plan.block_map, brute_force(x, method)) and 0 < plan.density < 1


def test_the_choice_is_the_union_of_its_bands():
    x = context()
    dual, high, low = (Prism(p=0.5, block=BLOCK, bands=b).plan(x).block_map for b in ("dual", "high", "low"))
    assert torch.equal(dual, high | low) and not torch.equal(dual, high) and not torch.equal(dual, low)


def test_each_band_keeps_its_share_and_no_block_more():
    x, p = context(), 0.6
    q, k = means(x)
    for bands in ("high", "low"):
        method = Prism(p=p, block=BLOCK, bands=bands)
        (channels,) = method.channels(x)
        weights = band_weights(q, k, channels, temperature(q, k, channels), x.scale, readable(x, BLOCK))
        kept = method.plan(x).block_map
        assert ((weights * kept).sum(-1) >= p - 1e-6).all()
        optional = kept.clone()
        optional[..., 0] = False
        optional.diagonal(dim1=-2, dim2=-1).fill_(False)
        least = weights.masked_fill(~optional, torch.inf).min(-1).values
        assert ((weights * kept).sum(-1) - least < p + weights[..., 0] + weights.diagonal(dim1=-2, dim2=-1) + 1e-6)[
            optional.any(-1)].all()  # but for what is forced on top


def test_masks_are_causal_with_sink_and_diagonal():
    for p in (1e-6, 0.5, 1.0):
        blocks = Prism(p=p, block=BLOCK).plan(context()).block_map
        N = blocks.shape[-1]
        assert not blocks.triu(1).any() and blocks[..., 0].all() and blocks.diagonal(dim1=-2, dim2=-1).all()
        density = blocks.sum((-1, -2)) / (N * (N + 1) / 2)
        assert (density >= (2 * N - 1) / (N * (N + 1) / 2)).all() and (density <= 1).all()


@pytest.mark.parametrize("S", [256, 300])
def test_a_full_share_is_dense_attention(S):
    x = context(S=S)
    plan = Prism(p=1.0, block=BLOCK).plan(x)
    assert plan.density == 1.0
    keys = torch.arange(S) <= (S - 256 + torch.arange(256))[:, None]
    logits = (x.q @ x.k.repeat_interleave(2, 1).mT * x.scale).masked_fill(~keys, -torch.inf)
    out = block_sparse_attention(x.q, x.k, x.v, plan, scale=x.scale)
    assert torch.allclose(out, logits.softmax(-1) @ x.v.repeat_interleave(2, 1), atol=1e-5)


def test_short_prompts_and_single_tokens_are_dense():
    for T, S in ((10, 10), (BLOCK, BLOCK), (1, 200)):
        assert Prism(block=BLOCK).plan(context(T, S)).density == 1.0


def test_grouped_heads_choose_as_with_keys_repeated():
    x = context()
    repeated = ReadContext(x.q, x.k.repeat_interleave(2, 1), x.v.repeat_interleave(2, 1), x.scale)
    method = Prism(p=0.5, block=BLOCK)
    plan = method.plan(x)
    assert torch.equal(plan.block_map, method.plan(repeated).block_map)
    assert not torch.equal(plan.block_map[:, 0], plan.block_map[:, 1])  # every query head has its own
    outs = [read_rows(c, method)[0] for c in (x, repeated)]
    assert torch.allclose(*outs, atol=1e-6)


def test_long_prompts_go_in_strips(monkeypatch):
    x, method = context(T=240, S=301), Prism(p=0.6, block=BLOCK)
    whole = method.plan(x).block_map
    monkeypatch.setattr("longspan.prefill.prism.STRIP", 200)
    assert torch.equal(method.plan(x).block_map, whole)


def test_low_precision_input_chooses_alike():
    x, method = context(), Prism(p=0.6, block=BLOCK)
    low = ReadContext(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), x.scale)
    wide = ReadContext(low.q.float(), low.k.float(), x.v, x.scale)
    assert torch.equal(method.plan(low).block_map, method.plan(wide).block_map)


@pytest.mark.parametrize("pad", [5, 48, -48, -70])
def test_padding_takes_no_part(pad):
    """A padded row is planned like its tokens alone (where padding fills whole blocks), and its blocks are closed."""
    valid = torch.ones(2, 256, dtype=torch.bool)
    valid[0, slice(pad) if pad > 0 else slice(pad, None)] = False
    x, method = context(B=2, valid=valid), Prism(p=0.6, block=BLOCK)
    plan = method.plan(x)
    x.q[0, :, ~valid[0]] = x.k[0, :, ~valid[0]] = 100.0
    assert torch.equal(method.plan(x).block_map, plan.block_map)
    empty = ~valid.unflatten(-1, (-1, BLOCK)).any(-1)[0]
    assert not plan.block_map[0][..., empty].any()
    assert torch.equal(plan.block_map[1:], method.plan(ReadContext(x.q[1:], x.k[1:], x.v[1:], x.scale)).block_map)
    if pad % BLOCK == 0:
        tokens = slice(pad, None) if pad > 0 else slice(None, pad)
        alone = ReadContext(x.q[:1, :, tokens], x.k[:1, :, tokens], x.v[:1, :, tokens], x.scale)
        assert torch.equal(plan.block_map[:1][:, :, ~empty][..., ~empty], method.plan(alone).block_map)
    assert torch.isfinite(block_sparse_attention(x.q, x.k, x.v, plan, valid=valid)).all()


def test_energies_of_nothing_are_survived():
    x = context(T=128)
    zero = ReadContext(x.q, torch.zeros_like(x.k), x.v, x.scale)
    q, k = means(zero)
    tau = temperature(q, k, torch.tensor([0, 8]))
    assert torch.isfinite(tau).all()
    weights = band_weights(q, k, torch.tensor([0, 8]), tau, x.scale, readable(zero, BLOCK))
    assert torch.allclose(weights[0, 0, 3], torch.tensor([0.25] * 4 + [0.0] * 4))
    assert Prism(p=0.5, block=BLOCK).plan(zero).counts[0, 0].tolist() == [1, 2, 3, 3, 4, 4, 5, 5]  # lower half, and itself


# ------------------------------------------------------------------------------------------------------ slash head


def slash_head(layout: str, seed: int = 0, off: int = 3, N: int = 24) -> ReadContext:
    """Constant content in the fast pairs, noise twice as strong in the slow ones; block u attends to block u - off."""
    draw, D, block = torch.Generator().manual_seed(seed), 128, 128

    def content() -> torch.Tensor:
        pairs = torch.randn(N, 2, D // 2, generator=draw) * 6.0
        pairs[..., :30] = 3.0
        return pairs.flatten(-2).repeat_interleave(block, 0)

    q, k = content(), content()
    ahead = turned(torch.cat((k.new_zeros(off * block, D), k)), 1e6)[off * block :]
    q, k = turned(q, 1e6), ahead
    if layout == "interleaved":
        q, k = interleaved(q), interleaved(k)
    return ReadContext(q[None, None], k[None, None], k[None, None], D**-0.5)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_fast_band_finds_a_slash_that_mean_pooling_cannot_see(layout):
    off, hits = 3, {"high": [], "low": [], "full": [], "swapped": []}
    for seed in range(3):
        x = slash_head(layout, seed)
        q, k = means(x, 128)
        found = {bands: Prism(bands=bands, rope_layout=layout).channels(x)[0] for bands in ("high", "low", "full")}
        found["swapped"] = Prism(bands="high", rope_layout="half" if layout == "interleaved" else "interleaved").channels(x)[0]
        for name, channels in found.items():
            weights = band_weights(q, k, channels, temperature(q, k, channels), x.scale, readable(x, 128))[0, 0]
            rows = torch.arange(off + 8, len(weights))
            true = weights[rows, rows - off]
            hits[name].append(((weights[rows] > true[:, None]).sum(-1) < 2).double().mean())
    rate = {name: float(sum(found) / len(found)) for name, found in hits.items()}
    assert rate["high"] >= 0.6 and rate["full"] <= 0.45 and rate["low"] <= 0.45
    assert rate["swapped"] <= rate["high"] - 0.2  # channels of the other layout are another band


def test_without_its_temperature_the_fast_band_is_flat():
    """With queries and keys a third as large, the fast band's logits are too small to choose anything by."""
    x = slash_head("half")
    x = ReadContext(x.q * 0.3, x.k * 0.3, x.v, x.scale)
    with_it, without = (Prism(bands="high", calibrate=c).plan(x).density for c in (True, False))
    assert with_it < 0.3 and without > 0.6


# ---------------------------------------------------------------------------------------------- models, and refusals


def test_the_model_says_how_it_rotates():
    model = find_parts(tiny("phi3", head_dim=16))
    rotation = rotation_of(context(T=8, D=16, parts=model), BLOCK)
    assert (rotation.size, rotation.layout) == (8, "half")
    assert rotation.fast == 1  # of 1, 0.1, 0.01, 0.001 radians a token
    high, low = Prism(block=BLOCK).channels(context(T=8, D=16, parts=model))
    assert set(range(8, 16)) < set(low.tolist()) and max(high.tolist()) < 8
    own = context(T=8, D=16, parts=model)
    assert rotation_of(own, BLOCK, 8, "half") == rotation
    for wrong in ((16, None), (None, "interleaved")):
        with pytest.raises(Refused, match="expected 8 and 'half'"):
            rotation_of(own, BLOCK, *wrong)


def test_without_a_model_the_knobs_say_it():
    high, low = Prism(rotary=8, rope_layout="interleaved", dh=2, dl=4).channels(context(T=8, D=12))
    assert high.tolist() == [0, 1] and sorted(low.tolist()) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_it_runs_in_a_model():
    model, ids = tiny("llama"), torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        dense = model(input_ids=ids).logits
        outs = {}
        for p in (0.3, 1.0):
            with Recipe.parse(f"prism(p={p}, block=16)").on(model) as run:
                outs[p] = model(input_ids=ids).logits
                assert (run.pairs.density < 1.0) == (p < 1)
    assert torch.allclose(outs[1.0], dense, atol=1e-4) and not torch.allclose(outs[0.3], dense, atol=1e-2)


def test_bad_knobs_are_refused():
    for bad in ({"dh": 3}, {"dl": 5}, {"dh": 0}, {"dl": 1}, {"rotary": 7}, {"block": 0}, {"p": 0.0}, {"p": 1.1}, {"p": -0.1},
                {"rope_layout": "other"}, {"bands": "both"}, {"calibrate": 1}):
        with pytest.raises(Refused):
            Prism(**bad)
    with pytest.raises(Refused, match="up to 16"):
        Prism(dh=18, block=BLOCK).plan(context())
    with pytest.raises(Refused, match="up to 8"):
        Prism(dl=12, rotary=8, block=BLOCK).plan(context())
    with pytest.raises(Refused, match="even number"):
        Prism(block=BLOCK).plan(context(D=15))
    with pytest.raises(Refused, match="even number"):
        Prism(rotary=18, block=BLOCK).plan(context())


def test_bad_tensors_are_refused():
    x = context()
    with pytest.raises(ValueError, match="multiple"):
        Prism(block=BLOCK).plan(ReadContext(x.q[:, :3], x.k, x.v, x.scale))
    for value in (torch.nan, torch.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            bad = x.k.to(dtype)
            bad[0, 1, 77, 3] = value
            with pytest.raises(ValueError, match="NaN"):
                Prism(block=BLOCK).plan(ReadContext(x.q.to(dtype), bad, x.v.to(dtype), x.scale))
