"""Context parallelism equals attention in one process, and costs what its model says."""

from __future__ import annotations

import context_parallel_cases as cases
import pytest
import torch

from longspan.parallel import Communicator, Shape, Weights
from longspan.parallel.ring import RingAttention
from longspan.parallel.ring_engine import causal_pairs
from longspan.parallel.ulysses import Ulysses
from longspan.parallel.upipe import UPipe
from longspan.parallel.usp import USP
from longspan.registry import Refused

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
groups = pytest.mark.parametrize("group", ["alone", "pair", pytest.param("four", marks=pytest.mark.slow)])


@pytest.fixture
def ranks(group, request):
    return request.getfixturevalue(group)


@groups
def test_outputs_and_all_gradients_equal_one_process(ranks):
    seen = 0
    for rank in ranks:
        for (method, kv_heads, dtype), found in rank["grid"].items():
            for name, error in found["errors"].items():
                assert error <= TOLERANCE[dtype], (method, kv_heads, dtype, name, error)
                seen += 1
    assert seen >= 2 * 6 * 5 * len(cases.KV_HEADS[len(ranks)]) * len(ranks)


@groups
def test_without_a_mask_and_without_positions(ranks):
    for rank in ranks:
        for method, found in rank["open"].items():
            assert max(found["errors"].values()) <= 1e-10, method


@groups
def test_one_stage_of_all_heads_is_ulysses_bit_for_bit(ranks):
    assert all(rank["bitwise"] == dict.fromkeys(cases.KV_HEADS[len(ranks)], True) for rank in ranks)


@groups
def test_the_exchange_is_undone_by_its_adjoint(ranks):
    for rank in ranks:
        moves = rank["moves"]
        assert moves["inverse"] is True and moves["shape"] == [2, 3 * len(ranks), 8 // len(ranks), 5]
        assert moves["sides"][0] == pytest.approx(moves["sides"][1], rel=1e-12) and abs(moves["sides"][0]) > 1e-3


@groups
def test_bytes_operations_and_elements_are_those_of_the_model(ranks):
    """Counted with one row in float32; the rank with the most."""
    size = len(ranks)
    for method in cases.methods(size):
        for kv_heads in cases.KV_HEADS[size]:
            shape = Shape(cases.S, cases.H, kv_heads, cases.D, cases.WIDTH, element_bytes=4)
            model = method.account(shape, size)
            counted = [rank["grid"][str(method), kv_heads, "float32"]["counted"] for rank in ranks]
            for name in counted[0].keys() - {"left"}:
                most, wanted = max(c[name] for c in counted), getattr(model, name)
                assert most == wanted, (method, kv_heads, name, most, wanted)
            assert all(c["left"] == 0 for c in counted), (method, kv_heads)


@pytest.mark.parametrize("ranks_, kv_heads", [(2, 16), (2, 4), (2, 2), (2, 1), (4, 16), (4, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize("stage", [4, 8, 16])
def test_upipe_sends_what_ulysses_sends_in_the_spec_s_number_of_operations(ranks_, kv_heads, stage):
    if stage % ranks_:
        return
    shape = Shape(64, 16, kv_heads, 8, 32)
    ours, plain = UPipe(U=stage).account(shape, ranks_), Ulysses(recompute=True).account(shape, ranks_)
    assert ours.forward_bytes == plain.forward_bytes and ours.bytes == plain.bytes
    s, d, he = 64 // ranks_, 8, max(kv_heads, ranks_)
    assert ours.forward_bytes == 4 * (2 * s * d * 16 + 2 * s * d * he) * (ranks_ - 1) // ranks_
    nu, g, u = 16 // stage, 16 // he, stage // ranks_
    if u <= g:
        assert ours.forward_operations == 2 * nu + 2 * nu // (g // u)
    keys = ranks_ if u <= g else stage // g
    assert ours.forward_elements == 2 * s * d * (stage + 2 * keys) + 2 * s * d * stage
    assert ours.forward_with_output == ours.forward_elements + s * d * 16
    assert plain.forward_elements == plain.forward_with_output == 2 * s * d * (16 + 2 * he) + 2 * s * d * 16


def test_exchange_buffers_depend_on_the_stage_and_not_on_the_heads():
    few, many = (UPipe(U=8).account(Shape(64, h, h, 8, 32), 8) for h in (16, 64))
    assert few.forward_elements == many.forward_elements
    plain = Ulysses().account(Shape(64, 64, 64, 8, 32), 8)
    assert many.forward_elements / plain.forward_elements == 8 / 64  # the 87.5% of the paper


def test_a_ring_sends_its_keys_and_values_to_all_others():
    for ranks in (2, 4):
        found = RingAttention().account(Shape(64, 16, 4, 8, 32), ranks)
        assert found.forward_bytes == 4 * 2 * (64 // ranks) * 8 * 4 * (ranks - 1)
        assert found.forward_operations == ranks - 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zig_zag_gives_every_rank_the_same_number_of_pairs(ranks):
    length = 6 * ranks
    places = RingAttention().places(length, ranks)
    assert torch.cat(places).sort().values.tolist() == list(range(length))
    assert {causal_pairs(place) for place in places} == {length * (length + 1) // 2 // ranks}
    uneven = [causal_pairs(place) for place in RingAttention(order="contiguous").places(length, ranks)]
    assert len(set(uneven)) == ranks


@groups
def test_what_is_odd_but_allowed(ranks):
    for rank in ranks:
        assert max(rank["short"].values()) <= 1e-10
        assert max(rank["documents"].values()) <= 1e-10
        assert all(rank["nan"].values()), "NaN passes through"
        for error, y_dtype, dw_dtype in rank["half"].values():
            assert error < 0.02 and y_dtype == dw_dtype == "torch.bfloat16"


@pytest.mark.parametrize("group", ["pair", pytest.param("four", marks=pytest.mark.slow)])
def test_ranks_that_disagree_are_told_so_and_can_go_on(ranks):
    for rank in ranks:
        said = rank["disagreement"]
        assert "dtype: torch.float64, torch.float32" in said["dtype"]
        pieces = [cases.S // len(ranks) + 4, *[cases.S // len(ranks)] * (len(ranks) - 1)]
        assert f"length of their piece: {', '.join(map(str, pieces))};" in said["length"]
        assert "documents" in said["documents"]
        assert rank["after"] <= 1e-10


@pytest.mark.parametrize("group", ["pair"])
def test_a_rank_that_does_not_answer_is_given_up(ranks):
    said, waited = ranks[0]["stuck"]
    assert said == "rank 0 of 2: all-to-all of queries: no answer within 0.4 s."
    assert 0.3 < waited < 1.1


@pytest.mark.parametrize("method", [Ulysses(), UPipe(), UPipe(U=4), RingAttention(), USP(ring=1)], ids=str)
def test_gradients_are_those_of_finite_differences(method):
    comm = Communicator()
    x, weights, dy = cases.problem(2, torch.float64, heads=4, length=6)
    own = x.clone().requires_grad_()
    method.attention(own, weights, comm).backward(dy)
    step = 1e-6
    for place in [(0, 0, 0), (0, 2, 5), (0, 5, 23)]:
        up, down = x.clone(), x.clone()
        up[place] += step
        down[place] -= step
        slope = (cases.total(method, comm, up, weights, dy) - cases.total(method, comm, down, weights, dy)) / (2 * step)
        assert own.grad[place].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("method, tensors", [(UPipe(U=4), ("x", "weights", "out", "lse")),
                                             (Ulysses(recompute=True), ("x", "weights", "out", "lse")),
                                             (Ulysses(), ("x", "weights", "out", "lse", "qkvo"))], ids=str)
def test_backward_keeps_what_the_model_says_and_never_the_queries(method, tensors):
    x, weights, _ = cases.problem(4, torch.float32)
    weights = weights.map(torch.Tensor.requires_grad_)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        method.attention(x, weights, Communicator())
    shape = Shape(cases.S, cases.H, 4, cases.D, cases.WIDTH)
    model = method.account(shape, 1).saved_elements
    assert sum(kept) == model + sum(w.numel() for w in weights.tensors())
    assert ("qkvo" in tensors) == (model > cases.S * (cases.WIDTH + cases.H + cases.H * cases.D))


# ------------------------------------------------------------------------------------------------------------- refusals


def call(method=None, **changes):
    x, weights, _ = cases.problem(4, torch.float32)
    settings = {"x": x, "weights": weights, "comm": Communicator()} | changes
    return (method or UPipe()).attention(settings.pop("x"), settings.pop("weights"), settings.pop("comm"), **settings)


def test_input_that_cannot_be_served_is_refused():
    x, weights, _ = cases.problem(4, torch.float32)
    with pytest.raises(Refused, match="isn't contiguous"):
        call(x=x.transpose(0, 1).contiguous().transpose(0, 1)[:, ::2])
    with pytest.raises(Refused, match=r"dropout=0\.1"):
        call(dropout=0.1)
    with pytest.raises(Refused, match=r"torch\.float32, torch\.float64"):
        call(x=x.double())
    with pytest.raises(Refused, match=r"documents=\(8, 4, 32\)"):
        call(documents=(8, 4, 32))
    with pytest.raises(Refused, match=r"documents=\(8, 31\).*S=32"):
        call(documents=(8, 31))
    with pytest.raises(ValueError, match=r"expects x \(B, s, 24\)"):
        call(x=x[..., :20].contiguous())
    with pytest.raises(ValueError, match="weights expect"):
        Weights(weights.q, weights.k, weights.v[:4], weights.o, cases.D)
    with pytest.raises(Refused, match="U=32 query heads a stage are more than H=16"):
        call(UPipe(U=32))


def test_lengths_that_do_not_divide_are_refused():
    x = torch.zeros(1, 33, 3)
    pair = Communicator(0, 2)
    with pytest.raises(Refused, match=r"S=33 positions don't divide over P=2 ranks.*S=34"):
        UPipe().shard(x, pair)
    with pytest.raises(Refused, match=r"S=34 positions don't divide into 4 pieces.*S=36"):
        RingAttention().places(34, 2)
    with pytest.raises(Refused, match=r"ring=3.*P=4"):
        USP(ring=3).places(24, 4)
    with pytest.raises(Refused, match="exchanges heads"):
        USP(inner=RingAttention())


def test_a_ring_refuses_documents():
    x, weights, _ = cases.problem(4, torch.float32)
    with pytest.raises(Refused, match=r"documents=\(4, 32\)"):
        RingAttention().engine(Communicator(0, 2), True, (4, 32))
    assert RingAttention().attention(x, weights, Communicator(), documents=(4, 32)).shape == x.shape
