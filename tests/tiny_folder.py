"""A model folder that every command can run on in no time: a tiny random model with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

from tiny_models import tiny
from tiny_tokenizer import tiny_tokenizer


def write_tiny_folder(folder: Path, *, positions: int = 4096, seed: int = 0) -> Path:
    """Save model and tokenizer to `folder` and return it."""
    tokenizer = tiny_tokenizer()
    model = tiny("llama", seed=seed, vocab=len(tokenizer), positions=positions, eos_token_id=tokenizer.eos_token_id,
                 pad_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
