"""What runs on every rank in the tests of context parallelism; results are plain numbers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from longspan.kernels.attend import attend_reference
from longspan.layers.positions.base import inverse_frequencies, rotate
from longspan.parallel import Communicator, PeerLost, Weights, sum_gradients
from longspan.parallel.ring import RingAttention
from longspan.parallel.ulysses import Ulysses
from longspan.parallel.upipe import UPipe
from longspan.parallel.usp import USP
from longspan.registry import Refused

H, D, WIDTH, S = 16, 4, 24, 32
KV_HEADS = {1: (16, 4), 2: (16, 4, 2, 1), 4: (16, 8, 4, 2)}
"""By number of ranks: as many as query heads, more than ranks, as many, fewer."""


def problem(kv_heads, dtype, batch=1, heads=H, length=S):
    """Input, weights and the output's gradient, the same on every rank."""
    draw = torch.Generator().manual_seed(kv_heads)

    def made(*shape, scale=1.0):
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) * scale).to(dtype)

    x, dy = made(batch, length, WIDTH), made(batch, length, WIDTH)
    q, k, v, o = (made(n * D, WIDTH, scale=WIDTH**-0.5) for n in (heads, kv_heads, kv_heads, heads))
    return x, Weights(q, k, v, o.mT.contiguous(), D), dy


def reference(x, weights, dy, *, theta=10_000.0, causal=True, mask=None):
    """Single-process attention: output and the gradients of x and the weights, by autograd."""
    tensors = [t.detach().requires_grad_() for t in (x, *weights.tensors())]
    x, wq, wk, wv, wo = tensors
    q, k, v = ((x @ w.mT).unflatten(-1, (-1, D)).transpose(1, 2) for w in (wq, wk, wv))
    if theta is not None:
        f, z = inverse_frequencies(D, theta), torch.arange(x.shape[1])
        q, k = rotate(q, z, f), rotate(k, z, f)
    out, _ = attend_reference(q, k, v, causal=causal, mask=mask, return_lse=False)
    y = out.transpose(1, 2).flatten(2) @ wo.mT
    return y.detach(), torch.autograd.grad(y, tensors, dy)


def layer(method, comm, x, weights, dy, **settings):
    """This rank's y, dx and the summed gradients of the weights; and what was counted."""
    own = weights.map(lambda w: w.clone().requires_grad_())
    local = method.shard(x, comm).requires_grad_()
    comm.reset()
    y = method.attention(local, own, comm, **settings)
    counted = {"forward_bytes": exchanged(comm)[0], "forward_operations": exchanged(comm)[1],
               "forward_elements": comm.live.peak, "forward_with_output": comm.live.peak_with_output}
    comm.reset()
    y.backward(method.shard(dy, comm))
    counted |= {"backward_bytes": exchanged(comm)[0], "backward_operations": exchanged(comm)[1],
                "backward_elements": comm.live.peak, "left": comm.live.now + comm.live.output}
    sum_gradients(own, comm)
    return y.detach(), (local.grad, *(w.grad for w in own.tensors())), counted


def exchanged(comm):
    kinds = ("all-to-all", "ring")
    return sum(comm.traffic.bytes[k] for k in kinds), sum(comm.traffic.operations[k] for k in kinds)


def compare(method, comm, kv_heads, dtype, batch=1, heads=H, **settings):
    """Largest errors against one process, relative to the largest value where that is above 1; and the counters."""
    x, weights, dy = problem(kv_heads, dtype, batch, heads)
    y, grads, counted = layer(method, comm, x, weights, dy, **settings)
    wanted_y, wanted = reference(x, weights, dy, **settings)
    pairs = {"y": (y, method.shard(wanted_y, comm)), "dx": (grads[0], method.shard(wanted[0], comm))}
    pairs |= {f"dw{n}": (grads[i], wanted[i]) for i, n in enumerate("qkvo", 1)}
    errors = {n: float((a - b).abs().max() / b.abs().max().clamp(min=1)) for n, (a, b) in pairs.items()}
    return {"errors": errors, "counted": counted}


TWINS = (Ulysses(recompute=True), UPipe(U=16), RingAttention(order="contiguous"))
"""Compared in float32 only: their arithmetic is that of another one."""


def methods(ranks):
    """Those whose numbers fit 16 query heads on up to 4 ranks."""
    found = [Ulysses(), Ulysses(recompute=True), RingAttention(), RingAttention(order="contiguous")]
    found += [UPipe(U=U) for U in (1, 2, 4, 8, 16) if U % ranks == 0]
    if ranks > 1:
        found += [USP(ring=2), USP(inner=UPipe(U=ranks), ring=2, order="contiguous")]
    return found


def run_all(comm):
    torch.set_num_threads(1)
    found = {"grid": {}}
    for method in methods(comm.size):
        for kv_heads in KV_HEADS[comm.size]:
            if method not in TWINS:
                found["grid"][str(method), kv_heads, "float64"] = compare(method, comm, kv_heads, torch.float64, batch=2)
            found["grid"][str(method), kv_heads, "float32"] = compare(method, comm, kv_heads, torch.float32)
    found["open"] = {str(m): compare(m, comm, 4, torch.float64, causal=False, theta=None)
                     for m in (Ulysses(), UPipe(U=4), RingAttention(), RingAttention(order="contiguous"))}
    found["bitwise"] = {kv: same_bits(comm, kv) for kv in KV_HEADS[comm.size]}
    found["moves"] = moves(comm)
    found["short"] = {str(m): one_position(m, comm) for m in (Ulysses(), UPipe(U=comm.size))}
    found["documents"] = {str(m): documents(m, comm) for m in (Ulysses(), UPipe())}
    found["nan"] = {str(m): nan_rows(m, comm) for m in (Ulysses(), UPipe(), RingAttention())}
    found["half"] = {str(m): half_precision(m, comm) for m in (UPipe(), RingAttention())}
    found["disagreement"] = disagreements(comm)
    found["after"] = compare(UPipe(), comm, 4, torch.float64)["errors"]["y"]
    if comm.size == 2:
        found["stuck"] = stuck(comm)
    return found


def same_bits(comm, kv_heads):
    """Whether one stage of all heads equals Ulysses in every bit, forward and backward."""
    x, weights, dy = problem(kv_heads, torch.float32)
    one, other, plain = (layer(m, comm, x, weights, dy) for m in (UPipe(U=H), Ulysses(recompute=True), Ulysses()))
    return all(torch.equal(a, b) and torch.equal(a, c)
               for a, b, c in zip((one[0], *one[1]), (other[0], *other[1]), (plain[0], *plain[1])))


def moves(comm):
    """head2seq is the inverse and the adjoint of seq2head."""
    draw = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(2, 3, 8, 5, generator=draw, dtype=torch.float64)
    heads = comm.seq2head(x)
    y = torch.randn(heads.shape, generator=draw, dtype=torch.float64)
    sides = torch.stack([(heads * y).sum(), (x * comm.head2seq(y)).sum()])
    comm.sum_(sides)
    shape = list(heads.shape)
    back = torch.equal(comm.head2seq(heads), x)
    comm.live.drop_all()  # these are the caller's
    return {"inverse": back, "sides": sides.tolist(), "shape": shape}


def one_position(method, comm):
    """A sequence of one position a rank."""
    x, weights, dy = problem(4, torch.float64, length=comm.size)
    y, grads, _ = layer(method, comm, x, weights, dy)
    wanted_y, wanted = reference(x, weights, dy)
    return float(max((y - method.shard(wanted_y, comm)).abs().max(), (grads[0] - method.shard(wanted[0], comm)).abs().max()))


def documents(method, comm):
    """Packed documents are those of a mask."""
    ends = (5, 21, S)
    x, weights, dy = problem(4, torch.float64)
    y, grads, _ = layer(method, comm, x, weights, dy, documents=ends)
    name = torch.bucketize(torch.arange(S), torch.tensor(ends), right=True)
    wanted_y, wanted = reference(x, weights, dy, mask=(name[:, None] == name)[None, None])
    return float(max((y - method.shard(wanted_y, comm)).abs().max(), (grads[0] - method.shard(wanted[0], comm)).abs().max()))


def nan_rows(method, comm):
    """Whether NaN at one position is seen in the output there, on the rank that holds it."""
    x, weights, _ = problem(4, torch.float32)
    x[:, S // 2] = float("nan")
    y = method.attention(method.shard(x, comm), weights, comm)
    place = method.places(S, comm.size)[comm.rank]
    bad = y[0].isnan().any(-1)
    return bool(bad[place == S // 2].all())


def half_precision(method, comm):
    """bfloat16 against float32 on the same rounded inputs: relative error of y and of dwk."""
    x, weights, dy = problem(4, torch.bfloat16)
    y, grads, _ = layer(method, comm, x, weights, dy)
    wide = weights.map(torch.Tensor.float)
    wanted_y, wanted = reference(x.float(), wide, dy.float())
    errors = [(y.float() - method.shard(wanted_y, comm)).norm() / method.shard(wanted_y, comm).norm(),
              (grads[2].float() - wanted[2]).norm() / wanted[2].norm()]
    return float(max(errors)), str(y.dtype), str(grads[2].dtype)


def disagreements(comm):
    """What a rank is told when the others call with something else."""
    said = {}
    for name in ("dtype", "length", "documents"):
        dtype = torch.float64 if name == "dtype" and comm.rank == 0 else torch.float32
        length = S + 4 * comm.size if name == "length" and comm.rank == 0 else S
        settings = {"documents": (4, S)} if name == "documents" and comm.rank == 0 else {}
        x, weights, _ = problem(4, dtype, length=length)
        try:
            UPipe().attention(UPipe().shard(x, comm), weights, comm, **settings)
            said[name] = "nothing"
        except Refused as refusal:
            said[name] = str(refusal)
    return said


def stuck(comm):
    """What a rank says that waits for one that doesn't answer, and how long it waited."""
    group = torch.distributed.new_group([0, 1])
    part = Communicator(comm.rank, 2, group=group, timeout=0.4)
    if comm.rank == 1:
        time.sleep(1.2)
        return "", 0.0
    start = time.monotonic()
    try:
        part.seq2head(torch.ones(1, 2, 2, 1), "queries")
    except PeerLost as lost:
        return str(lost), time.monotonic() - start
    return "nothing", 0.0


# -------------------------------------------------------------------------------------------------- ranks that go wrong


def killed_at(comm, where):
    """Rank 1 is killed right before an exchange; the others say what they saw."""
    plain = comm.all_to_all

    def deadly(send, what):
        if comm.rank == 1 and what == where:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(send, what)

    comm.all_to_all = deadly
    x, weights, dy = problem(4, torch.float32)
    layer(UPipe(), comm, x, weights, dy)


def one_raises(comm):
    """Rank 1 raises while rank 0 is busy with something else."""
    if comm.rank == 1:
        raise ValueError("no such thing as 7")
    time.sleep(600)


def sleeper(comm, file=""):
    if file:
        Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def names(comm, word):
    return [word, comm.rank, comm.size, torch.get_num_threads()]


# ---------------------------------------------------------------------------------------------------- for finite differences


def total(method, comm, x, weights, dy):
    return float((method.attention(x, weights, comm) * dy).sum())
