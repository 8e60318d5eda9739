"""What the model is shown."""

from longspan.cache.reuse import Library
from longspan.context.diffusion import DiffusionContext
from longspan.context.document import Answer, Context
from longspan.context.reused import ReusedContext, ask, open_context
from longspan.context.shared import read_once, shareable

__all__ = ["Answer", "Context", "DiffusionContext", "Library", "ReusedContext", "ask", "open_context", "read_once", "shareable"]
