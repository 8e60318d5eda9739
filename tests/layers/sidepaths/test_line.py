"""The line of real tokens against the same tokens picked by hand."""

import torch

from longspan.layers import Context
from longspan.layers.sidepaths.line import Line, earlier


def column(values):
    return torch.tensor(values, dtype=torch.float32)[None, :, None]


def test_padding_is_taken_out_and_comes_back_as_zeros():
    x, valid = column([float("nan"), 1, 9, 2, 3, float("inf")]), torch.tensor([[False, True, False, True, True, False]])
    line = Line.of(x, column([7, 8]), Context.of(1, 6, valid=valid))
    assert line.tokens[0, :, 0].tolist() == [7, 8, 1, 2, 3, 0, 0, 0] and line.end().tolist() == [[5]]
    assert line.back(line.tokens[:, 2:])[0, :, 0].tolist() == [0, 1, 0, 2, 3, 0]
    assert line.newest(4)[0, :, 0].tolist() == [8, 1, 2, 3]
    assert earlier(line.tokens, 2)[0, :, 0].tolist() == [0, 0, 7, 8, 1, 2, 3, 0]


def test_documents_do_not_reach_back():
    x, segments = column([1, 2, 3, 9, 4, 5]), torch.tensor([[0, 0, 1, 1, 1, 2]])
    valid = torch.tensor([[True, True, True, False, True, True]])
    before = Context.of(1, 2, segments=torch.zeros(1, 2, dtype=torch.long)).after
    line = Line.of(x, column([7, 8]), Context.of(1, 6, valid=valid, segments=segments, before=before))
    assert line.tokens[0, :, 0].tolist() == [7, 8, 1, 2, 3, 4, 5, 0]
    assert line.documents[0, :5].tolist() == [0, 0, 1, 1, 2]
    assert line.first[0, :7].tolist() == [0, 0, 0, 0, 4, 4, 6]
    assert earlier(line.tokens, 1, line.first)[0, :7, 0].tolist() == [0, 7, 8, 1, 0, 3, 0]
    assert line.newest(3)[0, :, 0].tolist() == [0, 0, 5]
    loud = torch.where(torch.arange(6)[:, None] < 2, torch.full_like(x, float("nan")), x)
    line = Line.of(loud, column([0, 0]), Context.of(1, 6, segments=segments))
    assert earlier(line.tokens, 1, line.first)[0, 4:, 0].tolist() == [0, 3, 9, 0]


def test_what_is_kept_holds_no_more_than_itself():
    x = torch.randn(1, 50, 4)
    assert Line.of(x, x[:, :0], Context.of(1, 50)).newest(3).untyped_storage().nbytes() == 3 * 4 * 4
    assert Line.of(x, x[:, :0], Context.of(1, 50)).newest(50) is not None
