"""A small byte-level tokenizer with a chat template for the tests of tasks: trained in a second, gives text back."""

from __future__ import annotations

import functools

TEMPLATE = ("{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}")


@functools.lru_cache(maxsize=1)
def tiny_tokenizer():
    """Byte-level BPE with 1,200 entries trained on a slice of the pydoc topics."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["<|turn|>", "<|end|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([topics[key] for key in sorted(topics)[:12]], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|turn|>", eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made
