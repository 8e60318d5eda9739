"""The model: loading it, finding its parts, and hooking into its attention."""

from longspan.models.call import Handler, LayerCall, Prompt, plain_attention
from longspan.models.hook import attached
from longspan.models.load import Loaded, load
from longspan.models.parts import Parts, find_parts, kv_bytes_per_token

__all__ = ["Handler", "LayerCall", "Loaded", "Parts", "Prompt", "attached", "find_parts", "kv_bytes_per_token", "load",
           "plain_attention"]
