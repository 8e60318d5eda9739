"""The model class `longspan` of lm-evaluation-harness: its own `hf` model, read and answered under a recipe.

Tokenizing, chat templates, stop strings, sampling, windows and left truncation are inherited from `hf`, so that the recipe
`full` gives its scores. Two things differ. A likelihood is that of a continuation after its context has been read
and compressed; requests with the same context (the options of a question) share one reading. Generation runs transformers'
`generate` with the recipe on.

A prompt of the harness is one text, so the question in it is compressed with the rest: scores are those of compression after
the question. `loglikelihood_rolling` scores windows behind one token of context, as `hf` does; recipes that compress at the
prompt's end have nothing to drop there, and the bytes reported say so.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from longspan.context import Context, open_context
from longspan.decoding import read
from longspan.evaluation.harness.arguments import recipe_arguments, split_arguments
from longspan.evaluation.harness.held import Ledger, at_prompt, by_task
from longspan.models import Loaded, load
from longspan.models.load import context_window
from longspan.recipe import Recipe
from longspan.registry import Refused

TokenRequest = tuple[Any, list[int], list[int]]


@register_model("longspan")
class LongspanLM(HFLM):
    """A model under a recipe.

    Args:
        model: what `longspan.load` takes, or what it returned; the bundled model if left out.
        recipe: a recipe or its text; `;` may stand for its commas.
        options: any other argument of the harness's `hf` model, such as max_length or add_bos_token.

    Raises:
        Refused: an unknown model, dtype or recipe, or a recipe that doesn't read a prompt from start to end.
    """

    def __init__(self, model: Loaded | str | None = None, recipe: Recipe | str = "full", dtype: str | None = None,
                 pretrained: str | None = None, device: str | None = None, batch_size: int | str = 1, **options: Any) -> None:
        if model is not None and pretrained is not None:
            raise Refused("model and pretrained name the same thing; give one of them.")
        chosen = model if model is not None else pretrained
        self.loaded = chosen if isinstance(chosen, Loaded) else load(chosen, dtype=dtype, device=device)
        self.recipe = Recipe.parse(recipe.replace(";", ",")) if isinstance(recipe, str) else recipe
        if self.recipe.reuse is not None or getattr(self.loaded.model, "denoises_blocks", False):
            raise Refused(f"recipe {str(self.recipe)!r} on {self.loaded.name} doesn't read a prompt from its start to its end, "
                          "as the harness needs it; expected a causal model, and a recipe that selects, compresses or stores.")
        self.ledger = Ledger()
        native = context_window(self.loaded.model)
        if self.recipe.window(native) != native:
            options.setdefault("max_length", self.recipe.window(native))
        super().__init__(pretrained=self.loaded.model, tokenizer=self.loaded.tokenizer, batch_size=batch_size, **options)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> LongspanLM:
        from lm_eval.utils import handle_arg_string

        given = {name: value if name == "recipe" else handle_arg_string(value)
                 for name, value in split_arguments(arg_string).items()}
        return cls.create_from_arg_obj(given, additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LongspanLM:
        more = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**recipe_arguments(arg_dict) | more)

    # -- what the harness asks, task by task

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        parent = super().loglikelihood
        return by_task(self.ledger, lambda some: parent(some, disable_tqdm=disable_tqdm), requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        parent = super().loglikelihood_rolling
        return by_task(self.ledger, lambda some: parent(some, disable_tqdm=disable_tqdm), requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        parent = super().generate_until
        return by_task(self.ledger, lambda some: parent(some, disable_tqdm=disable_tqdm), requests)

    # -- likelihoods

    def _loglikelihood_tokens(self, requests: list[TokenRequest], disable_tqdm: bool = False,
                              override_bs: int | None = None) -> list[tuple[float, bool]]:
        contexts = [tuple(self._fitting(context, continuation)) for _, context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        context: Context | None = None
        for i in sorted(range(len(requests)), key=lambda i: (-len(contexts[i]), contexts[i])):
            text, _, continuation = requests[i]
            if context is None or tuple(context.ids) != contexts[i]:
                opened = open_context(self.loaded, list(contexts[i]), self.recipe)
                assert isinstance(opened, Context)  # what opens otherwise was refused at the start
                context = opened
            found[i] = self._scored(context, continuation)
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, found[i])
        return found

    def _fitting(self, context: list[int], continuation: list[int]) -> list[int]:
        """The context's right end that fits; a continuation's last token is scored but not read."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise Refused(f"a continuation of {len(continuation)} tokens, but the model reads at most {self.max_length}; "
                          "expected a shorter one, or a longer window.")
        if len(context) > room:
            self.ledger.cut(1)
        return context[-room:]

    def _scored(self, context: Context, continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood (nats), and whether each token is the likeliest; the context is afterwards as it was."""
        ids = torch.tensor([continuation], device=self.loaded.model.device)
        assert context.logits is not None
        logits = context.logits[:, None]
        with context._on() as run, context._taken_back():
            if len(continuation) > 1:
                after = read(self.loaded.model, ids[:, :-1], context.cache, last=len(continuation) - 1)
                logits = torch.cat([logits, after], 1)
            # One token of context leaves nothing to compress at its end: what counts is what is held at the window's end.
            self.ledger.add(run.achieved if len(context.ids) == 1 else context.achieved)
        scores = logits.log_softmax(-1).gather(-1, ids[..., None])
        return float(scores.sum()), bool((logits.argmax(-1) == ids).all())

    # -- generation

    def tok_batch_encode(self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None,
                         truncation: bool = False) -> tuple[Tensor, Tensor]:
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len:
            self.ledger.cut(int((mask.sum(-1) > left_truncate_len).sum()))
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        with self.recipe.on(self.loaded.model) as run:
            written = super()._model_generate(context, max_length, stop, **options)
            mask = options.get("attention_mask")
            tokens = None if mask is None else float(mask.sum(-1).float().mean())
            self.ledger.add(at_prompt(run.achieved, context.shape[1]), rows=len(context), tokens=tokens)
        return written
