"""Exact verification: whatever is proposed, what is written follows the target's law."""

import itertools
import math

import pytest
import torch
from scipy.stats import chisquare

from longspan.decoding import Law, Noise, pick, verify
from longspan.decoding.verify import verify_greedy
from longspan.registry import Refused


def law(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=g, dtype=torch.float64).pow(2).add(1e-3).softmax(-1) if len(shape) == 1 else torch.stack(
        [law(seed * 101 + i, *shape[1:]) for i in range(shape[0])])


def rest(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum() if float(left.sum()) > 0 else p


def test_the_reject_rule_is_exact_by_enumeration():
    for seed in range(20):
        p, q = law(seed, 4) ** 2, law(seed + 100, 4)
        p = p / p.sum()
        accept = torch.minimum(torch.ones(4, dtype=torch.float64), p / q)
        alpha = (q * accept).sum()
        assert torch.allclose(q * accept + (1 - alpha) * rest(p, q), p, atol=1e-12)
        assert float(alpha) == pytest.approx(1 - float((p - q).abs().sum()) / 2, abs=1e-12)


@pytest.mark.parametrize("rule", ["match", "point-mass", "reject"])
def test_draws_follow_the_target(rule):
    p, q, n = torch.stack([law(1, 5), law(2, 5)]), law(3, 1, 5), 20_000
    seen = torch.zeros(5)
    g = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(q[0], n, replacement=True, generator=g).tolist()
    for i, x in enumerate(drafts):
        found = verify(p, [x], Noise((i,)), 7, rule=rule, q=q if rule == "reject" else None)
        seen[found.tokens[0]] += 1
        assert len(found.tokens) == found.accepted + 1
    assert chisquare(seen.numpy(), (p[0] * n).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("rule", ["point-mass", "reject"])
def test_two_tokens_follow_the_target(rule):
    """Both places of a chain, the second depending on the first, against the product of the laws."""
    first, second, q = law(11, 5), law(12, 5, 5), law(13, 2, 5)
    n, seen = 100_000 // 10, torch.zeros(5, 5)
    g = torch.Generator().manual_seed(1)
    drafts = torch.stack([torch.multinomial(q[i], n, replacement=True, generator=g) for i in range(2)], 1).tolist()
    for i, (x, y) in enumerate(drafts):
        p = torch.stack([first, second[x], second[y]])  # the last row is only drawn from if both stand
        found = verify(p, [x, y], Noise((i, "two")), 0, rule=rule, q=q if rule == "reject" else None).tokens
        if len(found) == 1:
            found = (*found, pick(second[found[0]], Noise((i, "two")), 1))
        seen[found[0], found[1]] += 1
    expected = (first[:, None] * second * n).flatten()
    assert chisquare(seen.flatten().numpy(), (expected * (seen.sum() / expected.sum())).numpy()).pvalue > 1e-3


def test_match_writes_what_plain_drawing_writes():
    p, noise = law(5, 4, 9), Noise((3, "x"))
    plain = [pick(p[k], noise, 20 + k) for k in range(4)]
    for proposed in itertools.product(range(9), repeat=3):
        found = verify(p, proposed, noise, 20)
        assert list(found.tokens) == plain[: found.accepted + 1]
    assert verify(p, plain[:3], noise, 20).accepted == 3


def test_gumbel_coupling_meets_its_bound():
    n, p, q = 4000, law(21, 8), law(22, 8)
    same = sum(pick(p, Noise((i,)), 0) == pick(q, Noise((i,)), 0) for i in range(n)) / n
    tv = float((p - q).abs().sum()) / 2
    assert same >= (1 - tv) / (1 + tv) - 3 * math.sqrt(0.25 / n)


def test_equal_laws_accept_everything():
    q = law(31, 3, 6)
    p = torch.cat([q, law(32, 1, 6)])
    for i in range(200):
        drawn = [pick(q[k], Noise((i, "draft")), k) for k in range(3)]
        assert verify(p, drawn, Noise((i,)), 0, rule="reject", q=q).accepted == 3


def test_nothing_proposed_draws_one_token():
    p = law(41, 1, 6)
    for rule in ("match", "point-mass"):
        assert verify(p, [], Noise((1,)), 4, rule=rule) == verify(p, [], Noise((1,)), 4)


def test_the_greedy_short_cut_is_what_the_rules_come_to():
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(4, 6, generator=g)
        best = logits.argmax(-1).tolist()
        for proposed in (best[:3], [*best[:2], (best[2] + 1) % 6], [(best[0] + 1) % 6, *best[1:3]]):
            p = Law().probabilities([], logits)
            assert verify_greedy(logits, proposed) == verify(p, proposed, Noise(), 0) == verify(
                p, proposed, Noise(), 0, rule="point-mass")


def test_greedy_laws_accept_the_likeliest_alone():
    p = Law().probabilities([], torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]))
    for rule in ("match", "point-mass"):
        assert verify(p, [1], Noise(), 0, rule=rule).tokens == (1, 0)
        assert verify(p, [2], Noise(), 0, rule=rule).tokens == (1,)


@pytest.mark.parametrize(("proposed", "options", "what"), [
    ([9], {}, "vocabulary of 5"),
    ([0, 1], {}, "3 rows|laws of 3"),
    ([0], {"rule": "reject"}, "needs q"),
    ([0], {"rule": "reject", "q": torch.full((1, 5), 0.3, dtype=torch.float64)}, "not normalised"),
    ([0], {"rule": "reject", "q": torch.tensor([[0.0, 1, 0, 0, 0]], dtype=torch.float64)}, "probability 0"),
    ([0], {"rule": "maybe"}, "expected one of"),
])
def test_what_does_not_fit_is_an_error(proposed, options, what):
    with pytest.raises(ValueError, match=what):
        verify(law(1, 2, 5), proposed, Noise(), 0, **options)


def test_a_law_keeps_what_it_is_asked_to():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    full = logits.double().softmax(-1)
    assert torch.allclose(Law(1.0).probabilities([], logits), full)
    assert torch.allclose(Law(2.0).probabilities([], logits), (logits.double() / 2).softmax(-1))
    assert Law(1.0, top_k=2).probabilities([], logits)[0, 2:].tolist() == [0, 0]
    kept = Law(1.0, top_p=0.7).probabilities([], logits)[0]
    assert kept[2:].tolist() == [0, 0] and float(kept.sum()) == pytest.approx(1)
    assert Law(1.0, top_p=0.6).probabilities([], logits)[0].tolist() == [1, 0, 0, 0]


def test_a_process_sees_the_drafted_tokens():
    seen = []
    Law(1.0, process=lambda ids, row: seen.append(tuple(ids)) or row).probabilities([1], torch.zeros(3, 4), [2, 3])
    assert seen == [(1,), (1, 2), (1, 2, 3)]


@pytest.mark.parametrize("knobs", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": -1}])
def test_bad_laws_are_refused(knobs):
    with pytest.raises(Refused, match="expected"):
        Law(**knobs)
