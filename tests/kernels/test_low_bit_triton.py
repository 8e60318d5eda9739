"""The Triton version of the low-bit estimate, run in Triton's interpreter and compiled for a GPU that need not be here."""

from __future__ import annotations

import pytest
import torch
from triton_process import needs_triton, run

from longspan.kernels import low_bit_triton
from longspan.kernels.low_bit import LowBit, important_blocks


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    codes = LowBit(torch.zeros(1, 1, 16, 16, dtype=torch.int8), torch.ones(1, 1, 16))
    at = torch.zeros(1, 1, dtype=torch.int64)
    given = (codes, codes, torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), at, at + 1)
    monkeypatch.setattr(low_bit_triton, "available", lambda: False)
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        important_blocks(*given, q_block=16, k_block=16, backend="triton")
    monkeypatch.setattr(low_bit_triton, "available", lambda: True)
    exact = LowBit(codes.codes.float(), codes.scales)
    with pytest.raises(ValueError, match="int8 codes"):
        important_blocks(exact, exact, *given[2:], q_block=16, k_block=16, backend="triton")


def test_tiles_are_powers_of_two_that_cover_a_block():
    assert low_bit_triton.tile_sizes(64, 32, 64) == {"ROWS": 64, "KEYS": 32, "DIM": 64}
    assert low_bit_triton.tile_sizes(8, 8, 20) == {"ROWS": 16, "KEYS": 16, "DIM": 32}
    assert low_bit_triton.tile_sizes(96, 48, 80) == {"ROWS": 128, "KEYS": 64, "DIM": 128}


@needs_triton
def test_the_interpreter_agrees_with_the_definition():
    """Both kinds of scales, odd lengths, groups, keys left out, rows that ask for nothing or for everything, huge biases."""
    run("""
        import math, torch
        from longspan.kernels.low_bit import LowBit, important_blocks, largest_excess, quantise

        draw = torch.Generator().manual_seed(0)
        for T, S, D, q_block, k_block, groups, size in (
            (70, 150, 32, 64, 32, "per_thread", 1.0), (21, 96, 20, 16, 16, "per_token", 1.0),
            (40, 75, 64, 32, 8, "per_thread", 1.0), (33, 64, 32, 32, 32, "per_thread", 1e6),
        ):
            q, k = (torch.randn(2, h, n, D, generator=draw) for h, n in ((4, T), (2, S)))
            q = q + size
            mean, nothing = q.mean(2), torch.zeros(2, 4, 1, D)
            codes, _ = quantise(q, mean, nothing, groups=groups)
            keys, bias = quantise(k, k.mean(2), mean.view(2, 2, 2, D), groups=groups, k_block=k_block)
            bias = bias.flatten(1, 2)
            limit = (codes.values @ keys.values.repeat_interleave(2, 1).mT + bias[:, :, None]).quantile(0.995, -1)
            bias[0, :, 10:20], limit[1, 0], limit[0, 1, 3] = -math.inf, math.inf, -math.inf
            n_q, n_k = -(-T // q_block), S // k_block
            begin = torch.zeros(2, n_q, dtype=torch.int64)
            end = (torch.arange(n_q) + n_k - n_q + 1).clamp(0, n_k).expand(2, -1).contiguous()
            given = (codes, keys, bias, limit, begin, end)
            found = important_blocks(*given, q_block=q_block, k_block=k_block, backend="triton")
            expected = important_blocks(*given, q_block=q_block, k_block=k_block, backend="reference")
            close = largest_excess(*given, q_block, k_block).abs() < 1e-4 * size
            assert torch.equal(found | close, expected | close), (T, groups, (found != expected).sum())
            assert expected.any() and not expected.all()
    """, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_it_compiles_for_a_hopper_gpu():
    said = run("""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from longspan.kernels.low_bit_triton import low_bit_kernel as kernel, tile_sizes

        constants = dict(D=128, Q_BLOCK=64, K_BLOCK=32, ROUNDED=True, **tile_sizes(64, 32, 128))
        pointers = dict(q="i8", k="i8", k_scale="fp32", bias="fp32", q_inverse="fp32", limit="fp32", begin="i64", end="i64",
                        out="u8")
        def kind(name):
            return "constexpr" if name in constants else "*" + pointers[name] if name in pointers else "i32"
        signature = {name: kind(name) for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(len(built.asm["cubin"]), "wgmma" in built.asm["ptx"] or "mma.sync" in built.asm["ptx"])
    """)
    size, tensor_cores = said.split()
    assert int(size) > 5_000 and tensor_cores == "True"
