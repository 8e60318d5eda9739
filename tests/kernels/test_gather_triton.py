"""Taking and putting in Triton, run in its interpreter and compiled for a GPU that need not be here."""

from __future__ import annotations

import pytest
import torch
from triton_process import needs_triton, run

from longspan.kernels import gather_triton
from longspan.kernels.gather import put_tokens, take_tokens


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(gather_triton, "available", lambda: False)
    rows = torch.zeros(1, 1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        take_tokens(torch.zeros(1, 1, 4, 8), rows, backend="triton")
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        put_tokens(torch.zeros(1, 1, 2, 8), rows, 4, backend="triton")


@needs_triton
def test_the_interpreter_agrees_with_the_definition():
    """Groups, odd lengths and widths, more rows than a program copies, strided tensors, nothing to copy."""
    run("""
        import torch
        from longspan.kernels.gather import put_tokens, take_tokens

        draw = torch.Generator().manual_seed(0)
        for B, heads, shared, S, N, D, dtype in ((2, 6, 2, 150, 131, 20, torch.float32), (1, 3, 3, 7, 7, 16, torch.float16),
                                                 (1, 4, 1, 90, 64, 64, torch.bfloat16), (1, 2, 1, 5, 0, 8, torch.float32)):
            t = torch.randn(B, S, shared, D, generator=draw).to(dtype).transpose(1, 2)
            kept = torch.rand(B, heads, S, generator=draw).argsort(-1)[..., :N].sort(-1).values
            taken = take_tokens(t, kept, backend="triton")
            assert torch.equal(taken, take_tokens(t, kept, backend="reference")), (S, N)
            back = put_tokens(taken, kept, S + 3, backend="triton")
            assert torch.equal(back, put_tokens(taken, kept, S + 3, backend="reference")), (S, N)
    """, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("putting", [False, True])
def test_it_compiles_for_a_hopper_gpu(putting):
    said = run(f"""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from longspan.kernels.gather_triton import ROWS, copy_rows_kernel as kernel

        constants = dict(PUTTING={putting}, D=64, DIM=64, ROWS=ROWS)
        pointers = dict(source="bf16", target="bf16", kept="i64")
        def kind(name):
            return "constexpr" if name in constants else "*" + pointers[name] if name in pointers else "i32"
        source = ASTSource(fn=kernel, signature={{name: kind(name) for name in kernel.arg_names}}, constexprs=constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(len(built.asm["cubin"]), "st.global" in built.asm["ptx"])
    """)
    size, stores = said.split()
    assert int(size) > 1_000 and stores == "True"
