"""The hook: same results as stock, the model exactly as it was afterwards, threads, shared configs, copies, bystanders."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import threading
import weakref

import pytest
import torch
from generating import left_padded, new_tokens
from tiny_models import FAMILIES, tiny, tiny_ids
from transformers import DynamicCache, QuantizedCache, StaticCache

from longspan.models import hook
from longspan.models.hook import Prompt, attached, cache_keyword
from longspan.recipe import Recipe, Run
from longspan.registry import Refused

FULL, HALF = Recipe.parse("full"), Recipe.parse("h2o(budget=0.5)")


def state_of(model):
    """Everything that a stay may touch: configs, instance attributes, hooks."""
    configs = {id(c): (c._attn_implementation_internal, sorted(c.__dict__), c.to_dict())
               for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    modules = [(sorted(m.__dict__), *(list(getattr(m, n)) for n in dir(m) if n.endswith("_hooks") and n.startswith("_")
                                      and hasattr(getattr(m, n), "keys"))) for m in model.modules()]
    return configs, modules, model.generate


@pytest.fixture
def model():
    return tiny("llama")


@pytest.fixture
def same_after(model):
    """Fails unless the model is afterwards what it was, logits bit for bit."""
    ids = tiny_ids(2, 20)
    before, logits = state_of(model), model(ids).logits
    yield
    assert state_of(model) == before
    assert torch.equal(model(ids).logits, logits)
    assert not hook._attached and not hook._held and not list(hook._modules)


# ---------------------------------------------------------------------------------------------- the same as stock


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_full_recipe_gives_stock_logits(family, padded):
    model = tiny(family)
    if family == "gemma2":  # transformers' SDPA drops the softcap
        model.set_attn_implementation("eager")
    ids, mask = left_padded(tiny_ids(1, 30), tiny_ids(1, 21, seed=1))
    if not padded:
        ids, mask = tiny_ids(2, 30), None
    options = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 5,
               "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    stock = model.generate(ids, **options)
    with FULL.on(model) as run:
        ours = model.generate(ids, **options)
        assert run.cache is ours.past_key_values
    assert torch.equal(stock.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), atol=2e-6 if not padded else 2e-5, rtol=0)


def test_full_recipe_is_bit_equal_while_reading(model):
    ids = tiny_ids(2, 40)
    with FULL.on(model):
        assert torch.equal(model(ids).logits, model(ids, use_cache=False).logits)
        ours = model(ids).logits
    assert torch.equal(model(ids).logits, ours)


@pytest.mark.parametrize("window", [6, 30])
def test_sliding_windows_of_every_layer(window):
    """A window shorter than the prompt stays with transformers' cache; a longer one is ours, and still hides the past."""
    model, ids = tiny("mistral", sliding_window=window), tiny_ids(1, 20)
    stock = new_tokens(model, ids, 16)
    with FULL.on(model) as run:
        assert new_tokens(model, ids, 16) == stock
        assert len(run.cache.policy_layers) == (2 if window == 30 else 0)
        assert run.achieved.seen == 35 if window == 6 else 20


def test_masks_of_four_dimensions_are_attended_as_they_are(model):
    """Packed sequences keep apart; and a ready-made mask works without a cache."""
    ids = tiny_ids(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    stock = model(ids, position_ids=positions, use_cache=False).logits
    with HALF.on(model):
        packed = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed, stock, atol=1e-6, rtol=0)
        torch.testing.assert_close(packed[:, 5:], model(ids[:, 5:], use_cache=False).logits, atol=1e-5, rtol=0)
        mask = torch.ones(12, 12).tril().bool()[None, None]
        with pytest.raises(Refused, match="packed sequences or image blocks"):
            model(ids, attention_mask=mask)


# ------------------------------------------------------------------------------------------- leaving no trace behind


@pytest.mark.usefixtures("same_after")
class TestNothingIsLeft:
    def test_after_a_plain_stay(self, model):
        with HALF.on(model):
            new_tokens(model, tiny_ids(1, 20))
            assert model.config._attn_implementation_internal == "longspan"

    def test_after_an_error_inside(self, model):
        with pytest.raises(ZeroDivisionError), HALF.on(model):
            1 / 0  # noqa: B018

    def test_after_an_error_inside_generate(self, model):
        def failing(module, args):
            raise ZeroDivisionError

        handle = model.model.layers[1].mlp.register_forward_pre_hook(failing)
        with HALF.on(model):
            with pytest.raises(ZeroDivisionError):
                new_tokens(model, tiny_ids(1, 20))
            handle.remove()
            assert len(new_tokens(model, tiny_ids(1, 20))[0]) == 8

    def test_after_an_interrupt_in_a_forward(self, model):
        """An interrupt runs no hooks after the forward; leaving doesn't wait for what has ended."""
        def interrupting(module, args):
            raise KeyboardInterrupt

        handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupting)
        with pytest.raises(KeyboardInterrupt), attached_within(model, 5.0):
            model(tiny_ids(1, 20))
        handle.remove()

    def test_after_nested_stays(self, model):
        ids = tiny_ids(1, 20)
        with HALF.on(model):
            outer = new_tokens(model, ids)
            with FULL.on(model) as run:
                full = new_tokens(model, ids)
                assert run.achieved.kept_fraction == 1.0
            assert new_tokens(model, ids) == outer
        assert new_tokens(model, ids) == full

    def test_after_crossed_exits_which_are_errors(self, model):
        first, second = HALF.on(model), FULL.on(model)
        first.__enter__()
        second.__enter__()
        with pytest.raises(RuntimeError, match="another order than entered"):
            first.__exit__(None, None, None)
        second.__exit__(None, None, None)

    def test_after_a_model_that_was_eager(self, model):
        model.set_attn_implementation("eager")
        ids = tiny_ids(1, 20)
        with FULL.on(model):
            new_tokens(model, ids)
        assert model.config._attn_implementation == "eager"
        model.set_attn_implementation("sdpa")

    def test_after_refusals_on_entering(self, model, monkeypatch):
        monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_: None)
        with pytest.raises(Refused, match="can't switch its attention function"), HALF.on(model):
            pass

    def test_after_hidden_states_were_captured(self, model):
        with watching_hidden(model) as seen:
            model(tiny_ids(1, 6))
        torch.testing.assert_close(seen[0], model.model.layers[0].input_layernorm(model.model.embed_tokens(tiny_ids(1, 6))))
        assert len(seen) == 2

    def test_with_a_generate_of_the_instance(self, model):
        own = model.generate
        model.generate = lambda *a, **k: own(*a, **k)
        mine = model.generate
        with HALF.on(model) as run:
            model.generate(tiny_ids(1, 20), max_new_tokens=2)
            assert run.achieved.kept_fraction == 0.5
        assert model.__dict__.pop("generate") is mine


def attached_within(model, patience):
    return attached(model, Recording(model), patience=patience)


class Recording:
    """The least a handler needs: plain attention, no cache of its own."""

    needs_hidden = False

    def __init__(self, model):
        self.calls, self.gone = [], False

    def new_cache(self, prompt):
        return DynamicCache()

    def owns(self, cache):
        return True

    def attend(self, call):
        self.calls.append(call)
        return hook.plain_attention(call.q, call.k, call.v, call.padding, call.scale, call.window, call.softcap)

    def before_generate(self, arguments):
        self.arguments = arguments

    def left(self):
        self.gone = True


def watching_hidden(model):
    import contextlib

    @contextlib.contextmanager
    def stay():
        handler = Recording(model)
        handler.needs_hidden = True
        with attached(model, handler):
            seen = []
            handler.attend = lambda call: (seen.append(call.hidden), Recording.attend(handler, call))[1]
            yield seen

    return stay()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_left_as_it_was(family):
    model, ids = tiny(family), tiny_ids(2, 20)
    before, logits = state_of(model), model(ids).logits
    with HALF.on(model):
        new_tokens(model, ids, 3)
    assert state_of(model) == before
    assert torch.equal(model(ids).logits, logits)


# ----------------------------------------------------------------------------------------------- what a call carries


def test_a_call_tells_what_methods_need(model):
    ids, mask = left_padded(tiny_ids(1, 9), tiny_ids(1, 6))
    handler = Recording(model)
    with attached(model, handler) as parts:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
    assert handler.gone
    call = handler.calls[1]
    assert (call.layer, call.scale, call.window, call.softcap) == (1, 8**-0.5, None, None)
    assert call.q.shape == (2, 4, 9, 8) and call.k.shape == (2, 2, 9, 8)
    assert torch.equal(call.padding, mask.bool())
    assert call.positions[1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert call.parts is parts
    cos, sin = parts.rope(call.positions, 1)
    torch.testing.assert_close(parts.rotate(call.q_pre_rope, cos, sin), call.q, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "scale", "softcap", "windows"), [
    ("gemma2", 12**-0.5, 20.0, [16, None]), ("gemma3", 12**-0.5, None, [16, None]), ("llama", 8**-0.5, None, [None, None])])
def test_scale_window_and_softcap_are_the_families(family, scale, softcap, windows):
    model, handler = tiny(family), Recording(None)
    with attached(model, handler):
        model(tiny_ids(1, 20), use_cache=False)
        full = [c for c in handler.calls if c.window is None]
        assert all(abs(c.scale - scale) < 1e-6 and c.softcap == softcap for c in full)
        assert len(full) == windows.count(None)


def test_generate_tells_the_prompt(model):
    handler, told = Recording(model), []
    handler.new_cache = lambda prompt: (told.append(prompt), DynamicCache())[1]
    ids = tiny_ids(2, 7)
    with attached(model, handler):
        model.generate(ids, max_new_tokens=2)
        model.generate(inputs_embeds=model.get_input_embeddings()(ids[:, :5]), max_new_tokens=2)
        model(ids)
        assert [p.length if p else None for p in told] == [7, 5, None]
        assert torch.equal(told[0].ids, ids) and told[1].ids is None
        assert next(iter(inspect.signature(model.generate).parameters)) == "inputs"
    assert Prompt(None, 3).spans == {}


def test_cache_keyword_is_what_the_decoder_takes(model):
    assert cache_keyword(model.model) in inspect.signature(model.model.forward).parameters


# ------------------------------------------------------------------------------------------------------- injection


def test_caches_are_injected_where_one_would_be_made(model):
    ids = tiny_ids(1, 8)
    with HALF.on(model) as run:
        assert model(ids, use_cache=False).past_key_values is None
        assert run.cache is None
        for given in ({}, {"use_cache": True}, {"past_key_values": DynamicCache()}):
            found = model(ids, **given).past_key_values
            assert found is run.cache and found.get_seq_length() == 8
        model.config.use_cache = False
        assert model(ids).past_key_values is None
        model.config.use_cache = True


def test_no_cache_is_injected_under_gradient_checkpointing(model):
    ids = tiny_ids(1, 12)
    model.requires_grad_(True).train()
    model.gradient_checkpointing_enable()
    model(ids).logits.sum().backward()
    wanted = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()
    with FULL.on(model) as run:
        model(ids).logits.sum().backward()
        assert run.cache is None
    torch.testing.assert_close(model.model.layers[0].self_attn.k_proj.weight.grad, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [
    lambda m: StaticCache(config=m.config, max_cache_len=64), lambda m: filled(m), lambda m: DynamicCache(offloading=True),
    lambda m: QuantizedCache.__new__(QuantizedCache)])
def test_other_caches_are_refused(model, make, monkeypatch):
    monkeypatch.setattr(QuantizedCache, "get_seq_length", lambda self, layer_idx=0: 0)
    monkeypatch.setattr(torch, "Stream", lambda *a: None)
    cache = make(model)
    with HALF.on(model), pytest.raises(Refused, match=r"was not made by this recipe|offloaded cache"):
        model(tiny_ids(1, 4), past_key_values=cache)


def filled(model):
    cache = DynamicCache()
    model(tiny_ids(1, 4), past_key_values=cache)
    return cache


def test_output_attentions_are_refused(model):
    with HALF.on(model):
        with pytest.raises(Refused, match="output_attentions=True"):
            model(tiny_ids(1, 4), output_attentions=True)
        with pytest.raises(Refused, match="output_attentions=True"):
            model.generate(tiny_ids(1, 4), output_attentions=True, return_dict_in_generate=True)


def test_models_that_cant_be_hooked_are_refused(model):
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(Refused, match="attend within chunks of the text"), HALF.on(model):
        pass
    del model.config.layer_types
    assert not hook._attached and not hook._held and model.config._attn_implementation == "sdpa"
    with pytest.raises(Refused, match="get_decoder"), HALF.on(torch.nn.Linear(2, 2)):
        pass


# --------------------------------------------------------------------------------------- sharing, copies, bystanders


def test_two_models_that_share_one_config():
    """Both may carry recipes, leave in any order, and the config is what it was when the last has left."""
    a, b = tiny("llama"), tiny("llama", seed=1)
    b.config = b.model.config = a.config
    for module in b.modules():
        if hasattr(module, "config"):
            module.config = a.config
    ids = tiny_ids(1, 20)
    wanted = {m: (new_tokens(m, ids), with_recipe(m, ids)) for m in (a, b)}
    first, second = HALF.on(a), HALF.on(b)
    first.__enter__()
    second.__enter__()
    assert (new_tokens(a, ids), new_tokens(b, ids)) == (wanted[a][1], wanted[b][1])
    first.__exit__(None, None, None)
    assert (new_tokens(a, ids), new_tokens(b, ids)) == (wanted[a][0], wanted[b][1])
    second.__exit__(None, None, None)
    assert a.config._attn_implementation_internal == "sdpa"
    assert (new_tokens(a, ids), new_tokens(b, ids)) == (wanted[a][0], wanted[b][0])


def with_recipe(model, ids, recipe=HALF):
    with recipe.on(model):
        return new_tokens(model, ids)


@pytest.mark.parametrize("padded", [False, True])
def test_a_bystander_that_shares_the_config_stays_right(padded):
    a = tiny("gemma2")
    b = tiny("gemma2", seed=1)
    for module in b.modules():
        if hasattr(module, "config"):
            module.config = a.config
    a.set_attn_implementation("eager")  # transformers' SDPA drops the softcap
    ids, mask = left_padded(tiny_ids(1, 30), tiny_ids(1, 21))
    options = {"attention_mask": mask} if padded else {}
    wanted, logits = new_tokens(b, ids, **options), b(ids, **options).logits
    with HALF.on(a):
        assert new_tokens(b, ids, **options) == wanted
        real = mask.bool() if padded else torch.ones_like(mask).bool()
        torch.testing.assert_close(b(ids, **options).logits[real], logits[real], atol=5e-6, rtol=1e-5)


def test_a_deep_copy_made_inside_is_a_plain_model(model):
    ids = tiny_ids(1, 20)
    stock = new_tokens(model, ids)
    with HALF.on(model):
        ours = new_tokens(model, ids)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        assert new_tokens(twin, ids) == stock != ours  # its own weights, its own generate, no recipe
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2.0)
        assert new_tokens(model, ids) == ours
    assert new_tokens(twin, ids) == stock
    assert with_recipe(twin, ids) == ours
    assert new_tokens(model, ids) == stock


def test_a_stay_keeps_no_model_alive():
    model = tiny("llama")
    gone = weakref.ref(model)
    recipe = Recipe.parse("h2o(budget=0.5)")
    with recipe.on(model):
        new_tokens(model, tiny_ids(1, 20), 2)
    del model
    gc.collect()
    assert gone() is None
    assert recipe.achieved.kept_fraction == 0.5


# ---------------------------------------------------------------------------------------------------------- threads


class Slow:
    """Makes a model's forwards wait for a signal, and says when one has begun."""

    def __init__(self, model):
        self.began, self.go_on = threading.Event(), threading.Event()
        self.handle = model.model.layers[0].mlp.register_forward_pre_hook(self.wait)

    def wait(self, module, args):
        self.began.set()
        assert self.go_on.wait(20)


def test_leaving_waits_for_the_forward_of_another_thread(model):
    """The forward in flight ends well; the thread's next one gets an error, not garbage; then all is as before."""
    ids = tiny_ids(1, 20)
    stock, before = new_tokens(model, ids), state_of(model)
    slow, outcome = Slow(model), []

    def work():
        try:
            outcome.append(new_tokens(model, ids, 50))
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=work)
    left = threading.Event()
    with HALF.on(model):
        thread.start()
        assert slow.began.wait(20)
        threading.Timer(0.2, slow.go_on.set).start()
    left.set()
    thread.join(20)
    slow.handle.remove()
    assert not thread.is_alive()
    assert isinstance(outcome[0], str) and "recipe that was left" in outcome[0]
    assert state_of(model) == before and new_tokens(model, ids) == stock


def test_patience_has_an_end(model):
    slow, before = Slow(model), state_of(tiny("llama"))[0].values()
    thread = threading.Thread(target=lambda: model(tiny_ids(1, 4), use_cache=False))
    with pytest.raises(RuntimeError, match="still running 0 s after"), attached(model, Recording(model), patience=0.1):
        thread.start()
        assert slow.began.wait(20)
    slow.go_on.set()
    thread.join(20)
    slow.handle.remove()
    assert list(state_of(model)[0].values()) == list(before)


def test_caches_made_at_the_same_time_are_two(model, monkeypatch):
    both, plain, made = threading.Barrier(2), Run._take, []
    monkeypatch.setattr(Run, "_take", lambda run, cache: (both.wait(20), plain(run, cache)))
    with HALF.on(model) as run:
        threads = [threading.Thread(target=lambda: made.append(run.new_cache(None))) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
    assert len(made) == 2 and made[0] is not made[1]


def test_threads_generate_on_one_model_at_once(model):
    """Threads switch as often as Python lets them."""
    prompts = [tiny_ids(1, 20 + i, seed=i) for i in range(4)]
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with HALF.on(model):
            wanted = [new_tokens(model, p, 4) for p in prompts]
            for _ in range(8):
                found = [None] * 4

                def work(i, found=found):
                    found[i] = new_tokens(model, prompts[i], 4)

                threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
                for t in threads:
                    t.start()
                for t in threads:
                    t.join(30)
                assert found == wanted
    finally:
        sys.setswitchinterval(before)
