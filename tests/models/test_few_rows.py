"""Modules that take the fast way for few rows: found by what they compute, the same result, and no trace afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny
from torch import nn

from longspan.models.few_rows import _is_rms_norm, _is_silu_mlp, speed_up
from longspan.recipe import Recipe


@pytest.fixture
def model():
    return tiny("llama", heads=4, kv_heads=2, head_dim=16).to(torch.bfloat16)


def test_linears_norms_and_mlps_of_a_llama_are_found(model):
    undo = speed_up(model)
    fast = {type(m).__name__ for m in model.modules() if "forward" in m.__dict__}
    assert fast == {"Linear", "LlamaRMSNorm", "LlamaMLP"}
    for step in undo:
        step()
    assert not any("forward" in m.__dict__ for m in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_one_token_and_whole_text_agree_with_the_model(family):
    model = tiny(family).to(torch.bfloat16)
    ids = torch.randint(5, 100, (2, 6), generator=torch.Generator().manual_seed(0))
    wanted = model(ids).logits
    undo = speed_up(model)
    try:
        found = model(ids).logits
    finally:
        for step in undo:
            step()
    torch.testing.assert_close(found.float(), wanted.float(), atol=0.05, rtol=0.05)
    assert torch.equal(model(ids).logits, wanted)


def test_other_norms_are_left_alone():
    class OnePlus(nn.Module):
        def __init__(self, width, eps):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(width)), eps

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)

    class Gelu(nn.Module):
        def forward(self, x):
            return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    assert not _is_rms_norm(OnePlus) and not _is_silu_mlp(Gelu, nn.SiLU)
    assert speed_up(nn.Sequential(OnePlus(32, 1e-5).to(torch.bfloat16))) == []


def test_float32_models_and_replaced_forwards_are_left_alone():
    assert speed_up(tiny("llama")) == []
    layer = nn.Linear(32, 32, dtype=torch.bfloat16)
    layer.forward = lambda x: x
    assert speed_up(layer) == []


@torch.no_grad()
def test_a_copy_made_while_a_recipe_is_on_is_a_model_of_its_own(model):
    ids = torch.tensor([[5, 6, 7]])
    wanted = model(ids).logits
    with Recipe.parse("full").on(model):
        twin = copy.deepcopy(model)
        for p in model.parameters():
            p.mul_(2)
        found = twin(ids, use_cache=False).logits
    torch.testing.assert_close(found.float(), wanted.float(), atol=0.05, rtol=0.05)
    assert not any("forward" in m.__dict__ for m in model.modules())


@torch.no_grad()
def test_hooks_on_a_part_of_an_mlp_still_run(model):
    ids, seen = torch.tensor([[5]]), []
    with Recipe.parse("full").on(model):
        before = model(ids, use_cache=False).logits
        handle = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, i, o: seen.append(o.shape) or o * 0)
        changed = model(ids, use_cache=False).logits
        handle.remove()
        after = model(ids, use_cache=False).logits
    assert len(seen) == 1 and not torch.equal(changed, before) and torch.equal(after, before)


@torch.no_grad()
def test_generate_in_bfloat16_writes_what_the_model_writes(model):
    ids = torch.randint(5, 100, (1, 20), generator=torch.Generator().manual_seed(1))
    with Recipe.parse("full").on(model):
        a = model.generate(ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    b = model.generate(ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    torch.testing.assert_close(a.logits[0].float(), b.logits[0].float(), atol=0.05, rtol=0.05)
