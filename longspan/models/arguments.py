"""Arguments of transformers' `generate` that no recipe can serve, refused before anything runs."""

from __future__ import annotations

from typing import Any

from longspan.registry import Refused


def refuse_arguments(arguments: dict[str, Any], *, compresses: bool, subsets: bool = False) -> None:
    """Arguments of `generate` that no recipe can serve: one sentence each."""
    config = arguments.get("generation_config")
    read = lambda name: arguments.get(name, getattr(config, name, None))  # noqa: E731
    implementation = read("cache_implementation")
    if implementation not in (None, "dynamic", "hybrid"):  # transformers reads "hybrid", an old default, as unset
        raise Refused(f"cache_implementation={implementation!r} can't be combined with a recipe; leave it unset.")
    if read("output_attentions"):
        raise Refused("output_attentions=True can't be served while a recipe is on; attention is computed in parts.")
    if subsets and read("prefill_chunk_size"):
        raise Refused("prefill_chunk_size can't be combined with a token subset, which is chosen for a whole prompt; leave it "
                      "unset.")
    if compresses and read("use_cache") is False:
        raise Refused("use_cache=False leaves nothing to compress; drop it, or use the recipe full.")
    ids = arguments.get("inputs", arguments.get("input_ids"))
    given = ids if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    if given is not None and given.shape[1] == 0:
        raise Refused("the prompt is empty; expected at least one token.")
    mask = arguments.get("attention_mask")
    if mask is not None and mask.dim() == 2 and bool((mask.sum(1) == 0).any()):
        row = int((mask.sum(1) == 0).nonzero()[0])
        raise Refused(f"row {row} of the batch is padding only; expected at least one real token in every row.")
    cache = arguments.get("past_key_values", arguments.get("cache"))
    read_before = 0 if cache is None else cache.get_seq_length()
    if read_before and read("prefill_chunk_size"):
        raise Refused("prefill_chunk_size can't be combined with a cache that already holds tokens; leave it unset.")
    columns = None if given is None else given.shape[1] if mask is None else mask.shape[-1]
    if read_before and columns is not None and columns <= read_before:
        raise Refused(f"the cache holds {read_before} tokens, but ids and attention mask tell of {columns} only; give all "
                      "ids so far and the new ones, or the new ids with an attention mask that has a column for every token.")
