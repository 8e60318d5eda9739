"""What both sides of a comparison do alike: load the model, read a prompt, write tokens, and take the time.

Each side is a script of its own process, ``python peers/NAME_side.py JOB OUT``, because the two packages need different
versions of transformers. It names a function that opens a method on the model; the loop that reads and writes is the
one below for everybody, dense included, so nothing but the method differs. This file knows neither package.

The job (JSON): ``folder`` of the model, ``dtype``, ``threads``, ``prompts`` (token ids by name), ``warm_up`` tokens,
and ``runs``, each ``{method, ratio, prompt, new_tokens, record}``. The answer: OUT/result.json, and for runs that
record OUT/INDEX.safetensors with ``kept`` (layers, KV heads, n; ascending) and ``scores`` (layers, KV heads, tokens).
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

DENSE = "dense"
"""The method that is none: transformers as it is, with its own cache."""


@dataclass
class Opened:
    """A method that is on the model now."""

    cache: Any
    """What the model is to fill."""
    recorded: Callable[[], dict[str, Tensor]] | None = None
    """After the prompt was read: which entries were kept, and by which scores."""


Open = Callable[[Any, Tensor, str, float, bool], AbstractContextManager[Opened]]
"""``open(model, ids (1,N), method, share evicted, record)``."""


def forward(model: Any, ids: Tensor, cache: Any, start: int) -> int:
    """Read `ids` (1,T) at positions from `start` on; the most likely next token."""
    keyword = "cache" if "cache" in inspect.signature(type(model.model).forward).parameters else "past_key_values"
    positions = torch.arange(start, start + ids.shape[1])[None]
    out = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{keyword: cache})
    return int(out.logits[0, -1].argmax())


@torch.inference_mode()
def run(model: Any, ids: Tensor, wanted: dict[str, Any], method: Open) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One prompt (1,N) read and continued greedily: seconds and tokens, and what was recorded."""
    length, record = ids.shape[1], bool(wanted.get("record"))
    begin = time.perf_counter()
    with method(model, ids, wanted["method"], wanted["ratio"], record) as opened:
        tokens = [forward(model, ids, opened.cache, 0)]
        read = time.perf_counter()
        found = opened.recorded() if record and opened.recorded else {}
        resumed = time.perf_counter()
        for position in range(length, length + wanted["new_tokens"] - 1):
            tokens.append(forward(model, torch.tensor([[tokens[-1]]]), opened.cache, position))
        done = time.perf_counter()
    return {"prefill_s": read - begin, "decode_s": done - resumed, "tokens": tokens}, found


def main(method: Open, versions: dict[str, str]) -> None:
    """Do the job that the command line names."""
    job, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=getattr(torch, job["dtype"]), local_files_only=True).eval()
    prompts = {name: torch.tensor([ids]) for name, ids in job["prompts"].items()}
    rows: list[dict[str, Any]] = []
    once = {wanted["method"]: wanted for wanted in job["runs"]} if job["warm_up"] else {}
    for wanted in once.values():
        run(model, prompts[wanted["prompt"]][:, : job["warm_up"]], {**wanted, "new_tokens": 4, "record": False}, method)
    for i, wanted in enumerate(job["runs"]):
        row, found = run(model, prompts[wanted["prompt"]], wanted, method)
        rows.append(row)
        if found:
            save_file({name: t.contiguous() for name, t in found.items()}, out / f"{i}.safetensors")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, **versions}
    (out / "result.json").write_text(json.dumps({"versions": versions, "rows": rows}), encoding="utf-8")
