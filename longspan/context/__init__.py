"""What the model is shown."""

from longspan.context.document import Answer, Context

__all__ = ["Answer", "Context"]
