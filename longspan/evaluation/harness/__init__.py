"""Every task of lm-evaluation-harness, on any model under any recipe.

Importing this package registers the model class `longspan` with the harness, where that is installed:
``simple_evaluate(model="longspan", model_args="model=FOLDER,recipe=snapkv(budget=0.2)", …)``.
"""

from longspan.evaluation.harness.arguments import recipe_arguments, split_arguments
from longspan.evaluation.harness.held import Held, Ledger, by_task
from longspan.evaluation.harness.require import harness

__all__ = ["Held", "Ledger", "by_task", "harness", "recipe_arguments", "split_arguments"]

try:
    from longspan.evaluation.harness.model import LongspanLM

    __all__ += ["LongspanLM"]
except ImportError as error:  # not installed, or a part of it isn't: `harness()` says which
    if (error.name or "").startswith("longspan"):
        raise
