"""The Triton version of α-entmax attention, in Triton's interpreter and compiled for a GPU that need not be here."""

from __future__ import annotations

import pytest
import torch
from triton_process import needs_triton, run

from longspan.kernels import entmax_triton
from longspan.kernels.entmax_triton import Kept, bins_for, entmax_forward_triton


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    x = torch.zeros(1, 1, 4, 16)
    monkeypatch.setattr(entmax_triton, "available", lambda: False)
    with pytest.raises(ValueError, match="'cpu' or 'reference'"):
        entmax_forward_triton(x, x, x, 1.5, 0.25)
    with pytest.raises(ValueError, match=r"alpha 1\.5 and 2, got 1\.3"):
        entmax_forward_triton(x, x, x, 1.3, 0.25)


def test_packed_counters_never_overflow(monkeypatch):
    assert [bins_for(n) for n in (1, 16_320, 16_321, 4_194_240, 4_194_241)] == [8, 8, 4, 4, 2]
    with pytest.raises(ValueError, match="overflow"):
        bins_for(64 * 2**32)
    monkeypatch.setattr(entmax_triton, "available", lambda: True)
    x = torch.zeros(1, 1, 1, 16).expand(1, 1, 20_000, 16)
    with pytest.raises(ValueError, match=r"overflow a histogram of 8 .* at most 4"):
        entmax_forward_triton(x, x, x, 1.5, 0.25, bins=8)


def test_empty_tiles_are_counted_from_the_mask():
    words = torch.tensor([[[[0b1], [0b10]]]], dtype=torch.int32)
    nothing = torch.zeros(1, 1, 128)
    assert Kept(nothing, nothing, nothing[..., None], words).empty_tiles() == pytest.approx(1 / 3)


@needs_triton
def test_the_interpreter_agrees_with_the_definition():
    """Groups, odd lengths and widths, rows past varlen, every number of bins, outputs and gradients; skipping changes nothing."""
    run("""
        import torch
        from longspan.kernels.entmax import entmax
        from longspan.kernels.entmax_triton import entmax_backward_triton, entmax_forward_triton

        draw = torch.Generator().manual_seed(0)
        for B, H, G, N, D, alpha, size, bins, lengths in (
            (2, 4, 2, 150, 20, 1.5, 1.0, None, [150, 70]),
            (1, 2, 1, 64, 16, 2.0, 3.0, 4, None),
            (1, 2, 2, 200, 32, 1.5, 8.0, 2, None),
            (1, 1, 1, 1, 16, 1.5, 1.0, None, None),
        ):
            q, k, v = (torch.randn(B, h, N, D, generator=draw) for h in (H, G, G))
            q = q * size
            varlen = None if lengths is None else torch.tensor(lengths)
            out, kept = entmax_forward_triton(q, k, v, alpha, D**-0.5, varlen=varlen, bins=bins)
            wide = [t.double().requires_grad_() for t in (q, k, v)]
            keys, values = (t.repeat_interleave(H // G, 1) for t in wide[1:])
            seen = torch.ones(N, N, dtype=torch.bool).tril()[None, None]
            if varlen is not None:
                real = torch.arange(N) < varlen[:, None]
                seen = seen & real[:, None, None] & real[:, None, :, None]
            expected = entmax((wide[0] @ keys.mT * D**-0.5).masked_fill(~seen, -torch.inf), alpha) @ values
            assert torch.allclose(out.double(), expected, atol=2e-5), (out - expected).abs().max()
            weights = torch.randn(out.shape, generator=draw)
            got = entmax_backward_triton(weights, q, k, v, kept, alpha, D**-0.5, varlen=varlen)
            for have, want in zip(got, torch.autograd.grad((expected * weights).sum(), wide)):
                assert torch.allclose(have.double(), want, atol=2e-4), (have - want).abs().max()
            if lengths is not None:
                assert not out[1, :, 70:].any() and not got[0][1, :, 70:].any()
            unskipped, _ = entmax_forward_triton(q, k, v, alpha, D**-0.5, varlen=varlen, bins=bins, skip=False)
            assert torch.equal(out, unskipped)
        assert kept.words.sum() == 1
    """, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_it_compiles_for_a_hopper_gpu():
    said = run("""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from longspan.kernels import entmax_triton as kernels

        data = {"q", "k", "v", "out", "grad", "dq", "dk", "dv"}
        for name in ("threshold_kernel", "output_kernel", "query_grad_kernel", "key_grad_kernel"):
            kernel = getattr(kernels, name)
            constants = dict(D=64, DIM=64, TILE=64, POWER=2) | (dict(BINS=8, STEPS=2) if name == "threshold_kernel" else {})
            def kind(name):
                if name in constants:
                    return "constexpr"
                if name in ("lengths", "words"):
                    return "*i32"
                if name in ("z_scale", "scale"):
                    return "fp32"
                return "i32" if name.isupper() else "*bf16" if name in data else "*fp32"
            source = ASTSource(fn=kernel, signature={n: kind(n) for n in kernel.arg_names}, constexprs=constants)
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
            print(len(built.asm["cubin"]), "mma" in built.asm["ptx"])
    """)
    for line in said.strip().splitlines():
        size, tensor_cores = line.split()
        assert int(size) > 10_000 and tensor_cores == "True"
    assert len(said.strip().splitlines()) == 4
