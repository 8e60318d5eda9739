"""Self-distillation under perturbed indices, and its baselines, against their formulas."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny, tiny_ids

from longspan.layers.positions.alibi import Alibi
from longspan.layers.positions.none import NoPositions
from longspan.layers.positions.rope import Rope
from longspan.models.decoder import Decoder, DecoderConfig
from longspan.registry import Refused
from longspan.training import IGNORE, Batch, Diverged, TrainConfig, Trainer, train
from longspan.training.divergence import reverse_kl
from longspan.training.index_perturbations import perturbed, skip
from longspan.training.l2a import L2ANextToken
from longspan.training.longce import LongCE
from longspan.training.next_token import NextToken
from longspan.training.pose import Pose
from longspan.training.retrofits import Tuned
from longspan.training.retrofits.l2a import L2ARetrofit
from longspan.training.self_distillation import SelfDistillation

TIME, VOCAB, ROPE = 12, 20, Rope()


def decoder(dtype=torch.float64, position=ROPE, dropout=0.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(VOCAB, dim=16, n_heads=2, position=position, dropout=dropout)).to(dtype)
        for layer in model.stack.layers:  # attention far from uniform
            layer.mixer.q_proj.weight.data.mul_(4.0)
    return model


def batch(rows=2, time=TIME, index=0, seed=1):
    ids = torch.randint(0, VOCAB, (rows, time + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1].clone(), ids[:, 1:].clone(), index=index)


def grads(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def plain_kl(a, b):
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


# --------------------------------------------------------------------------------------------------------------- views


def test_no_gap_and_a_gap_before_everything_change_nothing():
    model, given, places = decoder(torch.float32), batch(), torch.arange(TIME).expand(2, -1)
    standard = model(given.ids).logits.flatten(0, 1).detach()
    for split, gap in ((3, 0), (0, 9)):
        moved = model(given.ids, positions=skip(places, torch.tensor(split), torch.tensor(gap))).logits.flatten(0, 1)
        losses = reverse_kl(moved, standard)
        assert (losses < 1e-5).all()
        assert grads(model, losses.mean()).abs().max() < 1e-5
    real = reverse_kl(model(given.ids, positions=skip(places, torch.tensor(6), torch.tensor(9))).logits.flatten(0, 1), standard)
    assert real.view(2, -1)[:, :6].unique().tolist() == [0.0] and (real.view(2, -1)[:, 6:] > 1e-4).all()


def test_a_common_shift_changes_nothing():
    given, places = batch(), torch.arange(TIME).expand(2, -1)
    model = decoder(torch.float32)
    torch.testing.assert_close(model(given.ids, positions=places + 1000).logits, model(given.ids).logits, atol=1e-4, rtol=0)
    far = torch.arange(TIME)[None] + TIME * (torch.arange(TIME) >= 6)  # as far as 2L - 1
    assert model(given.ids[:1], positions=far).logits.isfinite().all()


# ------------------------------------------------------------------------------------------------------- the objective


def test_the_loss_and_its_gradient_are_the_formulas():
    """L_CLM plus lam times the mean over moved, labelled positions; the teacher is a stored constant."""
    model, given = decoder(), batch(3)
    given.labels[:, ::3] = IGNORE
    given.labels[2] = IGNORE  # a row that asks nothing weighs nothing
    objective = SelfDistillation(lam=0.7, chunk=3)
    got, clm = objective(model, given), NextToken()(model, given)
    view = perturbed("skip", given)
    counted = view.moved & (given.labels != IGNORE)
    stored = model(given.ids).logits.detach().clone()

    def mean(teacher):
        losses = plain_kl(model(given.ids, positions=view.positions).logits, teacher)
        return torch.stack([losses[b][counted[b]].mean() for b in range(2)]).mean()

    want = clm.loss + 0.7 * mean(stored)
    torch.testing.assert_close(got.loss, want)
    assert got.weight == clm.weight and got.metrics["kl"] == pytest.approx(mean(stored).item())
    assert got.metrics["nll"] == clm.metrics["nll"]
    found = grads(model, got.loss)
    torch.testing.assert_close(found, grads(model, want), atol=1e-9, rtol=1e-6)
    moving = NextToken()(model, given).loss + 0.7 * mean(model(given.ids).logits)
    assert (found - grads(model, moving)).abs().max() > 1e-4


def test_a_batch_cut_into_rows_has_the_same_loss():
    """Each draw weighs as much as it has labels, which is how the loop averages micro-batches."""
    model, given = decoder(), batch(2)
    given.labels[0, :7] = IGNORE
    view = perturbed("skip", given)
    whole = SelfDistillation()(model, given).metrics["kl"]
    losses = plain_kl(model(given.ids, positions=view.positions).logits, model(given.ids).logits)
    asked = given.labels != IGNORE
    rows = [losses[b][view.moved[b] & asked[b]].mean().item() * int(asked[b].sum()) for b in range(2)]
    assert whole == pytest.approx(sum(rows) / int(asked.sum()))


@pytest.mark.parametrize("kind", ["skip", "cyclic", "nope"])
def test_every_perturbation_trains(kind):
    model, given = decoder(torch.float32), batch(4)
    objective = SelfDistillation(perturb=kind, lam=5.0)
    history = train(model, lambda index: given, TrainConfig(steps=25, lr=5e-3, log_every=1), objective).history
    assert history[0]["kl"] > 0.01 and history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["loss"] == pytest.approx(history[-1]["nll"] + 5.0 * history[-1]["kl"], rel=1e-5)


def test_without_weight_it_is_next_token_training_bit_for_bit():
    config = TrainConfig(steps=4, lr=1e-2, log_every=1)
    models = [decoder(torch.float32, dropout=0.2) for _ in range(4)]
    objectives = (NextToken(), *(SelfDistillation(lam=lam) for lam in (0.0, 1e-30, 1.0)))
    for model, objective in zip(models, objectives):
        train(model, lambda index: batch(), config, objective)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])  # the second pass rolls no dice of the first's
    assert not torch.equal(weights[0], weights[3])


def test_both_views_have_the_same_dropout():
    model, given = decoder(dropout=0.5).train(), batch()
    torch.manual_seed(3)
    got = SelfDistillation()(model, given)
    torch.manual_seed(3)
    standard = model(given.ids).logits
    torch.manual_seed(3)
    view = perturbed("skip", given)
    moved = model(given.ids, positions=view.positions).logits
    want = torch.stack([plain_kl(moved[b], standard[b])[view.moved[b]].mean() for b in range(2)]).mean()
    assert got.metrics["kl"] == pytest.approx(want.item())


def test_padding_changes_nothing():
    model, given = decoder(), batch()
    pad = torch.zeros(2, 3, dtype=torch.long)
    padded = Batch(torch.cat((pad, given.ids, pad), 1), torch.cat((pad + IGNORE, given.labels, pad + IGNORE), 1),
                   valid=torch.cat((pad.bool(), torch.ones_like(given.ids).bool(), pad.bool()), 1))
    for objective in (SelfDistillation(), SelfDistillation(perturb="cyclic"), Pose()):
        assert objective(model, padded).metrics == pytest.approx(objective(model, given).metrics)


def test_packed_documents_are_their_own():
    """The divergence of a packed row is that of its documents, read alone at the indices drawn."""
    model, given = decoder(), batch(1)
    packed = dataclasses.replace(given, segments=torch.tensor([[0] * 5 + [1] * 7]))
    view, total = perturbed("skip", packed), 0.0
    for where in (slice(0, 5), slice(5, 12)):
        alone = model(given.ids[:, where]).logits
        moved = model(given.ids[:, where], positions=view.positions[:, where]).logits
        total += plain_kl(moved, alone)[view.moved[:, where]].mean().item() * alone.shape[1] / TIME
    assert SelfDistillation()(model, packed).metrics["kl"] == pytest.approx(total)


def test_nothing_labelled_weighs_nothing():
    given = dataclasses.replace(batch(), labels=torch.full((2, TIME), IGNORE))
    got = SelfDistillation()(decoder(), given)
    assert got.weight == 0 and got.loss.item() == 0.0 and got.loss.requires_grad


def test_refused_knobs_models_and_pieces():
    for knobs, match in (({"lam": -0.1}, r"lam=-0.1"), ({"Y": 0}, r"Y=0"), ({"perturb": "shuffle"}, "perturb='shuffle'"),
                         ({"clm": 3}, "expected a objective")):
        with pytest.raises(Refused, match=match):
            SelfDistillation(**knobs)
    for position in (NoPositions(), Alibi()):
        for objective in (SelfDistillation(), Pose()):
            with pytest.raises(Refused, match=f"positions are {position}, which rotate nothing"):
                objective(decoder(position=position), batch())
    with pytest.raises(Refused, match="doesn't read the batch as it stands"):
        SelfDistillation(clm=Pose())(decoder(), batch())
    for objective in (SelfDistillation(), Pose()):
        with pytest.raises(Refused, match="whole sequences; expected segments=1"):
            Trainer(decoder(), lambda index: batch(), TrainConfig(steps=1, segments=2), objective).run()


def test_nan_logits_stop():
    model = decoder()
    model.norm.weight.data[0] = math.nan
    with pytest.raises(Diverged, match="NaN"):
        SelfDistillation()(model, batch())


@pytest.mark.parametrize("time", [0, 1])
def test_rows_without_two_tokens_are_refused(time):
    with pytest.raises(Refused, match=f"rows of {time} token"):
        SelfDistillation()(decoder(), batch(time=time))


def test_a_retrofit_with_modules_of_its_own():
    """L2A's local and gated attention turn by the indices given; its price and the divergence add up."""
    model, ids = L2ARetrofit(window=4).convert(tiny("llama")), tiny_ids(2, TIME)
    model.model.layers[0].self_attn.mixer.router.weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    tuned, places = Tuned(model), torch.arange(TIME).expand(2, -1)
    torch.testing.assert_close(tuned(ids, positions=places + 50).logits, tuned(ids).logits, atol=1e-3, rtol=0)
    given, price = Batch(ids[:, :-1], ids[:, 1:]), L2ANextToken(warmup=0.0)
    both, priced = SelfDistillation(clm=price)(tuned, given), price(tuned, given)
    assert both.metrics["kl"] > 1e-3 and both.metrics["skip"] == priced.metrics["skip"]
    assert both.loss.item() == pytest.approx(priced.loss.item() + both.metrics["kl"], rel=1e-5)


def test_transformers_models_that_do_not_fit():
    import transformers

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    ids = tiny_ids(1, TIME)
    for name, more in (("GPT2", {}), ("GPTJ", {"rotary_dim": 4})):
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
        with pytest.raises(Refused, match=f"{type(model).__name__} has no rotary embedding that computes its angles"):
            SelfDistillation()(Tuned(model), Batch(ids, ids))


# ------------------------------------------------------------------------------------------------------- the baselines


def test_pose_is_next_token_on_moved_indices():
    model, given = decoder(), batch()
    logits = model(given.ids, positions=perturbed("skip", given, most=4, seed=2).positions).logits
    got = Pose(Y=4, seed=2)(model, given)
    torch.testing.assert_close(got.loss, F.cross_entropy(logits.flatten(0, 1), given.labels.flatten()))
    assert got.loss.item() != NextToken()(model, given).loss.item()


def test_longce_weighs_by_what_the_long_context_adds():
    """Token 5 of windows of 4 is compared with tokens 2 to 5, and so on; the first four tokens have weight 1."""
    model, given, K, gamma = decoder(), batch(2, 11), 2, 1.1
    given.labels[1, 6] = IGNORE
    long = F.log_softmax(model(given.ids).logits, -1).gather(-1, given.labels.clamp(min=0)[..., None])[..., 0]
    weights = torch.ones(2, 11, dtype=torch.float64)
    for t in range(2 * K, 11):
        start = (t // K - 1) * K
        short = F.log_softmax(model(given.ids[:, start : t + 1]).logits[:, -1], -1)
        ratio = long[:, t] - short.gather(-1, given.labels[:, t : t + 1].clamp(min=0))[:, 0]
        weights[:, t] = ratio.exp().clamp(max=gamma)
    asked = given.labels != IGNORE
    assert (weights[asked] == gamma).any() and (weights < 0.99).any()
    got = LongCE(K=K, gamma=gamma)(model, given)
    want = -(weights.detach() * long)[asked].sum() / asked.sum()
    torch.testing.assert_close(got.loss, want, atol=1e-6, rtol=1e-6)  # short likelihoods are float32
    torch.testing.assert_close(grads(model, got.loss), grads(model, want), atol=1e-6, rtol=1e-5)
    assert got.metrics["weight"] == pytest.approx(weights[asked].mean().item(), abs=1e-6)
    both = SelfDistillation(clm=LongCE(K=K, gamma=gamma))(model, given)
    kl = SelfDistillation()(model, given).metrics["kl"]
    assert both.metrics["kl"] == pytest.approx(kl) and both.loss.item() == pytest.approx(got.loss.item() + kl)
    with pytest.raises(Refused, match=r"longce\(K=6\): rows of 11 tokens hold no context longer than 2K"):
        LongCE(K=6)(model, given)
    with pytest.raises(Refused, match="segments=1"):
        LongCE(K=2)(model, given, state=1)
