"""``longspan ask``: a question about a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from longspan.registry import Refused
from longspan.terminal import Dtype, Json, Load, Model, choose_recipe, load_model, own_methods, read_text, show


def ask(
    file: Annotated[Path, typer.Argument(help="A text file (UTF-8).")],
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="How to read the file and what to keep.")] = "full",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    model: Model = None, dtype: Dtype = None, load: Load = None, as_json: Json = False,
) -> None:
    """Read a file under a recipe, compress it, and answer a question about it."""
    own_methods(load)
    text = read_text(file)
    if not question.strip():
        raise Refused("the question is empty; expected some text.")
    from longspan.recipe import Recipe

    made = Recipe.parse(recipe) if recipe.strip() != "auto" else None
    loaded = load_model(model, dtype)
    from longspan.context import open_context
    from longspan.context.document import check_window

    if made is None:
        made = choose_recipe(loaded, len(loaded.tokenizer(text)["input_ids"]))
    asked = loaded.tokenizer(question)["input_ids"]
    check_window(loaded, len(loaded.tokenizer(text)["input_ids"]) + len(asked) + max_new_tokens,
                 "document, question and answer together", made)
    context = open_context(loaded, text, made)
    answer = context.ask(question, max_new_tokens)
    if as_json:
        show({"model": loaded.name, "recipe": str(made), "question": question, "answer": answer.text,
              "read_s": context.read_s, "ttft_s": answer.ttft_s, "tokens_per_s": answer.tokens_per_s,
              "achieved": context.achieved.as_json()})
        return
    print(answer.text)
    if not answer.text:
        what = f"{len(answer.ids)} tokens, all white space" if answer.ids else "nothing"
        print(f"longspan: the model wrote {what}.", file=sys.stderr)
    from longspan.reporting import human_bytes

    held = context.achieved
    print(f"{loaded.name} · {made} · {held.seen:,} tokens read in {context.read_s:.1f} s · "
          f"{human_bytes(held.cache_bytes)} of {human_bytes(held.full_bytes)} held", file=sys.stderr)
