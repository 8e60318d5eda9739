"""The judgement of the untied Ulysses experiment, on rows made from the model; its smoke scale runs real processes."""

from __future__ import annotations

import pytest

from longspan.experiments import upipe
from longspan.registry import Refused

SIZE = upipe.SIZES["small"] | {"lengths": [1024]}


def rows(**changed):
    """What a flawless run would give; `changed` applies to U=4."""
    found = []
    for ranks in SIZE["ranks"]:
        for kv_heads in SIZE["rounds"]:
            for method in upipe.METHODS:
                row = {"ranks": ranks, "length": SIZE["length"], "kv_heads": kv_heads, "method": str(method),
                       "error": 1e-6, "gradient_error": 1e-6, "peak_bytes": 1 << 20, "checksum": [1.0]}
                model = method.account(upipe.shape_of(row, SIZE), ranks)
                row |= {f"{a}_{b}": getattr(model, f"{a}_{b}") for a in ("forward", "backward")
                        for b in ("bytes", "operations", "elements")}
                row |= {"forward_with_output": model.forward_with_output,
                        "seconds": model.flops / 1e10 + model.bytes / 1e9 + model.operations * 1e-3}
                found.append(row | (changed if row["method"] == upipe.SMALL else {}))
        for method in (upipe.METHODS[1], upipe.METHODS[2]):
            row = {"ranks": ranks, "length": 1024, "kv_heads": 16, "method": str(method)}
            model = method.account(upipe.shape_of(row, SIZE), ranks)
            found.append(row | {"forward_elements": model.forward_elements, "forward_with_output": model.forward_with_output})
    return found


def test_a_flawless_run_is_reproduced():
    outcome = upipe.judged("small", SIZE, rows())
    assert outcome.verdict == "reproduced", outcome.reason
    assert outcome.measured[upipe.EXCHANGE] == 0.25 and outcome.measured[upipe.TOTAL] == 0.375
    speeds = outcome.measured["speeds of a core"]
    assert speeds["median error of times"] < 0.5 and speeds["GFLOP/s"] > 0
    assert any(r.get("model") == "Llama-3-8B" and r["longest"] > 10**6 for r in outcome.table)


@pytest.mark.parametrize("changed, words", [
    ({"error": 1e-3}, "every output and gradient"), ({"seconds": 1e3}, "at most 1.6 times"),
    ({"forward_bytes": 7}, "bytes sent in forward"), ({"backward_bytes": 7}, "bytes sent in all"),
    ({"forward_elements": 1}, "within 5% of a quarter"), ({"forward_with_output": 10**9}, "at most 0.45"),
    ({"backward_elements": 1}, "those of the model"),
])
def test_what_goes_wrong_is_named(changed, words):
    outcome = upipe.judged("small", SIZE, rows(**changed))
    assert outcome.verdict == "failed" and words in outcome.reason


def test_the_paper_s_scale_is_refused_in_words():
    with pytest.raises(Refused, match="eight or sixteen GPUs"):
        upipe.measure("paper", lambda what: None)
