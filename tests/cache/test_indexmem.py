"""IndexMem's indexer: the streamed maximum against the dense matrix, rounds, chunks, padding, shared layers, bad input."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from generating import left_padded, new_tokens
from layer_contexts import random_context
from masked_oracle import forced_logits
from profiled import provide_profiles, random_weights
from tiny_models import tiny, tiny_ids

from longspan.cache.index_memory import Indexer, Weights, deciding_rows, index_scores, paired_scores, pooled_max
from longspan.cache.scores.indexmem import IMPORTANCE, KEY, IndexMem, importance
from longspan.context import Context
from longspan.models import Loaded, find_parts, profiles
from longspan.models.profiles import Profile
from longspan.recipe import Recipe, per_row
from longspan.registry import Refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model():
    return tiny("llama", layers=5)


def recipe(model, text):
    made = Recipe.parse(text)
    provide_profiles(made, model)
    return made


def shown(length=20, **more):
    """A context with all its rows, the layer's input, and an indexer for it."""
    x = random_context(length, window=length, **more)
    x.hidden = torch.randn(x.k.shape[0], length, 32, generator=torch.Generator().manual_seed(5))
    return x, indexer_of(x)


def indexer_of(x, layer=0):
    return Weights(random_weights(x.parts.model)).indexer(x.parts, layer, torch.device("cpu"))


def dense(x, indexer):
    """A (B,N,N) written out plainly in float64, with -inf where a row doesn't see a key."""
    flat = x.parts.unrotate(x.q, *x.parts.rope(x.q_positions, x.layer)).transpose(1, 2).flatten(2).double()
    unit = lambda t: t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    q = unit(torch.einsum("bnf,hdf->bnhd", flat, indexer.query.double()))
    k = unit(x.hidden.double() @ indexer.key.double().T)
    gates = x.hidden.double() @ indexer.gate.double().T / indexer.query.shape[:2].numel() ** 0.5
    a = torch.einsum("bsh,bsht->bst", gates, torch.einsum("bshd,btd->bsht", q, k).relu())
    allowed = (x.positions[:, :1] <= x.q_positions[:, :, None]) & x.valid[:, :1] & x.q_valid[:, :, None]
    return a.masked_fill(~allowed, -torch.inf)


def pieces_of(x, sizes):
    """The context as a cache shows it when its rows come in pieces, evicting nothing."""
    at = 0
    for n in sizes:
        rows, upto = slice(at, at + n), at + n
        part = {name: getattr(x, name)[:, :, :upto] for name in ("k", "v", "valid", "positions")}
        yield part | {"q": x.q[:, :, rows], "q_valid": x.q_valid[:, rows], "q_positions": x.q_positions[:, rows],
                      "hidden": x.hidden[:, rows]}
        at = upto


def observed(x, sizes, score=None, indexer=None):
    """Statistics after the rows have come in pieces of these sizes."""
    score, per_key, across = score or IndexMem(), {}, {}
    across[score._note("weights")] = {"all": None, x.layer: indexer or indexer_of(x)}
    for part in pieces_of(x, sizes):
        score.observe(replace(x, **part, per_key=per_key, across=across))
    return per_key


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(("rows", "columns"), [(128, 1024), (1, 1), (3, 7), (20, 4), (64, 5)])
@pytest.mark.parametrize("pads", [(0, 0), (0, 6)])
def test_the_streamed_maximum_is_that_of_the_dense_matrix(rows, columns, pads):
    x, indexer = shown(20, rows=2, pads=pads)
    keys = indexer.keys(x.hidden)[:, None].expand(-1, 2, -1, -1)
    found = importance(x, indexer, keys, rows=rows, columns=columns)
    wanted = dense(x, indexer).amax(1)[:, None].expand(-1, 2, -1)
    torch.testing.assert_close(found[x.valid], wanted[x.valid].float(), atol=1e-6, rtol=1e-6)
    assert (found[~x.valid] == -torch.inf).all()


@pytest.mark.parametrize("sizes", [[20], [12, 8], [7, 1, 1, 11], [1] * 20])
def test_importance_of_all_rows_is_the_maximum_over_parts(sizes):
    x, indexer = shown(20, rows=2, pads=(0, 3))
    found = observed(x, sizes, indexer=indexer)[IMPORTANCE]
    parts = torch.stack([dense(x, indexer)[:, a : a + n].amax(1) for a, n in zip(torch.tensor([0, *sizes]).cumsum(0), sizes)])
    wanted = parts.amax(0)[:, None].expand(-1, 2, -1).float()
    torch.testing.assert_close(found[x.valid], wanted[x.valid], atol=1e-6, rtol=1e-6)


def test_each_key_has_its_deciding_row():
    x, indexer = shown(20)
    q, gates, k = indexer.queries(x.parts.unrotate(x.q, *x.parts.rope(x.q_positions, 0))), indexer.gates(x.hidden), \
        indexer.keys(x.hidden)
    at = torch.arange(20)
    rows = deciding_rows(lambda r, c: index_scores(q[:, r], gates[:, r], k[:, c]), lambda r, c: (at[c] <= at[r, None])[None],
                         20, 20, rows=6)
    assert torch.equal(rows, dense(x, indexer).argmax(1))
    torch.testing.assert_close(paired_scores(q[:, rows[0]], gates[:, rows[0]], k), dense(x, indexer).amax(1).float())


def test_a_constant_on_all_scores_changes_no_choice():
    x, indexer = shown(24)
    score, masks = IndexMem(n_sink=2), []
    for constant in (0.0, 3.5, -40.0):
        x.per_key = observed(x, [24], score, indexer)
        x.per_key[IMPORTANCE] = x.per_key[IMPORTANCE] + constant
        masks.append(Recipe.parse("indexmem(n_sink=2, budget=0.5)").scored.plan(x).mask)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_sinks_stay_and_smaller_budgets_keep_a_part_of_larger_ones():
    x, indexer = shown(40, rows=2, pads=(0, 5))
    x.per_key = observed(x, [40], indexer=indexer)
    kept = [Recipe.parse(f"indexmem(budget={b})").scored.plan(x).mask for b in (0.15, 0.3, 0.5, 0.9)]
    for mask, share in zip(kept, (0.15, 0.3, 0.5, 0.9)):
        assert mask[(x.positions < 4) & x.valid].all()
        assert mask.sum(-1).tolist() == [[int(share * 40 + 1e-9)] * 2, [int(share * 35 + 1e-9)] * 2]
    assert all((smaller <= larger).all() for smaller, larger in itertools.pairwise(kept))


def test_nothing_evicted_changes_no_bit(model):
    ids = tiny_ids(1, 30)
    logits = []
    for text in ("full", "indexmem(budget=1.0)", "indexmem(budget=1.0, store=latent-memory)"):
        with recipe(model, text).on(model) as run:
            logits.append(forced_logits(run, model, ids, 20)[0])
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


# ------------------------------------------------------------------------------------------------------ inside a model


def kept_of(model, made, ids, mask=None, pieces=None):
    with made.on(model) as run:
        _, cache = forced_logits(run, model, ids, 24, mask, pieces=pieces)
    return [(layer.store.view().positions, layer.store.view().valid) for layer in cache.policy_layers]


@pytest.mark.parametrize("schedule", ["at-prompt", "every(steps=3)", "per-chunk(size=7)"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_pieces_of_the_prompt_change_no_choice(model, schedule, group):
    made = recipe(model, f"indexmem(group={group}, budget=0.5, schedule={schedule})")
    ids, mask = left_padded(tiny_ids(1, 33), tiny_ids(1, 28, seed=1))
    at_once = kept_of(model, made, ids, mask)
    in_pieces = kept_of(model, made, ids, mask, pieces=[5, 11, 8, 4, 1, 4])
    for (p, v), (p2, v2) in zip(at_once, in_pieces):
        assert torch.equal(v, v2) and torch.equal(p[v], p2[v2])


def test_layers_of_a_group_keep_the_same(model):
    ids = tiny_ids(1, 24)
    groups = {g: kept_of(model, recipe(model, f"indexmem(group={g}, budget=0.4)"), ids) for g in (1, 2, 4)}
    positions = {g: [p[v].tolist() for p, v in kept] for g, kept in groups.items()}
    assert positions[2][0] == positions[2][1] and positions[2][2] == positions[2][3] and positions[2][0] != positions[2][2]
    assert positions[4][0] == positions[4][1] == positions[4][2] == positions[4][3] != positions[4][4]
    assert positions[1][0] == positions[2][0] == positions[4][0] and len(set(map(tuple, positions[1]))) > 2


def test_a_group_follows_where_its_layers_keep_different_numbers(model):
    made = recipe(model, "indexmem(group=4, schedule=every(steps=2)) @ pyramid(budget=0.5)")
    with made.on(model) as run:
        _, cache = forced_logits(run, model, tiny_ids(1, 33), 24)
    assert len({layer.store.lengths().sum().item() for layer in cache.policy_layers}) > 1
    assert sum(len(notes) for name, notes in cache.across.items() if "layer" in name) <= 2


def test_rows_with_budgets_of_their_own_share_in_their_own_groups(model):
    texts = ["indexmem(group=2, budget=0.4)", "indexmem(group=2) @ adakv(budget=0.4)", "indexmem(budget=0.7)"]
    made = [recipe(model, t) for t in texts]
    rows = [tiny_ids(1, 24 - i, seed=i) for i in range(3)]
    ids, mask = left_padded(*rows)
    with per_row(made, model):
        both = new_tokens(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        with made[i].on(model):
            assert new_tokens(model, row) == [both[i]]


def test_padded_rows_get_what_they_get_alone(model):
    made = recipe(model, "indexmem(budget=0.4, schedule=every(steps=3))")
    rows = [tiny_ids(1, n, seed=n) for n in (24, 17)]
    ids, mask = left_padded(*rows)
    with made.on(model):
        both = new_tokens(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        with made.on(model):
            assert new_tokens(model, row) == [both[i]]


def test_short_keys_follow_their_entries(model):
    """What is cached of every live token is what the indexer says of it, however often was evicted."""
    made = recipe(model, "indexmem(budget=0.5, schedule=every(steps=3))")
    hidden = []
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(lambda m, a, k: hidden.append(k["hidden_states"]),
                                                                     with_kwargs=True)
    with made.on(model) as run:
        _, cache = forced_logits(run, model, tiny_ids(1, 33), 24)
        layer = cache.policy_layers[1]
        view, notes = layer.store.view(), layer.notes[0].per_key
    hook.remove()
    parts = find_parts(model)
    wanted = Weights(random_weights(model)).indexer(parts, 1, torch.device("cpu")).keys(torch.cat(hidden, 1))[0]
    for j in range(8):
        torch.testing.assert_close(notes[f"{KEY}.{j}"][0], wanted[view.positions[0].long(), j], atol=1e-5, rtol=1e-5)


def test_a_saved_context_goes_on_alike(model, tmp_path):
    made = recipe(model, "indexmem(budget=0.5, schedule=every(steps=3), store=latent-memory)")
    loaded = Loaded(model, None, "tiny", profiles.model_key(model), tmp_path)
    context = Context.from_ids(loaded, tiny_ids(1, 40)[0].tolist(), made)
    again = Context.load(context.save(tmp_path / "c"), loaded)
    assert context.nlls(range(5, 15), range(20, 40)) == again.nlls(range(5, 15), range(20, 40))


# ------------------------------------------------------------------------------------------------------------ bad input


def test_short_prompts_and_budgets(model):
    kept = recipe(model, "indexmem(budget=0.5)")
    for n in (1, 3, 4):
        with kept.on(model) as run:
            forced_logits(run, model, tiny_ids(1, n), n)
        assert run.achieved.kept_fraction == 1.0
    with pytest.raises(Refused, match=r"budget of 2 tokens .* smaller than the 4 tokens that indexmem always keeps"), \
            kept.on(model) as run:
        forced_logits(run, model, tiny_ids(1, 5), 5)
    only_sinks = recipe(model, 'indexmem(budget="4 tokens", schedule=every(steps=2))')
    with only_sinks.on(model) as run:
        _, cache = forced_logits(run, model, tiny_ids(1, 13), 9)
    assert all(p.tolist() == [0, 1, 2, 3] for heads in cache.kept_positions() for p in heads)
    with pytest.raises(Refused, match="smaller than the 4 tokens"), recipe(model, 'indexmem(budget="3 tokens")').on(model) as run:
        forced_logits(run, model, tiny_ids(1, 9), 9)


@pytest.mark.parametrize("budget", ["0.0", "-0.5", "1.5"])
def test_shares_outside_of_zero_to_one_are_refused(budget):
    with pytest.raises(Refused, match=r"a fraction lies in|expected"):
        Recipe.parse(f"indexmem(budget={budget})")


def test_no_new_rows_change_nothing():
    x, indexer = shown(20)
    x.per_key = observed(x, [20], indexer=indexer)
    before = dict(x.per_key)
    x.q, x.q_valid, x.q_positions, x.hidden = x.q[:, :, :0], x.q_valid[:, :0], x.q_positions[:, :0], x.hidden[:, :0]
    IndexMem().observe(x)
    assert x.per_key.keys() == before.keys() and all(x.per_key[n] is t for n, t in before.items())


def test_nan_is_refused():
    x, indexer = shown(24)
    x.hidden[0, 7, 3] = torch.nan
    x.per_key = observed(x, [24], indexer=indexer)
    with pytest.raises(Refused, match="indexmem gave NaN in layer 0"):
        Recipe.parse("indexmem(budget=0.5)").scored.plan(x)


def test_padding_may_hold_anything():
    x, indexer = shown(24, rows=2, pads=(0, 6))
    before = observed(x, [24], indexer=indexer)[IMPORTANCE]
    x.hidden[1, :6], x.q[1, :, :6] = 1e4, 1e4
    after = observed(x, [24], indexer=indexer)[IMPORTANCE]
    assert torch.equal(before[x.valid], after[x.valid])


def test_without_weights_it_says_how_to_train_them(model):
    with pytest.raises(Refused, match="indexmem needs weights trained for this model and there are none; train them once with: "
                                      "longspan profile indexmem --model"), Recipe.parse("indexmem(budget=0.5)").on(model) as run:
        forced_logits(run, model, tiny_ids(1, 9), 9)


def test_weights_of_another_model_are_refused(model, tmp_path):
    other = tiny("llama", hidden=48, layers=5)
    file = profiles.save(Profile(profiles.trained_key(other, IndexMem()), random_weights(other)), tmp_path / "other.safetensors")
    made = Recipe.parse(f'indexmem(budget=0.5, weights="{file}")')
    with pytest.raises(Refused, match="were trained for model"), made.on(model) as run:
        forced_logits(run, model, tiny_ids(1, 9), 9)
    own = profiles.trained_key(model, IndexMem())
    profiles.save(Profile(own, random_weights(other)), tmp_path / "shape.safetensors")
    made = Recipe.parse(f'indexmem(budget=0.5, weights="{tmp_path / "shape.safetensors"}")')
    with pytest.raises(Refused, match=r"indexer.key is \(5, 8, 48\), expected \(5, 8, 32\)"), made.on(model) as run:
        forced_logits(run, model, tiny_ids(1, 9), 9)
    with pytest.raises(Refused, match="there are none in 'nowhere'"), \
            Recipe.parse('indexmem(budget=0.5, weights="nowhere")').on(model) as run:
        forced_logits(run, model, tiny_ids(1, 9), 9)


def test_layers_without_weights_are_refused(model):
    tensors = random_weights(model)
    tensors["layers"] = torch.tensor([0, 2, 3, 4, 6])
    with pytest.raises(Refused, match="layer 1 has no trained weights of the indexer"):
        Weights(tensors).indexer(find_parts(model), 1, torch.device("cpu"))


def test_a_group_whose_first_layer_slides_is_refused():
    sliding = tiny("gemma3", layers=4)
    made = recipe(sliding, "indexmem(group=2, budget=0.5)")
    with pytest.raises(Refused, match="layer 1 shares the choice of layer 0, which keeps a sliding window"), \
            made.on(sliding) as run:
        forced_logits(run, sliding, tiny_ids(1, 24), 24)


def test_one_row_of_weights_is_enough_for_a_number():
    """With one head, one channel and unit weights the score is the gate times the ReLU, by hand."""
    one = torch.ones(1, 1, 1)
    indexer = Indexer(one, one[0], one[0])
    hidden = torch.tensor([[[2.0], [-3.0], [0.5]]])
    q = indexer.queries(torch.tensor([[[[1.0], [-1.0], [4.0]]]]))
    a = index_scores(q, indexer.gates(hidden), indexer.keys(hidden))[0]
    wanted = torch.tensor([[2.0, 0, 2.0], [0, -3.0, 0], [0.5, 0, 0.5]])
    torch.testing.assert_close(a, wanted, atol=1e-4, rtol=1e-4)
    at = torch.arange(3)
    found = pooled_max(lambda r, c: a[None, r, c], lambda r, c: (at[c] <= at[r, None])[None], 3, 3)
    torch.testing.assert_close(found[0], torch.tensor([2.0, 0, 0.5]), atol=1e-4, rtol=1e-4)
