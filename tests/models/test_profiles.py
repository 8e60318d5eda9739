"""Profiles: written atomically, found by what they depend on, refused when they were made for something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny

from longspan.cache.budgets.lu_kv import LuKV
from longspan.models import bundled, profiles
from longspan.models.profiles import Profile
from longspan.registry import Refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


def made(model, method=None, score="knorm", value=0.5):
    key = profiles.key_of(model, method or LuKV(), score)
    return Profile(key, {"ratios": torch.full((99, 2, 2), value)}, {"seed": 3})


def test_found_where_it_was_saved(tmp_path):
    model = tiny("llama")
    path = profiles.save(made(model))
    assert path.is_relative_to(tmp_path / "cache" / "profiles")
    found = profiles.find(model, LuKV(budget=0.1), "knorm")
    assert found.key == made(model).key and found.notes == {"seed": 3}
    assert torch.equal(found.tensors["ratios"], torch.full((99, 2, 2), 0.5))
    assert profiles.find(model, LuKV(), "knorm") is found  # every layer asks; the file is read once
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_changed_file_is_read_again():
    model = tiny("llama")
    profiles.save(made(model))
    first = profiles.find(model, LuKV(), "knorm")
    profiles.save(made(model, value=0.25))
    assert profiles.find(model, LuKV(), "knorm") is not first
    assert profiles.find(model, LuKV(), "knorm").tensors["ratios"][0, 0, 0] == 0.25


def test_a_failed_write_leaves_what_was_there(monkeypatch):
    model = tiny("llama")
    path = profiles.save(made(model))
    before = path.read_bytes()

    def half(tensors, file, metadata):
        Path(file).write_bytes(before[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(profiles, "save_file", half)
    with pytest.raises(Refused, match="no space left on device"):
        profiles.save(made(model, value=0.25))
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"can't write the profile to .* set LONGSPAN_CACHE"):
        profiles.save(made(tiny("llama")), tmp_path / "file" / "p.safetensors")


def test_keys_tell_everything_apart_but_the_budget():
    model, other = tiny("llama"), tiny("llama", seed=1)
    path = lambda *given: profiles.key_of(*given).path  # noqa: E731
    same = {path(model, LuKV(budget=b), "knorm") for b in (0.1, 0.9, "5 tokens")}
    different = {path(other, LuKV(), "knorm"), path(model, LuKV(), "tova"), path(model, LuKV(n_sink=3), "knorm"),
                 path(model, LuKV(window=3), "knorm"), path(model, LuKV(mode="per-layer"), "knorm")}
    assert len(same) == 1 and len(different | same) == 6


def test_a_missing_profile_names_the_exact_command():
    model = tiny("llama")
    model.config._name_or_path = "/models/my model"
    with pytest.raises(Refused) as error:
        profiles.find(model, LuKV(budget="64 tokens"), "snapkv(window=8)")
    assert str(error.value) == (
        "lu-kv needs a profile of snapkv(window=8) on this model and there is none; make it once with: "
        "longspan profile 'snapkv(window=8) @ lu-kv(budget=\"64 tokens\")' --model '/models/my model'")


def test_the_bundled_model_needs_no_name(monkeypatch, tmp_path):
    model = tiny("llama")
    monkeypatch.setattr(profiles, "bundled_gguf", lambda: Path("somewhere/tiny.gguf"))
    monkeypatch.setattr(profiles, "resolve", lambda: (tmp_path / "tiny-0123-v2", bundled.BUNDLED_NAME))
    for name, wanted in (("tiny-0123-v2", ""), ("tiny-4567-v2", f" --model {tmp_path / 'tiny-4567-v2'}")):
        model.config._name_or_path = str(tmp_path / name)
        assert profiles.command(model, LuKV(), "knorm") == f"longspan profile 'knorm @ lu-kv'{wanted}"


def test_a_file_may_be_named(tmp_path):
    model, file = tiny("llama"), tmp_path / "mine.safetensors"
    with pytest.raises(Refused, match=r"none in '.*mine.safetensors'; .* --out .*mine.safetensors"):
        profiles.find(model, LuKV(), "knorm", str(file))
    profiles.save(made(model), file)
    assert profiles.find(model, LuKV(), "knorm", str(file)).key == made(model).key


@pytest.mark.parametrize(("method", "score", "seed", "what"), [
    (LuKV(), "tova", 0, "made for score knorm, and tova is wanted"),
    (LuKV(n_sink=2), "knorm", 0, '"n_sink": 4.* and .*"n_sink": 2'),
    (LuKV(window=9), "knorm", 0, '"window": 1.* and .*"window": 9'),
    (LuKV(mode="per-layer"), "knorm", 0, "made for settings"), (LuKV(), "knorm", 1, "made for model [0-9a-f]{64}, and"),
])
def test_a_profile_of_something_else_is_refused(tmp_path, method, score, seed, what):
    file = profiles.save(made(tiny("llama")), tmp_path / "mine.safetensors")
    with pytest.raises(Refused, match=what):
        profiles.find(tiny("llama", seed=seed), method, score, str(file))


def test_what_is_no_profile_is_refused(tmp_path):
    from safetensors.torch import save_file

    file = profiles.save(made(tiny("llama")), tmp_path / "mine.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(Refused, match="can't be read"):
        profiles.load(file)
    save_file({"ratios": torch.ones(1)}, file, metadata={"format": "longspan-profile-0"})
    with pytest.raises(Refused, match="'longspan-profile-0', expected 'longspan-profile-1'"):
        profiles.load(file)
    save_file({"ratios": torch.ones(1)}, file, metadata={"format": "longspan-profile-1", "key": "{}", "notes": "{}"})
    with pytest.raises(Refused, match="can't be read"):
        profiles.load(file)
    with pytest.raises(Refused, match="no such file"):
        profiles.load(tmp_path / "nothing.safetensors")


def test_a_models_key_follows_its_weights(monkeypatch):
    model, asked = tiny("llama"), []
    monkeypatch.setattr(profiles, "fingerprint", lambda m: asked.append(m) or f"key {len(asked)}")
    assert profiles.model_key(model) == profiles.model_key(model) == "key 1"
    model.lm_head.weight[0, 0] += 1
    assert profiles.model_key(model) == "key 2"
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert profiles.model_key(model) == profiles.model_key(model) == "key 3"


def test_weights_changed_for_a_while_make_another_model():
    """Silencing heads escapes the sample of a fingerprint; a profile or a document's cache must not."""
    from longspan.recipe import Recipe

    model = tiny("llama", layers=4, heads=8, kv_heads=2)
    plain = profiles.model_key(model)
    with Recipe.parse("head-ablation(heads=1)").on(model):
        silenced = profiles.model_key(model)
        with Recipe.parse("head-ablation(heads=1, score=random, seed=3)").on(model):
            assert profiles.model_key(model) not in (plain, silenced)
        assert profiles.model_key(model) == silenced
    assert profiles.model_key(model) == plain != silenced


def test_damaged_weights_of_ones_own_give_way_to_those_of_the_package(tmp_path, monkeypatch):
    from profiled import random_weights

    from longspan.cache.scores.indexmem import IndexMem

    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "package")
    model, method = tiny("llama"), IndexMem()
    key = profiles.trained_key(model, method)
    profiles.save(Profile(key, random_weights(model)), key.shipped)
    key.path.parent.mkdir(parents=True)
    key.path.write_bytes(b"not a profile")
    found = profiles.find_trained(model, method)
    assert torch.equal(found.tensors["indexer.key"], random_weights(model)["indexer.key"])
