"""The Triton version, run in Triton's interpreter and compiled for a GPU that need not be here."""

from __future__ import annotations

import pytest
import torch
from triton_process import needs_triton, run

from longspan.kernels import block_sparse_triton
from longspan.kernels.block_sparse import block_sparse_attention
from longspan.kernels.plan import ReadPlan


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(block_sparse_triton, "available", lambda: False)
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        block_sparse_attention(x, x, x, ReadPlan.dense(q_len=4, k_len=4), backend="triton")


def test_tiles_are_powers_of_two_that_cover_a_block():
    assert block_sparse_triton.tile_sizes(128, 128, 64) == {"ROWS": 128, "KEYS": 64, "DIM": 64}
    assert block_sparse_triton.tile_sizes(1, 5, 40) == {"ROWS": 16, "KEYS": 16, "DIM": 64}
    assert block_sparse_triton.tile_sizes(300, 48, 128) == {"ROWS": 128, "KEYS": 64, "DIM": 128}


@needs_triton
def test_the_interpreter_agrees_with_the_definition():
    """float32 and float16 (the interpreter can't multiply bfloat16), odd lengths, groups, columns, padding, chunks."""
    run("""
        import torch
        from longspan.kernels.block_sparse import block_sparse_attention
        from longspan.kernels.plan import ReadPlan, forced_blocks

        draw = torch.Generator().manual_seed(0)
        for T, S, D, q_block, k_block, columns, padded, causal, dtype in (
            (40, 75, 20, 16, 24, False, False, True, torch.float32),
            (21, 50, 16, 32, 16, True, True, True, torch.float32),
            (150, 150, 16, 144, 70, False, False, True, torch.float16),
            (17, 40, 16, 8, 16, True, True, False, torch.float32),
        ):
            q, k, v = (torch.randn(2, h, n, D, generator=draw).to(dtype) for h, n in ((4, T), (2, S), (2, S)))
            forced = forced_blocks(T, S, q_block, k_block)
            mask = (torch.rand(2, 4, *forced.shape, generator=draw) < 0.3) | forced
            singles = torch.rand(2, 4, S, generator=draw) < 0.15 if columns else None
            plan = ReadPlan.from_mask(mask, q_len=T, k_len=S, q_block=q_block, k_block=k_block, columns=singles,
                                      causal=causal)
            valid = torch.ones(2, S, dtype=torch.bool)
            valid[0, : S // 4] = not padded
            valid[1, -3:] = not padded
            asked = {"valid": valid, "return_lse": True}
            out, lse = block_sparse_attention(q, k, v, plan, backend="triton", **asked)
            expected, expected_lse = block_sparse_attention(q, k, v, plan, backend="reference", **asked)
            close = 3e-6 if dtype == torch.float32 else 3e-3
            assert torch.allclose(out, expected, atol=close), (T, (out - expected).abs().max())
            assert torch.allclose(lse, expected_lse, atol=1e-5)
    """, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_it_compiles_for_a_hopper_gpu():
    said = run("""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from longspan.kernels.block_sparse_triton import COLUMN_TILE, block_sparse_kernel as kernel, tile_sizes

        constants = dict(D=64, Q_BLOCK=128, K_BLOCK=128, COLUMNS=True, PADDED=True, COLUMN_TILE=COLUMN_TILE,
                         **tile_sizes(128, 128, 64))
        pointers = dict(q="bf16", k="bf16", v="bf16", out="bf16", lse="fp32", offsets="i64", blocks="i32",
                        column_offsets="i64", columns="i32", listed="u8", valid="u8")
        def kind(name):
            if name in constants:
                return "constexpr"
            return "*" + pointers[name] if name in pointers else "fp32" if name == "scale2" else "i32"
        signature = {name: kind(name) for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(len(built.asm["cubin"]), "wgmma" in built.asm["ptx"])
    """)
    size, tensor_cores = said.split()
    assert int(size) > 10_000 and tensor_cores == "True"
