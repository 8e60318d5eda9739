"""Drafts inside transformers' own `generate`: what it calls in place of its sampling loop while a recipe has a draft.

`generate` has prepared everything by then: the prompt, processors of the logits (temperature, top-p, penalties), criteria
that end the text, a streamer. Rows of a batch are written one after another, each with a cache of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from longspan.decoding.base import Draft, Target
from longspan.decoding.law import Law
from longspan.decoding.noise import Noise
from longspan.decoding.plain import read
from longspan.decoding.speculative import write
from longspan.models.call import Prompt
from longspan.registry import Refused


class DraftedGenerate:
    """The loop of one call under a recipe's run: ``model.generate(custom_generate=this)``.

    Args:
        given: arguments of that call. transformers keeps some of them, the streamer too, from a loop that isn't its own.
    """

    def __init__(self, run: Any, draft: Draft, attach: Callable[[nn.Module], AbstractContextManager[Any]],
                 given: dict[str, Any]) -> None:
        self.run, self.draft, self.attach = run, draft, attach
        self.streamer, self.assistant = given.get("streamer"), given.get("assistant_model")

    @staticmethod
    def arguments(given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """`kwargs` with stop strings as a criterion: they need the tokenizer, which `generate` loses on the way here."""
        config = given.get("generation_config")
        stop = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
        if not stop or kwargs.get("tokenizer") is None:
            return kwargs
        own = StopStringCriteria(kwargs["tokenizer"], stop)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("stop_strings", "tokenizer")}
        if getattr(config, "stop_strings", None):
            kwargs["generation_config"] = copy.deepcopy(config)
            kwargs["generation_config"].stop_strings = None
        return kwargs | {"stopping_criteria": StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), own])}

    @torch.inference_mode()
    def __call__(self, model: Any, input_ids: Int[Tensor, "B P"], logits_processor: Any, stopping_criteria: Any,
                 generation_config: Any, **kwargs: Any) -> Any:
        self._check(generation_config, input_ids, kwargs)
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values", kwargs.get("cache"))
        rows = []
        for n, row in enumerate(input_ids):
            real = row if mask is None or mask.dim() != 2 else row[mask[n, : len(row)].bool()]
            rows.append(self._row(model, real.tolist(), row[: len(row) - len(real)].tolist(), cache, logits_processor,
                                  stopping_criteria, generation_config))
        if self.streamer is not None:
            self.streamer.end()
        pad = generation_config._pad_token_tensor
        written = _padded(rows, 0 if pad is None else int(pad), input_ids.device)
        sequences = torch.cat([input_ids, written], 1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=self.run.cache)  # type: ignore[arg-type]
        return sequences

    def _row(self, model: Any, ids: list[int], pads: list[int], given: Any, processors: Any, criteria: Any, config: Any
             ) -> list[int]:
        """The tokens after one row's prompt. Processors and criteria are shown its padding too, as in a batch."""
        prompt = torch.tensor([ids], device=model.device)
        known = 0 if given is None else given.get_seq_length()
        cache = given if known else self.run.new_cache(Prompt(prompt, len(ids)))
        logits = read(model, prompt[:, known:], cache)[:, 0]

        def process(tokens: Sequence[int], row: Tensor) -> Tensor:
            return processors(torch.tensor([[*pads, *tokens]], device=row.device), row[None])[0]

        def until(tokens: Sequence[int]) -> bool:
            if self.streamer is not None:
                self.streamer.put(torch.tensor(tokens[-1:]))
            return bool(criteria(torch.tensor([[*pads, *tokens]], device=model.device), None).all())

        law = Law(temperature=1.0 if config.do_sample else 0.0, process=process if len(processors) else None)
        # The caller's random state decides, as it does for plain sampling.
        seed = int(torch.randint(1 << 62, ())) if config.do_sample else 0
        target = Target(model, cache, list(ids), law, Noise((seed,)), attach=self.attach)
        return write(target, self.draft, logits, int(config.max_length) - len(pads) - len(ids), (), until=until).ids

    def _check(self, config: Any, ids: Tensor, kwargs: dict[str, Any]) -> None:
        """Refuse what drafts can't serve."""
        if (config.num_beams or 1) > 1:
            raise Refused(f"num_beams={config.num_beams} can't be combined with {self.draft}, which writes one text a row; leave "
                          "it unset.")
        if getattr(config, "guidance_scale", None) not in (None, 1):
            raise Refused(f"guidance_scale={config.guidance_scale} can't be combined with {self.draft}: it reads the text a "
                          "second time, token by token; leave it unset.")
        if len(ids) > 1 and getattr(config, "encoder_repetition_penalty", None) not in (None, 1):
            raise Refused(f"encoder_repetition_penalty={config.encoder_repetition_penalty} looks at all {len(ids)} rows at once, "
                          f"and {self.draft} writes them one after another; give one row at a time.")
        for name in ("output_scores", "output_logits", "output_hidden_states"):
            if getattr(config, name, None):
                raise Refused(f"{name}=True can't be served while {self.draft} writes several tokens at a time; leave it unset.")
        if self.assistant is not None or config.prompt_lookup_num_tokens:
            raise Refused(f"generate was given a draft of its own beside {self.draft}; expected one of the two.")
        if kwargs.get("inputs_embeds") is not None:
            raise Refused(f"inputs_embeds can't be combined with {self.draft}, which looks at tokens; give input_ids.")
        if self.streamer is not None and len(ids) > 1:
            raise Refused(f"a streamer takes one row, and there are {len(ids)}; give one prompt at a time.")
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        if cache is not None and cache.get_seq_length() and len(ids) > 1:
            raise Refused(f"{self.draft} writes rows one after another, so a cache of {len(ids)} rows that holds tokens can't be "
                          "gone on with; give one row, or no cache.")


def _padded(rows: list[list[int]], pad: int, device: torch.device) -> Int[Tensor, "B N"]:
    width = max(map(len, rows))
    filled = [[*row, *[pad] * (width - len(row))] for row in rows]
    return torch.tensor(filled, device=device, dtype=torch.int64).view(len(rows), width)
