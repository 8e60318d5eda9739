"""The attention hook: how a recipe reaches the attention layers of an unchanged transformers model.

One attention function and one mask function are registered with transformers under the name ``longspan``. While a
handler (a recipe's run) is attached, the model's configs name that implementation; every attention call is packed into
a `LayerCall` and handed to the handler on top of the model's stack. The key-value cache is injected before the masks
are made, so ``generate`` stays as it is. Leaving puts back every config entry, hook and attribute that was touched.

Threads: the stack hangs on the model, not on a context variable, because a streaming ``generate`` runs in a thread of
its own. Leaving waits for forwards in flight; a thread that still generates afterwards gets an error, never garbage.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from longspan.models.call import Handler, LayerCall, Prompt, plain_attention
from longspan.models.drop import watch_layers
from longspan.models.few_rows import speed_up
from longspan.models.parts import Parts, find_parts
from longspan.registry import Refused

IMPLEMENTATION = "longspan"


# ------------------------------------------------------------------------------------------- the registered functions

_modules: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()


def attention_function(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None,
                       scaling: float | None = None, position_ids: Tensor | None = None,
                       sliding_window: int | None = None, softcap: float | None = None,
                       **kwargs: Any) -> tuple[Tensor, None]:
    """The function transformers calls for every attention layer. Returns ``(out (B,T,Hq,D), None)``."""
    state = _modules.get(module)
    store = getattr(k, "_longspan", None)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    handler = state.handler if state is not None else None
    is_4d = attention_mask is not None and attention_mask.dim() == 4
    if handler is None or state is None or (store is None and getattr(module, "is_sliding", False)) or is_4d:
        if store is not None and is_4d:
            raise Refused("a recipe's cache met a mask of packed sequences or image blocks; run such batches without a "
                          "recipe, or with use_cache=False.")
        if store is not None:
            raise RuntimeError("the recipe was left while this forward was running.")
        out = plain_attention(q, k, v, attention_mask, scale, sliding_window, softcap)
        return out.transpose(1, 2).contiguous(), None
    if position_ids is None:
        seen = store.seen if store is not None else 0
        position_ids = torch.arange(seen, seen + q.shape[2], device=q.device)[None]
    call = LayerCall(
        layer=module.layer_idx, q=q, k=k, v=v, scale=scale,
        positions=position_ids.expand(q.shape[0], -1) if position_ids.shape[0] != q.shape[0] else position_ids,
        padding=attention_mask, window=sliding_window, softcap=softcap, parts=state.parts, store=store,
        hidden=state.hidden.pop((threading.get_ident(), module.layer_idx), None) if state.hidden else None,
    )
    return handler.attend(call).transpose(1, 2).contiguous(), None


def mask_function(*, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
    """The mask transformers makes: the 2-D padding mask as it is, or SDPA's where more than padding is masked."""
    if not allow_is_causal_skip:
        return sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=False, **kwargs)
    return attention_mask


AttentionInterface.register(IMPLEMENTATION, attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, mask_function)


# --------------------------------------------------------------------------------------------- attaching and leaving


class _Attached:
    """What is known about one model while at least one handler is attached to it."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = find_parts(model)
        self.stack: list[tuple[object, Handler]] = []
        self.running: dict[int, int] = {}
        """Forwards in flight per thread."""
        self.idle = threading.Condition(threading.RLock())
        self.hidden: dict[tuple[int, int], Tensor] = {}
        """Layer inputs waiting for their attention call, by thread and layer."""
        self.watching = self.dropping = False
        self.pending = threading.local()
        self.undo: list[Callable[[], Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attached:
        # A copy of the model carries our hooks along; they know their own model and leave the copy alone.
        return self

    @property
    def handler(self) -> Handler | None:
        return self.stack[-1][1] if self.stack else None

    def alone(self) -> bool:
        """Whether no other living thread is inside a forward. A count that an interrupt left behind doesn't matter."""
        others = {t.ident for t in threading.enumerate()} - {threading.get_ident()}
        return not any(n and thread in others for thread, n in self.running.items())

    # -- switching on

    def switch_on(self) -> None:
        model = self.parts.model
        config = model.config.get_text_config(decoder=True)
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            raise Refused(f"{type(model).__name__} has layers that attend within chunks of the text, which a recipe can't "
                          "carry; expected layers that see the whole past or a sliding window.")
        self._switch_configs(model)
        decoder = self.parts.decoder
        before = decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        after = decoder.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        self.undo += [before.remove, after.remove]
        for i in range(self.parts.n_layers):
            module = self.parts.attention(i)
            _modules[module] = self
            self.undo.append(functools.partial(_modules.pop, module, None))
        self._wrap_generate(model)
        self.undo += speed_up(model)

    def watch_hidden(self) -> None:
        """Capture every layer's input from now on, once some handler asks for it."""
        if self.watching or not any(handler.needs_hidden for _, handler in self.stack):
            return
        self.watching = True
        for i in range(self.parts.n_layers):
            hook = self.parts.attention(i).register_forward_pre_hook(self._capture_hidden, with_kwargs=True)
            self.undo.append(hook.remove)

    def follow_drops(self) -> None:
        """Let layers leave out tokens from now on, once some handler says (`drops_tokens`) that it may want that."""
        if not self.dropping and any(getattr(handler, "drops_tokens", False) for _, handler in self.stack):
            self.dropping = True
            self.undo += watch_layers(self.parts, cache_keyword(self.parts.layers[0]))

    def _switch_configs(self, model: Any) -> None:
        for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if hasattr(config, "_attn_implementation_internal"):
                _hold(config)
                self.undo.append(functools.partial(_release, config))
        model.set_attn_implementation(IMPLEMENTATION)
        attention_config = getattr(self.parts.attention(0), "config", model.config)
        if attention_config._attn_implementation != IMPLEMENTATION:
            raise Refused(f"{type(model).__name__} can't switch its attention function; expected a transformers class "
                          "that calls ALL_ATTENTION_FUNCTIONS, such as LlamaForCausalLM.")

    def _wrap_generate(self, model: Any) -> None:
        """Learn the prompt's length, which the cache needs to know where the prompt ends."""
        if not hasattr(model, "generate"):
            return
        original = model.generate
        signature = inspect.signature(original)

        @functools.wraps(getattr(original, "__func__", original))
        def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not self.parts.model:  # a deep copy made inside the block
                return type(this).generate(this, *args, **kwargs)
            given = _arguments(signature, args, kwargs)
            given["generation_config"] = given.get("generation_config") or getattr(this, "generation_config", None)
            handler = self.handler
            if handler is not None:
                handler.before_generate(given)
                writes = handler.writes(given) if hasattr(handler, "writes") else None
                if writes is not None:
                    if given.get("custom_generate") is not None:
                        raise Refused("custom_generate can't be combined with a recipe that writes in its own way; leave it "
                                      "unset.")
                    kwargs = {**writes.arguments(given, kwargs), "custom_generate": writes}
            outer = getattr(self.pending, "prompt", None)
            self.pending.prompt = _prompt_of(given)
            try:
                return original(*args, **kwargs)
            finally:
                self.pending.prompt = outer

        had = model.__dict__.get("generate")
        # A method, not a function: a deep copy of the model then gets one that is bound to the copy.
        model.generate = types.MethodType(generate, model)  # type: ignore[assignment]
        self.undo.append(functools.partial(model.__dict__.__setitem__, "generate", had) if had is not None
                         else functools.partial(model.__dict__.pop, "generate", None))

    def switch_off(self) -> None:
        while self.undo:
            self.undo.pop()()
        self.hidden.clear()

    # -- hooks

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if module is not self.parts.decoder:
            return None
        with self.idle:
            handler = self.handler
            if handler is None:
                return None
            thread = threading.get_ident()
            self.running[thread] = self.running.get(thread, 0) + 1
        if _or_config(module, kwargs, "output_attentions"):
            raise Refused("output_attentions=True can't be served while a recipe is on; attention is computed in parts.")
        name = cache_keyword(module)
        given, prompt = kwargs.get(name), getattr(self.pending, "prompt", None)
        if given is None and not (_or_config(module, kwargs, "use_cache") and not _checkpoints(module)):
            return None
        if given is None or (type(given) is DynamicCache and given.get_seq_length() == 0):
            return args, {**kwargs, name: _replacement(given, handler.new_cache(prompt))}
        if not handler.owns(given):
            raise Refused(f"the cache given ({type(given).__name__}, {given.get_seq_length()} tokens) was not made by this "
                          "recipe; expected none, an empty DynamicCache, or a cache made while the recipe is on.")
        if prompt is not None and getattr(given, "prompt", prompt) is None:  # made before it was known what is read
            given.prompt = prompt
        return None

    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if module is not self.parts.decoder:
            return
        with self.idle:
            thread = threading.get_ident()
            left = self.running.get(thread, 0) - 1
            if left > 0:
                self.running[thread] = left
            else:
                self.running.pop(thread, None)
            self.idle.notify_all()

    def _capture_hidden(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if module in _modules:
            found = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.hidden[threading.get_ident(), module.layer_idx] = found


def _or_config(module: nn.Module, kwargs: dict[str, Any], name: str) -> bool:
    """An argument of a decoder's forward, which falls back on its config."""
    value = kwargs.get(name)
    return bool(getattr(module.config, name, False) if value is None else value)


def _checkpoints(module: nn.Module) -> bool:
    """Whether layers run twice and drop their cache, as gradient checkpointing has it."""
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


def _replacement(given: Any, cache: Any) -> Any:
    """`cache`, set to what transformers asked of the empty cache it takes the place of."""
    if getattr(given, "offloading", False):
        raise Refused("an offloaded cache can't be combined with a recipe; leave cache_implementation unset.")
    if any(getattr(layer, "record_past", False) for layer in getattr(given, "layers", ())):
        cache.activate_past_recording()
    return cache


def _arguments(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` by name; wrappers that take ``*args`` pass the prompt on as its first."""
    given = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL and given.get(name):
            given["inputs"] = given.pop(name)[0]
    return given


def _prompt_of(given: dict[str, Any]) -> Prompt | None:
    embeds = given.get("inputs_embeds")
    if embeds is not None:
        return Prompt(None, embeds.shape[1])
    ids = given.get("inputs", given.get("input_ids"))
    return Prompt(ids, ids.shape[1]) if ids is not None else None


def cache_keyword(module: nn.Module) -> str:
    """The name under which a decoder's forward, or a layer's, takes its cache; it differs between versions of transformers."""
    return _cache_keyword(type(module))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _cache_keyword(cls: Any) -> str:
    return "cache" if "cache" in inspect.signature(cls.forward).parameters else "past_key_values"


_attached: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_held: dict[int, tuple[Any, str | None, int]] = {}
"""Configs that name our attention now: the config, what it named before, and how many models need it so."""


def _hold(config: Any) -> None:
    """Remember what `config` names. Models may share one config object; the last to leave puts it back."""
    _, old, holders = _held.get(id(config), (config, config._attn_implementation_internal, 0))
    _held[id(config)] = config, old, holders + 1


def _release(config: Any) -> None:
    _, old, holders = _held.pop(id(config))
    if holders > 1:
        _held[id(config)] = config, old, holders - 1
    else:
        config._attn_implementation_internal = old


_turns: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()  # type: ignore[valid-type]


@contextlib.contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """One thread at a time, for what enters and leaves blocks of its own: threads that cross there would leave them in
    another order than entered."""
    with _lock:
        own = _turns.setdefault(model, threading.RLock())
    with own:
        yield


@contextlib.contextmanager
def attached(model: nn.Module, handler: Handler, *, patience: float = 60.0) -> Iterator[Parts]:
    """Run `model` under `handler` until the block ends; afterwards the model is what it was.

    Blocks may nest (the inner handler rules) but not cross.

    Args:
        patience: seconds to wait on leaving for a forward that another thread still runs.

    Raises:
        Refused: the model can't be hooked.
        RuntimeError: blocks were left in another order than entered, or a forward didn't end in time.
    """
    token = object()
    with _lock:
        state = _attached.get(model)
        if state is None:
            state = _attached[model] = _Attached(model)
        state.stack.append((token, handler))
        if len(state.stack) == 1:
            try:
                state.switch_on()
            except BaseException:
                state.stack.pop()
                state.switch_off()
                del _attached[model]
                raise
        state.watch_hidden()
        state.follow_drops()
    try:
        yield state.parts
    finally:
        _leave(model, state, token, patience)


def _leave(model: nn.Module, state: _Attached, token: object, patience: float) -> None:
    with state.idle:
        finished = state.idle.wait_for(state.alone, timeout=patience)
        with _lock:
            crossed = state.stack[-1][0] is not token
            for _, handler in (entry for entry in state.stack if entry[0] is token):
                handler.left()
            state.stack = [entry for entry in state.stack if entry[0] is not token]
            if not state.stack:
                state.switch_off()
                _attached.pop(model, None)
    if crossed:
        raise RuntimeError("recipes were left in another order than entered; leave the inner `with` block first.")
    if not finished:
        raise RuntimeError(f"a forward was still running {patience:.0f} s after its recipe was left; join the thread first.")
