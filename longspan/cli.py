"""The command line. Heavy imports happen inside the commands, so that `longspan --help` answers at once.

Standard output carries the result (one JSON document with ``--json``), standard error progress and errors.
Exit codes: 0 done, 1 a run failed, 2 the request can't be served as written.
"""

from __future__ import annotations

import os
import sys

import typer

from longspan.commands.ask import ask
from longspan.commands.compare import compare
from longspan.commands.dependence import dependence
from longspan.commands.harness import harness
from longspan.commands.methods import methods
from longspan.commands.plan import plan
from longspan.commands.profile import profile
from longspan.commands.reproduce import reproduce
from longspan.commands.sweep import sweep
from longspan.commands.tables import tables
from longspan.commands.tasks import tasks
from longspan.commands.train import train
from longspan.registry import Refused

app = typer.Typer(
    name="longspan", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""More context for less memory and time, and what that costs in quality, measured.

A *recipe* composes methods: `snapkv(budget=0.2)` keeps a fifth of the key-value cache,
`xattention + snapkv @ adakv(budget=0.2)` also reads the prompt sparsely, `full` changes nothing.
See `longspan methods` for all parts and their knobs.""",
)

for verb in (compare, ask, methods, tasks, reproduce, sweep, plan, profile, tables, dependence, train, harness):
    app.command()(verb)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except Refused as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted; with --out the rows measured so far are kept.", 1)
    except Exception as error:
        if os.environ.get("LONGSPAN_DEBUG"):
            raise
        fail(f"{type(error).__name__}: {error} (set LONGSPAN_DEBUG=1 for the traceback)", 1)


def fail(sentence: str, code: int) -> None:
    print(f"longspan: {sentence}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
