"""Dense denoising: every step reads the whole prefix. What every other way is compared with, and what `full` does."""

from __future__ import annotations

from longspan.decoding.blocks import Denoising
from longspan.registry import method


@method("dense-blocks", kind="denoising", paper="arXiv:2503.09573",
        summary="Every denoising step of a block attends to the whole prefix.")
class DenseBlocks(Denoising):
    """The prefix's part is computed anew in every step and layer, B(N+B)d a head."""
