"""Transformers models at position indices of one's own: masks, windows, documents, frequencies, and what is refused."""

import pytest
import torch
from tiny_models import tiny, tiny_ids

from longspan.registry import Refused
from longspan.training import Batch
from longspan.training.index_perturbations import cyclic, perturbed
from longspan.training.retrofits import Tuned

TIME = 12



def by_hand(model, ids, positions, segments=None, window=None):
    """Logits under an explicit additive mask made from the tokens' order."""
    t = torch.arange(ids.shape[1])
    sees = (t[:, None] >= t[None]).expand(len(ids), -1, -1)
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None])
    if window is not None:
        sees = sees & (t[:, None] - t[None] < window)
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["skip", "cyclic"])
def test_masks_do_not_follow_the_indices(kind, packed, implementation):
    """Cyclic indices start again in the middle, which transformers would take for a second document."""
    model, ids = tiny("llama", attn_implementation=implementation), tiny_ids(2, TIME)
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 8 + [1] * 4]) if packed else None
    view = perturbed(kind, Batch(ids, ids, segments=segments))
    got = Tuned(model)(ids, segments=segments, positions=view.positions)
    torch.testing.assert_close(got.logits, by_hand(model, ids, view.positions, segments), atol=1e-5, rtol=1e-5)
    assert torch.equal(got.ctx.positions, view.positions) and (got.ctx.segments is None) == (not packed)
    if not packed:  # what would happen without
        with torch.no_grad():
            wrong = model(input_ids=ids, position_ids=view.positions, use_cache=False).logits
        assert not torch.allclose(got.logits, wrong, atol=1e-2)


@pytest.mark.parametrize("family, window", [("mistral", 4), ("gemma2", 16)])
def test_windows_count_tokens_not_indices(family, window):
    model, ids = tiny(family, sliding_window=window), tiny_ids(2, 24)
    segments = torch.tensor([[0] * 20 + [1] * 4, [0] * 24])
    view = perturbed("skip", Batch(ids, ids, segments=segments))
    got = Tuned(model)(ids, segments=segments, positions=view.positions).logits
    alone = Tuned(model)(ids[:1, :20], positions=view.positions[:1, :20]).logits
    torch.testing.assert_close(got[:1, :20], alone, atol=1e-4, rtol=1e-4)
    if family == "mistral":
        torch.testing.assert_close(got, by_hand(model, ids, view.positions, segments, window), atol=1e-5, rtol=1e-5)


def test_padding_and_documents_together():
    model, ids = Tuned(tiny("llama")), tiny_ids(1, 14)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[0, :3] = False
    segments = torch.tensor([[0] * 8 + [1] * 6])
    second, first = model(ids[:, 8:]).logits, model(ids[:, 3:8]).logits
    standard = model(ids, valid=valid, segments=segments).logits
    torch.testing.assert_close(standard[:, 8:], second, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(standard[:, 3:8], first, atol=1e-5, rtol=1e-5)
    view = perturbed("cyclic", Batch(ids, ids, valid=valid, segments=segments))
    moved = model(ids, valid=valid, segments=segments, positions=view.positions).logits
    torch.testing.assert_close(moved[:, 8:], model(ids[:, 8:], positions=view.positions[:, 8:]).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
     "original_max_position_embeddings": 16},
])
def test_frequencies_are_those_of_the_standard_view(rope):
    model, ids = tiny("llama", positions=16, rope_parameters=rope), tiny_ids(1, TIME)
    plain = tiny("llama", positions=16)
    moved = torch.arange(TIME)[None] + 40 * (torch.arange(TIME) >= 6)
    want = Tuned(plain)(ids, positions=moved).logits
    with torch.no_grad():
        long = model(ids, attention_mask=torch.ones_like(ids), position_ids=moved, use_cache=False).logits
    assert not torch.allclose(long, want, atol=1e-2)  # and the model is left with the frequencies of long inputs
    model.model.rotary_emb.attention_scaling = plain.model.rotary_emb.attention_scaling
    torch.testing.assert_close(Tuned(model)(ids, positions=moved).logits, want, atol=1e-4, rtol=1e-4)
    assert model.model.rotary_emb.rope_type == rope["rope_type"]


def test_indices_beyond_the_window_are_served():
    small, large, ids = tiny("llama", positions=16), tiny("llama", positions=4096), tiny_ids(1, 16)
    moved = torch.arange(16)[None] + 16 * (torch.arange(16) >= 8)
    assert torch.equal(Tuned(small)(ids, positions=moved).logits, Tuned(large)(ids, positions=moved).logits)


def test_a_common_shift_changes_nothing():
    tuned, ids, places = Tuned(tiny("llama")), tiny_ids(2, TIME), torch.arange(TIME).expand(2, -1)
    torch.testing.assert_close(tuned(ids, positions=places + 100).logits, tuned(ids).logits, atol=1e-4, rtol=0)
    turned = cyclic(places, torch.tensor(5), torch.tensor(TIME))
    assert not torch.allclose(tuned(ids, positions=turned).logits, tuned(ids).logits, atol=1e-2)


def test_flash_attention_is_refused():
    flash = tiny("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(Refused, match="expected 'sdpa' or 'eager'"):
        Tuned(flash)(tiny_ids(1, TIME), positions=torch.arange(TIME)[None])
