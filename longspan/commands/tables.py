"""``longspan tables``: questions over tables with answers by SQL, for training and for tests of long context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.registry import Refused
from longspan.terminal import Dtype, Json, Model, load_model, progress_bar, quiet_libraries, show


def tables(
    out: Annotated[Path, typer.Option(help="File to write, a JSON line for each question.")],
    questions: Annotated[int, typer.Option("--questions", "-n", min=1, help="Questions to draw.")] = 200,
    length: Annotated[int, typer.Option("--length", "-l", min=1, help="Tokens of a prompt and its answer, within 2%.")] = 4096,
    family: Annotated[str, typer.Option(help="retrieval, computation, association, or mixed.")] = "mixed",
    serialisation: Annotated[str, typer.Option(help="How tables are written: markdown, csv, json or pairs.")] = "markdown",
    language: Annotated[str, typer.Option(help="Language of tables and questions: en or zh.")] = "en",
    tables: Annotated[int | None, typer.Option(help="Tables shown, 1 to 30; drawn if left out.")] = None,
    cells: Annotated[int | None, typer.Option(help="About how many cells a question needs; drawn broadly if left out.")] = None,
    reasoning: Annotated[int, typer.Option(help="Tokens for reasoning and answer; 0: the answer is written at once.")] = 0,
    csv: Annotated[list[Path] | None, typer.Option(help="A CSV file of your own to ask about; other tables only fill.")] = None,
    pass_rate: Annotated[int | None, typer.Option(help="Sample so many answers to each question and keep those that are right "
                                                  "sometimes, not always.")] = None,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampled answers.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of questions and answers.")] = 0,
    model: Model = None, dtype: Dtype = None, as_json: Json = False,
) -> None:
    """Write questions over tables whose answers come from executing SQL. `--model` says whose tokens count, and who answers.

    Example: `longspan tables --questions 200 --length 4096 --out questions.jsonl`, with `--pass-rate 8` to filter by difficulty
    """
    from longspan.evaluation.tables.command import Filter, write_questions
    from longspan.evaluation.tables.filtering import check_rollouts
    from longspan.evaluation.tasks.tablelong import TableLong

    if commas := [file for file in csv or [] if "," in str(file)]:
        raise Refused(f"--csv {str(commas[0])!r}: a comma in the name; expected a file without one.")
    task = TableLong(family=family, serialisation=serialisation, tables=tables, cells=cells, language=language,
                     reasoning=reasoning, csv=",".join(map(str, csv or [])))
    task.text  # noqa: B018 - refuses files that can't be read before a model is loaded
    if pass_rate is not None:
        check_rollouts(pass_rate)
    loaded = load_model(model, dtype) if pass_rate is not None else None
    tokenizer = loaded.tokenizer if loaded is not None else read_tokenizer(model)
    chosen = None if loaded is None or pass_rate is None else Filter(loaded, pass_rate, temperature, seed)
    with progress_bar("questions") as tick:
        found = write_questions(out, task, tokenizer, questions, length, seed=seed, filter=chosen, progress=tick)
    if as_json:
        show({"out": str(out), "task": str(task), "length": length} | found)
        return
    print(f"{out}: {found['kept']} of {found['drawn']} questions · {task} · {length:,} tokens")
    for name in ("cells_needed", "tables", "tokens"):
        low, middle, high = found[name]
        print(f"{name.replace('_', ' ')}: {low:g} to {high:g}, median {middle:g}")
    for name, n in found["families"].items():
        print(f"{name}: {n}" + (f" questions, P {found['P'][name]:.3f}" if chosen else " questions"))


def read_tokenizer(model: str | None) -> Any:
    """A model's tokenizer, without its weights where it comes in a folder of transformers."""
    from transformers import AutoTokenizer

    from longspan.models import load
    from longspan.models.load import resolve

    quiet_libraries()
    folder, _ = resolve(model)
    try:
        return AutoTokenizer.from_pretrained(folder, padding_side="left")
    except (OSError, ValueError):
        return load(model).tokenizer
