"""The next-token objective counts labelled tokens only."""

import dataclasses

import torch
import torch.nn.functional as F

from longspan.training import IGNORE, Batch
from longspan.training.next_token import NextToken


def test_mean_over_labelled_tokens(make, task):
    model, batch = make(), task(0)
    got = NextToken()(model, batch)
    logits = model(batch.ids).logits
    asked = batch.labels != IGNORE
    want = F.cross_entropy(logits[asked], batch.labels[asked])
    torch.testing.assert_close(got.loss, want)
    assert got.weight == asked.sum().item() == 8 * task.queries
    assert got.metrics["accuracy"] == (logits.argmax(-1) == batch.labels)[asked].float().mean().item()


def test_padding_does_not_change_the_loss(make, task):
    model, batch = make(), task(0)
    pad = torch.zeros(8, 3, dtype=torch.long)
    padded = Batch(
        torch.cat((pad, batch.ids), 1),
        torch.cat((pad + IGNORE, batch.labels), 1),
        valid=torch.cat((pad.bool(), torch.ones_like(batch.ids).bool()), 1),
    )
    torch.testing.assert_close(NextToken()(model, padded).loss, NextToken()(model, batch).loss, atol=1e-5, rtol=1e-5)


def test_nothing_labelled_weighs_nothing(make, task):
    batch = dataclasses.replace(task(0), labels=torch.full_like(task(0).labels, IGNORE))
    got = NextToken(z_loss=0.1)(make(), batch)
    assert got.weight == 0 and got.loss.item() == 0.0 and got.loss.requires_grad


def test_z_loss_is_added_to_the_loss_and_not_to_the_likelihood(make, task):
    model, batch = make(), task(0)
    plain, with_z = NextToken()(model, batch), NextToken(z_loss=0.5)(model, batch)
    z = model(batch.ids).logits[batch.labels != IGNORE].logsumexp(-1).square().mean()
    torch.testing.assert_close(with_z.loss, plain.loss + 0.5 * z)
    assert with_z.metrics == plain.metrics
