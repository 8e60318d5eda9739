"""ContextLM: chunks, their predictions, causality, and one result however a stream is cut, padded or packed."""

import itertools
import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from longspan.layers import MixerState, choose, to_json
from longspan.layers.attention.softmax import Softmax
from longspan.layers.memory.linear import LinearAttention
from longspan.layers.sidepaths.short_conv import ShortConv
from longspan.layers.stacks.context_lm import COSINE, ContextLM
from longspan.models.decoder import Decoder, DecoderConfig, count_parameters
from longspan.registry import Refused
from longspan.training import IGNORE, Batch, TrainConfig, train

VOCAB, TIME = 19, 13
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
MIXERS = {"softmax": Softmax(), "window": Softmax(window=4), "linear": LinearAttention()}
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)


def make(seed=0, dtype=torch.float32, loud=True, **parts):
    """A small decoder; `loud` gives predictions the size of the tokens' states, so that a wrong one shows."""
    torch.manual_seed(seed)
    stack = parts.pop("stack", None) or ContextLM(**{k: parts.pop(k) for k in list(parts) if k in KNOBS})
    shape = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2} | parts
    model = Decoder(DecoderConfig(shape.pop("vocab", VOCAB), stack=stack, **shape)).to(dtype).eval()
    if loud and hasattr(model.stack, "predictor"):
        with torch.no_grad():
            model.stack.predictor.proj.weight.mul_(10)
            model.stack.predictor.start.mul_(50)
    return model


KNOBS = ("w", "a", "predictor", "lead", "fuse", "normalise")


def ids(batch=3, time=TIME, seed=1):
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@dataclass(eq=False)
class Count(MixerState):
    seen: torch.Tensor


class Noting(nn.Module):
    """A fusion that notes what it joins."""

    def __init__(self, fusion):
        super().__init__()
        self.fusion, self.h, self.chat = fusion, [], []

    def forward(self, h, chat):
        self.h.append(h.detach())
        self.chat.append(chat.detach())
        return self.fusion(h, chat)


class Silent(nn.Module):
    """The sum with a prediction of 0."""

    def forward(self, h, chat):
        return h + torch.zeros_like(chat)


class Skip(nn.Module):
    """A layer that does nothing."""

    def forward(self, x, ctx, state=None):
        return x, state


def noting(model):
    model.stack.fusion = Noting(model.stack.fusion)
    return model.stack.fusion


def cut(model, text, cuts, state=None, **tensors):
    """Logits and state after reading `text` in pieces."""
    out, a = [], 0
    for n in cuts:
        piece = {name: t[:, a : a + n] for name, t in tensors.items()}
        got = model(text[:, a : a + n], state=state, **piece)
        out.append(got.logits)
        state, a = got.state, a + n
    return torch.cat(out, 1), state


# ----------------------------------------------------------------------------------------------------------- causality


def influence(model, time):
    """(T,T): how much the logits at t depend on the embedding at s, in float64."""
    torch.manual_seed(3)
    x = torch.randn(1, time, 16, dtype=torch.float64)
    mix = torch.randn(model.config.vocab_size, dtype=torch.float64)
    grads = torch.autograd.functional.jacobian(lambda e: model(embeds=e).logits[0] @ mix, x)
    return grads[:, 0].abs().sum(-1)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("w", [2, 3, 4])
def test_nothing_depends_on_what_comes_later(w, lead):
    found = influence(make(dtype=torch.float64, w=w, lead=lead), 9)
    assert not found.triu(1).any()
    assert (found.tril() > 1e-9).sum() == 45  # and on everything before, itself included


@pytest.mark.parametrize(("w", "time"), [(2, 8), (3, 10), (4, 10)])
def test_a_lead_of_two_would_look_ahead(w, time):
    model = make(dtype=torch.float64, w=w)
    model.stack.lead = 2
    ahead = influence(model, time).triu(1).sum(1) > 1e-9
    # Where a whole chunk is there to be seen too early: the chunk after the last whole one doesn't exist.
    assert ahead.nonzero()[:, 0].tolist() == [t for t in range(time - 1) if t % w == w - 2]


@pytest.mark.parametrize("lead", [0, 1])
def test_probabilities_of_all_texts_add_up_to_one(lead):
    model = make(dtype=torch.float64, w=2, lead=lead, vocab=3)
    texts = torch.tensor(list(itertools.product(range(3), repeat=5)))
    chosen = model(texts).logits[:, :-1].log_softmax(-1).gather(-1, texts[:, 1:, None])[..., 0].sum(1).exp()
    for first in range(3):
        torch.testing.assert_close(chosen[texts[:, 0] == first].sum().item(), 1.0, atol=1e-9, rtol=0)


# ----------------------------------------------------------------------------------------------------- the coarse stream


@pytest.mark.parametrize("a", [None, 1, 3])
def test_without_predictions_it_is_the_plain_backbone(a):
    plain, model = (make(seed=4, n_layers=4, stack=stack) for stack in ("plain", ContextLM(a=a)))
    backbone = {name: t for name, t in plain.state_dict().items() if name.startswith("stack")}
    own = model.state_dict()
    assert all(torch.equal(own[name], t) for name, t in backbone.items())  # a seed gives both the same layers
    with_predictions = model.load_state_dict(plain.state_dict(), strict=False)
    assert not with_predictions.unexpected_keys
    text = ids()
    assert not torch.equal(model(text).logits, plain(text).logits)
    model.stack.fusion = Silent()
    assert torch.equal(model(text).logits, plain(text).logits)


def test_what_a_token_gets_written_out():
    """Every prediction equals P on the start and the means of all earlier chunks, read afresh."""
    for w, lead in itertools.product((1, 2, 3, 4), (0, 1)):
        model = make(w=w, lead=lead)
        seen, stack = noting(model), model.stack
        model(ids())
        h, chat = seen.h[0], seen.chat[0]
        for t in range(TIME):
            kappa = (t + lead) // w
            means = [h[:, k * w : (k + 1) * w].mean(1) for k in range(kappa)]
            entries = torch.stack([stack.predictor.start.expand(3, -1), *means], 1)
            assert kappa * w <= t + 1
            torch.testing.assert_close(chat[:, t], stack.predictor(entries, None, None)[0][:, -1], **CLOSE)


@pytest.mark.parametrize(("w", "lead"), [(2, 1), (3, 0), (4, 1), (4, 0), (1, 1), (1, 0)])
def test_each_prediction_serves_w_tokens(w, lead):
    model = make(w=w, lead=lead)
    seen = noting(model)
    model(ids(1, 12))
    runs = [len(list(group)) for _, group in itertools.groupby(map(tuple, seen.chat[0][0].tolist()))]
    want = {0: [w] * (12 // w), 1: [w - 1] * (w > 1) + [w] * (12 // w - 1) + [1]}[lead]
    assert runs == want


def test_short_texts():
    """Before the first chunk is whole only the start has been read; its last token is the first to see chunk 0."""
    model = make(w=4)
    seen, start = noting(model), model.stack.predictor
    alone = start(start.start.expand(1, 1, -1), None, None)[0][0, 0]
    for time in (1, 2, 3, 4):
        model(ids(1, time))
        torch.testing.assert_close(seen.chat[-1][0, : min(time, 3)], alone.expand(min(time, 3), -1), **CLOSE)
    assert (seen.chat[-1][0, 3] - alone).abs().max() > 1e-3


def test_chunks_of_one_token_are_a_deeper_model():
    model = make(w=1, predictor=3)
    text, stack = ids(), model.stack
    ctx = model(text).ctx
    h = stack.layers[0](model.embed(text), ctx)[0]
    chats = stack.predictor(torch.cat((stack.predictor.start.expand(3, 1, -1), h), 1), None, None)[0]
    y = stack.layers[1](h + chats[:, 1:], ctx)[0]
    torch.testing.assert_close(model(text).logits, model.logits(model.norm(y)), **CLOSE)


def test_order_inside_a_chunk_is_lost_in_its_mean():
    model = make(w=4, dtype=torch.float64)
    model.stack.layers[0] = Skip()
    seen, x = noting(model), torch.randn(1, 12, 16, dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1, *range(4, 12)])
    model(embeds=x)
    model(embeds=x[:, order])
    torch.testing.assert_close(seen.chat[0], seen.chat[1], atol=1e-12, rtol=0)
    model(embeds=x[:, torch.tensor([4, 1, 2, 3, 0, *range(5, 12)])])
    assert (seen.chat[0] - seen.chat[2])[:, 4:].abs().max() > 1e-3


def test_the_agreement_of_predictions_and_chunks_is_reported():
    model = make(w=4)
    seen, text = noting(model), ids()
    (found,) = model(text).ctx.auxiliary[COSINE]
    means = seen.h[0][:, :12].unflatten(1, (3, 4)).mean(2)
    want = torch.cosine_similarity(seen.chat[0][:, [0, 4, 8]], means, dim=-1).mean()
    torch.testing.assert_close(found, want)
    (padded,) = model(text, valid=torch.ones_like(text, dtype=torch.bool)).ctx.auxiliary[COSINE]
    torch.testing.assert_close(padded, want)
    assert COSINE not in model(text[:, :3]).ctx.auxiliary


def test_layers_of_the_predictor_report_single_terms_only_and_know_their_length():
    class Reporting(nn.Module):
        def forward(self, x, ctx, state=None):
            ctx.report("term", x.sum() * 0 + ctx.length)
            ctx.report("for each entry", x[..., 0])
            return x, Count(torch.zeros(len(x)))

    model = make(w=4)
    model.stack.predictor.layers[0] = Reporting()
    for tensors in ({}, {"valid": torch.ones(3, TIME, dtype=torch.bool)}):
        found = model(ids(), length=TIME, **tensors).ctx.auxiliary
        assert [t.item() for t in found["term"]] == [4.0] and "for each entry" not in found


# ---------------------------------------------------------------------------------------------------- one model, any cut


@every_mixer
@pytest.mark.parametrize("lead", [0, 1])
def test_reading_at_once_is_reading_one_by_one(mixer, lead):
    model, text = make(mixer=mixer, lead=lead, side_path=ShortConv()), ids()
    one_by_one, _ = cut(model, text, [1] * TIME)
    for length in range(1, TIME + 1):
        got = model(text[:, :length])
        torch.testing.assert_close(got.logits, one_by_one[:, :length], **CLOSE)
        if length < TIME:
            more = cut(model, text[:, length:], [1] * (TIME - length), got.state)[0]
            torch.testing.assert_close(more, one_by_one[:, length:], **CLOSE)


OPTIONS = [{"w": 3}, {"w": 4, "fuse": "concat"}, {"w": 1}, {"w": 2, "normalise": True, "lead": 0}]


@pytest.mark.parametrize("knobs", OPTIONS, ids=str)
def test_every_option_can_be_cut_anywhere(knobs):
    model, text = make(**knobs), ids()
    whole = model(text).logits
    for cuts in ([5, 1, 7], [2, 2, 9], [12, 1]):
        torch.testing.assert_close(cut(model, text, cuts)[0], whole, **CLOSE)
        everything = torch.ones_like(text, dtype=torch.bool)  # says nothing new, but takes the way for padding
        torch.testing.assert_close(cut(model, text, cuts, valid=everything)[0], whole, **CLOSE)


def test_gradients_do_not_depend_on_cuts():
    model = make(w=3)
    x, weights = torch.randn(2, TIME, 16), torch.randn(2, TIME, VOCAB)
    x.requires_grad_()
    wanted = [x, *model.parameters()]

    def gradients(cuts, **tensors):
        out, state, a = [], None, 0
        for n in cuts:
            got = model(embeds=x[:, a : a + n], state=state, **{k: t[:, a : a + n] for k, t in tensors.items()})
            out.append(got.logits)
            state, a = got.state, a + n
        return torch.autograd.grad((torch.cat(out, 1) * weights).sum(), wanted)

    whole = gradients([TIME])
    for found in (gradients([4, 1, 8]), gradients([TIME], valid=torch.ones(2, TIME, dtype=torch.bool))):
        for have, want in zip(found, whole):
            torch.testing.assert_close(have, want, atol=2e-4, rtol=1e-3)


@every_mixer
@pytest.mark.parametrize("lead", [0, 1])
def test_padding_is_as_if_it_were_not_there(mixer, lead):
    model, text, valid = make(mixer=mixer, w=3, lead=lead), ids(5), torch.ones(5, TIME, dtype=torch.bool)
    valid[0, :4] = False  # left: rows stand at different places of their chunks
    valid[1, 5:9] = False
    valid[2, -3:] = False
    valid[3] = False
    for cuts in ([TIME], [1] * TIME, [2, 5, 6]):
        got, _ = cut(model, text, cuts, valid=valid)
        assert got.isfinite().all()
        for row in range(5):
            if row != 3:
                alone = model(text[row : row + 1, valid[row]]).logits[0]
                torch.testing.assert_close(got[row, valid[row]], alone, **CLOSE)


def test_padding_may_hold_anything():
    model, valid = make(w=3), torch.ones(2, TIME, dtype=torch.bool)
    x = torch.randn(2, TIME, 16)
    valid[0, :2] = valid[1, 6:8] = False
    want = model(embeds=x, valid=valid).logits[valid]
    loud = x.masked_fill(~valid[..., None], 1e3)
    torch.testing.assert_close(model(embeds=loud, valid=valid).logits[valid], want, **CLOSE)


@every_mixer
def test_documents_of_a_row_start_anew(mixer):
    model, text = make(mixer=mixer, w=3), ids(2)
    segments = torch.tensor([[3] * 4 + [1] * 7 + [3] * 2, [0] * 6 + [8] * 7])
    for cuts in ([TIME], [1] * TIME, [3, 5, 5]):
        got, _ = cut(model, text, cuts, segments=segments)
        for row, edges in enumerate(([0, 4, 11, 13], [0, 6, 13])):
            for a, b in itertools.pairwise(edges):
                torch.testing.assert_close(got[row, a:b], model(text[row : row + 1, a:b]).logits[0], **CLOSE)


def test_documents_with_padding_between_and_ids_that_come_late():
    model, text, valid = make(w=3), ids(1), torch.ones(1, TIME, dtype=torch.bool)
    valid[0, 3:6] = False
    segments = torch.tensor([[0] * 5 + [1] * 8])
    for cuts in ([TIME], [1] * TIME, [4, 9]):
        got, _ = cut(model, text, cuts, valid=valid, segments=segments)
        torch.testing.assert_close(got[:, :3], model(text[:, :3]).logits, **CLOSE)
        torch.testing.assert_close(got[:, 6:], model(text[:, 6:]).logits, **CLOSE)
    first = model(text[:, :5])  # one document so far; ids come with the second one
    late = model(text[:, 5:], segments=torch.tensor([[0] * 2 + [1] * 6]), state=first.state).logits
    torch.testing.assert_close(late[:, :2], model(text[:, :7]).logits[:, 5:], **CLOSE)
    torch.testing.assert_close(late[:, 2:], model(text[:, 7:]).logits, **CLOSE)


def test_generation_is_greedy_rereading_with_padding_anywhere():
    model, text, valid = make(w=3), ids(), torch.ones(3, TIME, dtype=torch.bool)
    valid[0, :4], valid[1, -5:] = False, False
    for chunk in (None, 4):
        got = model.generate(text, 7, valid=valid, chunk=chunk)
        for row in range(3):
            want = text[row : row + 1, valid[row]]
            for _ in range(7):
                want = torch.cat((want, model(want).logits[:, -1:].argmax(-1)), 1)
            assert got[row].tolist() == want[0, -7:].tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_states_can_be_reordered_restored_and_detached(padded):
    model, text = make(w=3), ids()
    valid = torch.ones_like(text, dtype=torch.bool)
    if padded:
        valid[1, :2] = False
    tensors = {"valid": valid} if padded else {}
    whole, _ = cut(model, text, [TIME], **tensors)
    _, state = cut(model, text, [8], **{n: t[:, :8] for n, t in tensors.items()})
    snap, order = state.snapshot(), torch.tensor([2, 1, 2])
    rest = {n: t[order][:, 8:] for n, t in tensors.items()}
    got, _ = cut(model, text[order][:, 8:], [2, 3], state.reorder(order), **rest)
    torch.testing.assert_close(got, whole[order][:, 8:], **CLOSE)
    cut(model, text[:, 8:].flip(0), [5], state)
    state.restore(snap)
    torch.testing.assert_close(cut(model, text[:, 8:], [5], state)[0], whole[:, 8:], **CLOSE)
    assert any(t.requires_grad for t in state.tensors())
    assert not any(t.requires_grad for t in state.detach().tensors())


def test_the_predictor_remembers_one_entry_for_each_chunk():
    model = make(w=4, predictor=1)
    state = model(ids(2, 23), keep=0).state.stack
    assert state.predictor.layers[0].mixer.length == 6 and state.fill == 3  # the start and 5 chunks
    assert state.chat.untyped_storage().nbytes() == state.total.untyped_storage().nbytes() == 2 * 16 * 4
    calls = []
    model.stack.predictor.register_forward_hook(lambda *_: calls.append(1))
    cut(model, ids(2, 8), [1] * 8)
    assert len(calls) == 3


# ------------------------------------------------------------------------------------------------------------- training


def test_the_token_loss_alone_reaches_the_predictor():
    model = make(loud=False)
    torch.nn.functional.cross_entropy(model(ids()).logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten()).backward()
    for name, p in model.stack.predictor.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 1e-7, name


def test_the_predictor_learns_between_a_frozen_encoder_and_no_decoder():
    model = make(loud=False, w=2)
    model.stack.layers[1] = Skip()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("stack.predictor"))
    text = ids(4, 12).repeat(1, 3)
    batch = Batch(text, torch.nn.functional.pad(text[:, 1:], (0, 1), value=IGNORE))
    result = train(model, lambda index: batch, TrainConfig(steps=40, lr=1e-2, log_every=1))
    assert result.last["nll"] < 0.9 * result.history[0]["nll"]


def test_training_starts_near_the_backbone():
    for fuse in ("add", "concat"):
        seen = noting(model := make(loud=False, dim=64, fuse=fuse))
        model(ids())
        assert 0 < seen.chat[0].norm() < 0.3 * seen.h[0].norm()
        torch.testing.assert_close(seen.fusion(seen.h[0], seen.chat[0]), seen.h[0] + seen.chat[0])


def test_half_precision_autocast():
    model, text = make(w=3), ids()
    whole = model(text).logits
    for tensors in ({}, {"valid": torch.ones_like(text, dtype=torch.bool)}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, state = cut(model, text, [5, 8], **tensors)
        assert state.stack.total.dtype == torch.float32
        torch.testing.assert_close(got.float(), whole, atol=0.15, rtol=0.1)


# ------------------------------------------------------------------------------------------------- parameters and refusals


def test_the_predictor_costs_its_layers_a_norm_a_projection_and_a_start():
    plain = [count_parameters(make(n_layers=n, stack="plain")) for n in (2, 5)]
    assert count_parameters(make(predictor=3)) == plain[1] + 16 + 16 * 16 + 16
    assert count_parameters(make(predictor=3, fuse="concat", normalise=True)) == plain[1] + 3 * 16 + 3 * 16 * 16


def test_saved_weights_keep_their_chunk_size(tmp_path):
    model = make(w=3, a=1, n_layers=3, fuse="concat", normalise=True)
    model.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path).eval()(ids()).logits, model(ids()).logits)
    assert choose(to_json(model.config.stack), "stack") == model.config.stack
    for knobs, sentence in (
        ({"w": 4}, r"contextlm\(w=4\): these weights were trained with w=3; expected the same"),
        ({"lead": 0}, r"contextlm\(lead=0\): .* lead=1"),
        ({"a": 2}, r"contextlm\(a=2\): .* a=1"),
    ):
        other = make(n_layers=3, **{"w": 3, "a": 1, "fuse": "concat", "normalise": True} | knobs)
        with pytest.raises(Refused, match=sentence):
            other.load_state_dict(model.state_dict())
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["stack"]["knobs"]["w"] = 4
    file.write_text(json.dumps(config))
    with pytest.raises(Refused, match="trained with w=3"):
        Decoder.load(tmp_path)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"w": 0}, r"contextlm\(w=0\): expected at least 1"),
        ({"w": 2.5}, "expected a whole number"),
        ({"lead": 2}, r"contextlm\(lead=2\): expected at most 1"),
        ({"lead": -1}, r"contextlm\(lead=-1\): expected at least 0"),
        ({"predictor": 0}, r"contextlm\(predictor=0\): expected at least 1"),
        ({"a": 0}, r"contextlm\(a=0\): expected at least 1"),
        ({"fuse": "sum"}, "unknown choice 'sum'"),
    ],
    ids=str,
)
def test_impossible_knobs_are_refused(knobs, sentence):
    with pytest.raises(Refused, match=sentence):
        ContextLM(**knobs)


def test_models_without_room_for_two_parts_are_refused():
    with pytest.raises(Refused, match=r"contextlm\(a=2\): a model of 2 layers .* expected a=1 or less"):
        make(a=2)
    with pytest.raises(Refused, match="expected at least 2 layers"):
        make(n_layers=1)


def test_an_empty_call_and_nan_raise():
    model = make()
    x, valid = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least one token"):
        model.stack(x[:, :0], model(embeds=x).ctx)
    x[1, 2, 3] = torch.nan
    for tensors in ({}, {"valid": valid}):
        with pytest.raises(FloatingPointError, match="NaN"):
            model(embeds=x, **tensors)
