"""What the model is shown."""

from longspan.context.document import Answer, Context
from longspan.context.shared import read_once, shareable

__all__ = ["Answer", "Context", "read_once", "shareable"]
