"""RePo: learned places against rotary positions, no positions, and finite differences; what is refused."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from longspan.layers import Context, PositionModule, inverse_frequencies, rotate
from longspan.layers.attention.l2a import L2A
from longspan.layers.attention.softmax import Softmax
from longspan.layers.positions.alibi import Alibi, AlibiModule
from longspan.layers.positions.repo import LearnedPlaces, Repo, RepoRope, blend
from longspan.layers.positions.rope import Rope, RopeModule
from longspan.layers.positions.scaled import PositionInterpolation
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused

DIM, HEADS, KV, HEAD_DIM, TIME = 16, 4, 2, 8, 12


def build(position, layer=0, n_layers=1, seed=0):
    torch.manual_seed(seed)
    return position.build(DIM, HEADS, KV, HEAD_DIM, layer, n_layers)


def spread(module, std=0.8, seed=3):
    """Weights large enough that places differ by several."""
    g = torch.Generator().manual_seed(seed)
    for weight in module.learned.parameters():
        weight.data.normal_(std=std, generator=g)
    return module


def standing(module, slope=1.0):
    """The module made to read z = slope * channel 1 where channel 0 is 1."""
    with torch.no_grad():
        for weight in module.learned.parameters():
            weight.zero_()
        module.learned.gate.weight[0, 0] = module.learned.content.weight[0, 1] = 1.0
        module.learned.assign.weight[:, 0] = slope / F.silu(torch.tensor(1.0))
    return module


def text(batch=2, places=None, seed=1, dtype=torch.float32):
    x = torch.randn(batch, TIME, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    if places is not None:
        x[..., 0], x[..., 1] = 1.0, places
    return x


def attention(seed=5):
    torch.manual_seed(seed)
    return Softmax().build(DIM, HEADS, KV, HEAD_DIM, 0, 1)


def attended(position, x, **given):
    ctx = dataclasses.replace(Context.of(*x.shape[:2], **given), position=position)
    return attention().to(x.dtype)(x, ctx)[0]


# ------------------------------------------------------------------------------------------------- against what is known


@pytest.mark.parametrize("per_query_head", [False, True])
def test_standing_at_the_index_is_rope(per_query_head):
    x, rope = text(places=torch.arange(float(TIME))), build(Rope())
    by_hand = standing(build(Repo(start=0, per_query_head=per_query_head)))
    blended = build(Repo(start=0, rho=1.0, per_query_head=per_query_head))
    want = attended(rope, x)
    torch.testing.assert_close(attended(by_hand, x), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(attended(blended, x), want, atol=1e-5, rtol=0)
    assert not torch.allclose(attended(spread(build(Repo(start=0))), x), want, atol=1e-3)


def test_equal_places_of_query_heads_are_those_of_their_key_head():
    x, shared, own = text(), spread(build(Repo(start=0))), build(Repo(start=0, per_query_head=True))
    weights = dict(shared.learned.state_dict())
    weights["assign.weight"] = weights["assign.weight"].repeat_interleave(HEADS // KV, 0)
    own.learned.load_state_dict(weights)
    torch.testing.assert_close(attended(own, x), attended(shared, x), atol=1e-5, rtol=0)


def test_half_way_to_the_index():
    z, i = torch.randn(2, KV, TIME), torch.arange(TIME).expand(2, -1)
    torch.testing.assert_close(blend(z, i, 0.25), 0.75 * z + 0.25 * i[:, None])
    x, half = text(places=torch.arange(float(TIME))), standing(build(Repo(start=0, rho=0.5)))
    torch.testing.assert_close(attended(half, x), attended(build(Rope()), x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("place", [0.0, 31.5, -800.0])
def test_one_place_for_all_is_no_position(place):
    x, module = text(places=1.0), standing(build(Repo(start=0)), place)
    torch.testing.assert_close(attended(module, x), attended(PositionModule(), x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shift", [3.25, -70.0, 1e3, -1e3])
def test_a_shift_per_head_changes_no_score(shift):
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, TIME, HEAD_DIM, generator=g) for n in (HEADS, KV))
    z = 10 * torch.randn(2, KV, TIME, generator=g)
    module = build(Repo(start=0))

    def scores(places):
        turned, keys = module.rotate(q, k, places)
        return turned @ keys.repeat_interleave(HEADS // KV, 1).mT / HEAD_DIM**0.5

    per_head = torch.tensor([shift, -shift / 3])[None, :, None]
    torch.testing.assert_close(scores(z + per_head), scores(z), atol=1e-4, rtol=0)
    assert not torch.allclose(scores(z + shift * torch.arange(TIME)), scores(z), atol=1e-2)


def test_scores_are_those_of_the_difference():
    """q_i^T R(z_j - z_i) k_j, from one rotation of the key alone."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, TIME, HEAD_DIM, generator=g) for n in (HEADS, KV))
    z = 5 * torch.randn(1, KV, TIME, generator=g)
    turned, keys = build(Repo(start=0)).rotate(q, k, z)
    f = inverse_frequencies(HEAD_DIM)
    for h, i, j in ((0, 3, 1), (1, 11, 0), (2, 7, 7), (3, 9, 4)):
        moved = rotate(k[:, h // 2, None, j : j + 1], z[:, h // 2, None, j : j + 1] - z[:, h // 2, None, i : i + 1], f)
        torch.testing.assert_close(turned[0, h, i] @ keys[0, h // 2, j], q[0, h, i] @ moved[0, 0, 0], atol=1e-4, rtol=1e-4)


def test_negated_places_turn_the_other_way_and_divided_ones_interpolate():
    x = text(places=torch.arange(float(TIME)))
    backwards = RopeModule(-inverse_frequencies(HEAD_DIM))
    torch.testing.assert_close(attended(standing(build(Repo(start=0)), -1.0), x), attended(backwards, x), atol=1e-5, rtol=0)
    squeezed = build(PositionInterpolation(factor=4.0))
    torch.testing.assert_close(attended(standing(build(Repo(start=0)), 0.25), x), attended(squeezed, x), atol=1e-5, rtol=0)


def test_alibi_over_places():
    x = text(places=torch.arange(float(TIME)))
    scheme = Repo(start=0, encoding="alibi")
    assert scheme.hooks == {"bias"} and Repo().hooks == {"rotate"}
    torch.testing.assert_close(attended(standing(build(scheme)), x), attended(build(Alibi()), x), atol=1e-5, rtol=0)
    module = spread(build(Repo(start=0, encoding="alibi", per_query_head=True)))
    z = module.places(x, Context.of(*x.shape[:2]))
    assert z.shape == (2, HEADS, TIME)
    want = -module.slopes[:, None, None] * (z[..., :, None] - z[..., None, :])
    torch.testing.assert_close(module.bias(z, z), want)


# ------------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("position", [Repo(start=0), Repo(start=0, per_query_head=True), Repo(start=0, rho=0.3),
                                      Repo(start=0, encoding="alibi"), Repo(start=0, encoding="alibi", per_query_head=True)],
                         ids=str)
@pytest.mark.parametrize("mixer", [Softmax(), Softmax(window=4), L2A(window=4)], ids=str)
def test_learned_layers_keep_the_contract(contract, mixer, position):
    made = contract(mixer, position)
    spread(made.position)
    made.check_all()


def test_places_depend_on_the_token_alone():
    x, module = text(), spread(build(Repo(start=0)))
    z = module.places(x, Context.of(*x.shape[:2]))
    assert z.shape == (2, KV, TIME) and z.std() > 0.5
    changed = x.clone()
    changed[0, 7] += 1.0
    again = module.places(changed, Context.of(*x.shape[:2]))
    others = [t for t in range(TIME) if t != 7]
    assert torch.equal(again[:, :, others], z[:, :, others]) and torch.equal(again[1], z[1])
    assert not torch.equal(again[0, :, 7], z[0, :, 7])
    elsewhere = module.places(x, Context.of(2, TIME, positions=torch.arange(TIME).expand(2, -1) + 500))
    assert torch.equal(elsewhere, z)


def test_a_decoder_reads_forwards_only_and_in_pieces():
    """Places above the first layers read hidden states, so a later token moves none before it; decoding agrees."""
    torch.manual_seed(0)
    config = DecoderConfig(20, dim=DIM, n_layers=3, n_heads=HEADS, n_kv_heads=KV, head_dim=HEAD_DIM, position=Repo())
    model = Decoder(config).eval()
    for layer in model.stack.layers[1:]:
        spread(layer.position)
    ids = torch.randint(0, 20, (2, TIME))
    whole = model(ids).logits
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 20
    torch.testing.assert_close(model(changed).logits[:, :8], whole[:, :8], atol=1e-6, rtol=0)
    state, steps = None, []
    for t in range(TIME):
        out = model(ids[:, t : t + 1], state=state)
        state = out.state
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(ids[1:]).logits, whole[1:], atol=1e-5, rtol=1e-5)


def test_padding_may_stand_anywhere():
    x, module = text(), spread(build(Repo(start=0)))
    valid = torch.ones(2, TIME, dtype=torch.bool)
    valid[0, :4] = False
    loud = x.clone()
    loud[0, :4] = 40.0
    torch.testing.assert_close(attended(module, loud, valid=valid), attended(module, x, valid=valid), atol=1e-6, rtol=0)


def test_one_token_has_no_position():
    x = text()[:, :1]
    torch.testing.assert_close(attended(spread(build(Repo(start=0))), x), attended(PositionModule(), x), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------------- gradients


def loss_of(module, x, weights, mixer):
    ctx = dataclasses.replace(Context.of(*x.shape[:2]), position=module)
    return (mixer(x, ctx)[0] * weights).sum()


def test_gradients_agree_with_finite_differences():
    module, x = spread(build(Repo(start=0))).double(), text(dtype=torch.float64)
    weights, mixer = torch.randn(2, TIME, DIM, dtype=torch.float64), attention().double()
    for weight in module.learned.parameters():
        (found,) = torch.autograd.grad(loss_of(module, x, weights, mixer), weight)
        direction, step = torch.randn_like(weight), 1e-5
        with torch.no_grad():
            weight += step * direction
            above = loss_of(module, x, weights, mixer)
            weight -= 2 * step * direction
            below = loss_of(module, x, weights, mixer)
            weight += step * direction
        want = (above - below) / (2 * step)
        assert want.abs() > 1e-3
        torch.testing.assert_close((found * direction).sum(), want, rtol=1e-3, atol=0)


def test_a_head_without_content_teaches_no_place():
    module, x, mixer = spread(build(Repo(start=0))), text(), attention()
    for projection in (mixer.q_proj, mixer.k_proj):
        torch.nn.init.zeros_(projection.weight)
    grads = torch.autograd.grad(loss_of(module, x, torch.randn(2, TIME, DIM), mixer), list(module.learned.parameters()))
    assert not any(g.any() for g in grads)


def test_a_zero_assignment_is_no_position_and_can_be_left():
    module, x, mixer = spread(build(Repo(start=0))), text(), attention()
    torch.nn.init.zeros_(module.learned.assign.weight)
    torch.testing.assert_close(attended(module, x), attended(PositionModule(), x), atol=1e-6, rtol=0)
    learned = module.learned
    loss_of(module, x, torch.randn(2, TIME, DIM), mixer).backward()
    assert learned.assign.weight.grad.any()
    assert not learned.gate.weight.grad.any() and not learned.content.weight.grad.any()


# ------------------------------------------------------------------------------------------------------ size and start


def test_parameters_and_first_layer():
    """2 D d_p + d_p N per learned layer; layers from n // 3 on; the first weights within three deviations."""
    for start, n_layers, first in ((None, 16, 5), (None, 32, 10), (7, 16, 7), (16, 16, 16), (0, 2, 0), (None, 3, 1)):
        kinds = [type(build(Repo(start=start), layer, n_layers)) for layer in range(n_layers)]
        assert kinds == [RepoRope if layer >= first else RopeModule for layer in range(n_layers)]
    for method, d_p, places in ((Repo(start=0), 2, KV), (Repo(start=0, d_p=5), 5, KV),
                                (Repo(start=0, per_query_head=True), 2, HEADS)):
        module = build(method)
        assert sum(p.numel() for p in module.parameters()) == 2 * DIM * d_p + d_p * places
    assert type(build(Repo(start=1, encoding="alibi"), 0, 2)) is AlibiModule
    assert not list(build(Repo(start=1), 0, 2).parameters())
    first = LearnedPlaces(256, 32, 8, 0).gate.weight.detach()
    assert first.abs().max() <= 0.06 and first.std().item() == pytest.approx(0.0197, rel=0.03)


def test_float32_places_in_low_precision():
    module, x = spread(build(Repo(start=0))), text()
    low = module.bfloat16()
    assert low.places(x.bfloat16(), Context.of(*x.shape[:2])).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = spread(build(Repo(start=0))).places(x, Context.of(*x.shape[:2]))
    assert z.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------------- refused


def test_refused():
    with pytest.raises(Refused, match=r"a width of 20 has no eighth; expected d_p given, such as d_p=2"):
        Repo().build(20, 2, 2, 10, 1, 2)
    assert Repo(d_p=3).build(20, 2, 2, 10, 1, 2).learned.gate.weight.shape == (3, 20)
    with pytest.raises(Refused, match="head dimension 5 is odd; expected an even one"):
        Repo(d_p=3).build(20, 4, 4, 5, 1, 2)
    with pytest.raises(Refused, match=r"repo\(start=3\): the model has 2 layers; expected start from 0 to 2"):
        build(Repo(start=3), 0, 2)
    for wrong, sentence in (({"start": -1}, "start=-1"), ({"d_p": 0}, "d_p=0"), ({"rho": 1.5}, "rho=1.5"),
                            ({"encoding": "learned"}, "encoding='learned'")):
        with pytest.raises(Refused, match=sentence):
            Repo(**wrong)
    with pytest.raises(Refused, match="takes no rotate from a position scheme"):
        DecoderConfig(8, dim=16, mixer="linear-attention", position="repo")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_places_that_are_not_finite_name_their_layer(value):
    module, x = standing(build(Repo(start=0), layer=4, n_layers=6)), text(places=1.0)
    x[0, 3, 1] = value
    with pytest.raises(Refused, match="layer 4 gives a token the position"):
        module.places(x, Context.of(*x.shape[:2]))


def test_huge_places_are_warned_of():
    module = standing(build(Repo(start=0), layer=2, n_layers=6))
    with pytest.warns(UserWarning, match="layer 2 gives a token a position of size 2e"):
        module.places(text(places=-2e6), Context.of(2, TIME))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.places(text(places=9e5), Context.of(2, TIME))
