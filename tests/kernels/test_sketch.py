"""Count sketch and TensorSketch: their definition, what is unbiased, how far they scatter, and what they refuse."""

import itertools

import pytest
import torch

from longspan.kernels.sketch import TensorSketch, convolve, count_sketch
from longspan.registry import Refused


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_a_count_sketch_adds_signed_channels_into_buckets():
    have = count_sketch(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), torch.tensor([1.0, -1.0, -1.0]), 3)
    assert have.tolist() == [-2.0, -3.0, 0.0]


@pytest.mark.parametrize("width", [2, 5, 16])
def test_degree_one_is_a_count_sketch(width):
    sketch, x = TensorSketch((7,), width, seed=3), draw(4, 7)
    torch.testing.assert_close(sketch.power(x), count_sketch(x, *sketch.hashes(0), width))


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("dims", [(5, 5), (4, 3), (3, 4, 2)])
def test_convolution_is_the_count_sketch_of_the_explicit_product(dims, width):
    """Bucket (sum of buckets) mod D_s and the product of signs, entry by entry of the outer product."""
    sketch, factors = TensorSketch(dims, width, seed=1), [draw(d, seed=i) for i, d in enumerate(dims)]
    want = torch.zeros(width, dtype=torch.float64)
    for index in itertools.product(*map(range, dims)):
        bucket = sum(int(sketch.hashes(r)[0][i]) for r, i in enumerate(index)) % width
        sign, entry = 1.0, 1.0
        for r, i in enumerate(index):
            sign, entry = sign * float(sketch.hashes(r)[1][i]), entry * float(factors[r][i])
        want[bucket] += sign * entry
    torch.testing.assert_close(sketch(*factors), want)


def test_linear_in_the_tensor_power():
    """A sketch of a sum of products is the sum of their sketches: (x+y)⊗(x+y) = x⊗x + x⊗y + y⊗x + y⊗y."""
    sketch, x, y = TensorSketch((6, 6), 8), draw(6, seed=1), draw(6, seed=2)
    torch.testing.assert_close(sketch.power(x + y), sketch(x, x) + sketch(x, y) + sketch(y, x) + sketch(y, y))
    torch.testing.assert_close(sketch(2 * x, 3 * y), 6 * sketch(x, y))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_unbiased_with_bounded_variance(p):
    """Over 10,000 hashes: the mean is <x,y>^p within 4 standard errors, the variance at most (2 + 3^p)/D_s |x|^2p |y|^2p."""
    draws, d, width = 10_000, 6, 16
    x, y, dice = draw(d, seed=1), draw(d, seed=2) + draw(d, seed=1), torch.Generator().manual_seed(5)

    def sketches():
        for _ in range(p):
            buckets = torch.randint(width, (draws, d), generator=dice)
            signs = torch.randint(2, (draws, d), generator=dice) * 2.0 - 1.0
            yield [count_sketch(t.expand(draws, d), buckets, signs, width) for t in (x, y)]

    of_x, of_y = (convolve(parts) for parts in zip(*sketches()))
    found = (of_x * of_y).sum(-1)
    assert abs(found.mean() - (x @ y) ** p) <= 4 * found.std() / draws**0.5
    assert 0 < found.var() <= (2 + 3**p) / width * (x.norm() * y.norm()) ** (2 * p)


def test_hashes_come_from_the_seed_and_travel_with_the_weights():
    x = draw(9)
    assert torch.equal(TensorSketch((9, 9), 8, seed=2).power(x), TensorSketch((9, 9), 8, seed=2).power(x))
    other = TensorSketch((9, 9), 8, seed=3)
    assert not torch.equal(other.power(x), TensorSketch((9, 9), 8, seed=2).power(x))
    other.load_state_dict(TensorSketch((9, 9), 8, seed=2).state_dict())
    assert torch.equal(other.power(x), TensorSketch((9, 9), 8, seed=2).power(x))
    buckets, signs = other.hashes(1)
    assert int(buckets.min()) >= 0 and int(buckets.max()) < 8 and set(signs.tolist()) == {-1.0, 1.0}
    assert not torch.equal(other.hashes(0)[0], buckets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    sketch, x = TensorSketch((8, 8), 16), (100 * draw(8)).to(dtype)  # products beyond what float16 holds
    want = sketch.power(x.float())
    assert sketch.power(x).dtype == torch.float32 and torch.equal(sketch.power(x), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sketch.power(x), want)
    assert torch.equal(sketch.to(dtype).power(x), want)


def test_gradients():
    sketch, x, y = TensorSketch((4, 4, 4), 5), draw(2, 4).requires_grad_(), draw(2, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: sketch(a, b, a), (x, y))


def test_fewer_factors_sketch_the_smaller_product():
    sketch, x = TensorSketch((4, 4, 3), 8), draw(4)
    torch.testing.assert_close(sketch(x, x), convolve([sketch.factor(0, x), sketch.factor(1, x)]))


def test_refusals():
    with pytest.raises(Refused, match="D_s=1"):
        TensorSketch((4,), 1)
    with pytest.raises(Refused, match="at least degree 1"):
        TensorSketch((), 8)
    with pytest.raises(ValueError, match="takes 4 channels"):
        TensorSketch((4, 4), 8).power(draw(5))
    with pytest.raises(ValueError, match="1 to 2 factors"):
        TensorSketch((4, 4), 8)(draw(4), draw(4), draw(4))
