"""The store of documents' caches: found again by content, never stale, never damaged, within its memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from reuse_oracle import LONGROPE, texts
from tiny_models import TOKENS, tiny, tiny_ids, tiny_tokenizer

from longspan.cache.reuse import Library, Piece, assemble, join, read_alone
from longspan.cache.reuse.stage import parts_of
from longspan.models import Loaded
from longspan.models.profiles import model_key
from longspan.recipe import Recipe
from longspan.registry import Refused


def loaded_of(family="llama", seed=0, dtype=torch.float32, **more):
    model = tiny(family, vocab=len(TOKENS), seed=seed, **more).to(dtype)
    return Loaded(model, tiny_tokenizer(), f"tiny {family}", "print", Path("nowhere"))


@pytest.fixture(scope="module")
def loaded():
    return loaded_of()


def document(n=12, seed=0):
    return tiny_ids(1, n, seed=seed)[0].tolist()


def same(a, b):
    tensors = all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("ids", "k", "v"))
    return tensors and (a.model, a.rotary) == (b.model, b.rotary)


def test_a_document_is_read_once(loaded):
    library, ran = Library(loaded), []
    handle = loaded.model.model.embed_tokens.register_forward_hook(lambda m, args, out: ran.append(args[0].shape[1]))
    first, there = library.get(document())
    again, found = library.get(document())
    handle.remove()
    assert ran == [12] and (there, found) == (False, True) and again is first
    assert document() in library and document(seed=1) not in library
    counts = library.counts
    assert (counts.hits, counts.misses, counts.documents, counts.bytes) == (1, 1, 1, first.nbytes)
    assert same(first, read_alone(loaded.model, document()))


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_changed_document_is_another(loaded, at):
    library = Library(loaded)
    library.get(document())
    changed = document()
    changed[at] = changed[at] % 100 + 7
    cache, there = library.get(changed)
    assert not there and cache.ids.tolist() == changed and same(cache, read_alone(loaded.model, changed))
    for part in (document()[:-1], document()[1:], document() * 2):
        assert part not in library


def test_entries_wait_on_disk(loaded, tmp_path):
    first, _ = Library(loaded, tmp_path).get(document())
    other = Library(loaded, tmp_path)
    found, there = other.get(document())
    assert there and same(found, first) and (other.counts.from_disk, other.counts.misses) == (1, 0)
    other.forget()
    assert other.counts.documents == 0 and same(other.get(document())[0], first)
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert files == [other.path(document())]  # nothing half written lies about


def test_the_users_cache_folder(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    library = Library(loaded, "cache")
    library.get(document())
    assert library.folder == tmp_path / "documents" and library.path(document()).is_file()
    assert Library(loaded).path(document()) is None


@pytest.mark.parametrize("other", ["weights", "dtype", "rotary", "family"])
def test_other_models_have_entries_of_their_own(loaded, tmp_path, other):
    Library(loaded, tmp_path).get(document())
    changed = {"weights": lambda: loaded_of(seed=1), "dtype": lambda: loaded_of(dtype=torch.bfloat16),
               "rotary": loaded_of, "family": lambda: loaded_of("qwen3")}[other]()
    if other == "rotary":
        changed.model.model.rotary_emb.inv_freq.mul_(0.9)
    found, there = Library(changed, tmp_path).get(document())
    assert not there and same(found, read_alone(changed.model, document()))
    assert Library(loaded_of(), tmp_path).get(document())[1]


def test_weights_written_in_place_are_another_model():
    loaded = loaded_of()
    library = Library(loaded)
    library.get(document())
    assert library.get(document())[1]
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    found, there = library.get(document())
    assert not there and same(found, read_alone(loaded.model, document()))


def test_damaged_files_are_made_again(loaded, tmp_path):
    """One flipped bit anywhere, or a file cut off: never served, counted, and whole afterwards."""
    whole = Library(loaded, tmp_path)
    wanted, _ = whole.get(document())
    file = whole.path(document())
    good = file.read_bytes()
    places = torch.randint(8, len(good), (25,), generator=torch.Generator().manual_seed(0)).tolist()
    broken = [good[:p] + bytes([good[p] ^ 1]) + good[p + 1 :] for p in [3, len(good) - 1, *places]]
    for bad in [*broken, b"", good[:100], good[:-1], b"something else"]:
        file.write_bytes(bad)
        library = Library(loaded, tmp_path)
        found, there = library.get(document())
        assert not there and library.counts.damaged == 1 and same(found, wanted)
        assert Library(loaded, tmp_path).get(document())[1]


def test_a_file_under_another_name_is_not_served(loaded, tmp_path):
    library = Library(loaded, tmp_path)
    library.get(document())
    place = library.path(document(seed=1))
    place.parent.mkdir(exist_ok=True, parents=True)
    place.write_bytes(library.path(document()).read_bytes())
    found, there = Library(loaded, tmp_path).get(document(seed=1))
    assert not there and found.ids.tolist() == document(seed=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_not_be_written(loaded, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(Refused, match="can't keep a document's cache"):
        Library(loaded, tmp_path / "x").get(document())


def test_a_file_in_place_of_the_folder_is_refused(loaded, tmp_path):
    (tmp_path / "x").write_text("a file")
    with pytest.raises(Refused, match="can't keep a document's cache"):
        Library(loaded, tmp_path / "x").get(document())


def test_the_least_recently_used_leave_memory_first(loaded):
    size = read_alone(loaded.model, document()).nbytes
    library = Library(loaded, memory=int(2.5 * size))
    for seed in (0, 1):
        library.get(document(seed=seed))
    library.get(document(seed=0))  # used again
    library.get(document(seed=2))
    assert [document(seed=s) in library for s in (0, 1, 2)] == [True, False, True]
    assert (library.counts.evicted, library.counts.documents, library.counts.bytes) == (1, 2, 2 * size)
    big = library.get(document(n=60))[0]  # larger than all of the memory: given, not held
    assert big.nbytes > library.memory and document(n=60) not in library and library.counts.bytes == 2 * size
    assert not library.get(document(seed=1))[1]


def test_limits_in_words(loaded):
    assert Library(loaded, memory="2 MiB").memory == 2 << 20 and Library(loaded, memory=100).memory == 100
    for bad in ("20 tokens", "0.5", "much"):
        with pytest.raises(Refused, match="expected"):
            Library(loaded, memory=bad)


def test_what_was_evicted_from_memory_comes_from_disk(loaded, tmp_path):
    library = Library(loaded, tmp_path, memory=1)
    for _ in range(3):
        for seed in (0, 1, 2):
            library.get(document(seed=seed))
    assert (library.counts.hits, library.counts.misses, library.counts.from_disk) == (6, 3, 6)


def test_look_ups_stay_good_after_many_questions(loaded):
    """Orders, methods and questions of all kinds: stored caches are never written into."""
    library = Library(loaded)
    documents = texts()[1]
    kept = [library.get(d)[0] for d in documents]
    copies = [(c.k.clone(), c.v.clone()) for c in kept]
    draw = torch.Generator().manual_seed(0)
    first = None
    for turn in range(12):
        order = torch.randperm(4, generator=draw).tolist() if turn else [0, 1, 2, 3]
        pieces = [Piece(library.get(documents[i])[0]) for i in order]
        context = assemble(parts_of(loaded.model), model_key(loaded.model), None, pieces)
        for text in ("full-recompute", "prophetkv(r=0.5)", "cacheblend(r=0.5)"):
            found = join(loaded.model, context, document(4, turn), Recipe.parse(text).reuse)
            first = found.fused.logits if first is None else first
    assert all(torch.equal(c.k, k) and torch.equal(c.v, v) for c, (k, v) in zip(kept, copies))
    assert library.counts.misses == 4 and library.counts.hits == 48
    context = assemble(parts_of(loaded.model), model_key(loaded.model), None, [Piece(library.get(d)[0]) for d in documents])
    assert torch.equal(join(loaded.model, context, document(4, 0), Recipe.parse("full-recompute").reuse).fused.logits, first)


def test_threads_share_a_library(loaded):
    library = Library(loaded)
    found: list = []
    threads = [threading.Thread(target=lambda i=i: found.append(library.get(document(seed=i % 2))[0])) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({id(c) for c in found}) == 2 and library.counts.misses == 2 and library.counts.hits == 6


def test_nothing_to_read_is_refused(loaded):
    with pytest.raises(Refused, match="no tokens"):
        Library(loaded).get([])
    with pytest.raises(Refused, match="reads at most 256"):
        Library(loaded).get(document(n=300))


def test_frequencies_that_follow_the_length_do_not_hide_entries():
    loaded = loaded_of(rope_parameters=LONGROPE)
    library, before = Library(loaded), loaded.model.model.rotary_emb.inv_freq.clone()
    cache, _ = library.get(document())
    loaded.model(tiny_ids(1, 100))  # turns the frequencies to those of a long prompt
    assert not torch.equal(before, loaded.model.model.rotary_emb.inv_freq)
    found, there = library.get(document())
    assert there and found is cache
