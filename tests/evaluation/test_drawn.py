"""Examples are drawn once, and are the same whether they were there or not."""

from __future__ import annotations

import copy
import json
import os

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation import parse_task
from longspan.evaluation.drawn import MONTH, draw
from longspan.registry import Refused

TASKS = ("passkey", "niah", "ruler-niah-multikey-1", "ruler-vt", "perplexity")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_EXAMPLES", "1")
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    return tmp_path / "examples"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def refuse_to_draw(task, monkeypatch):
    monkeypatch.setattr(type(task), "draft", lambda *_: pytest.fail("drawn again"))


@pytest.mark.parametrize("name", TASKS)
def test_what_is_kept_is_what_is_drawn(name, folder, tokenizer, monkeypatch):
    task = parse_task(name)
    length = max(700, task.floor(tokenizer))
    plain = list(task.examples(length, 3, 5, tokenizer))
    first = draw(task, length, 3, 5, tokenizer)
    refuse_to_draw(task, monkeypatch)
    again = draw(parse_task(name), length, 3, 5, tokenizer)
    assert first == again == draw(task, length, 2, 5, tokenizer) + again[2:]
    assert json.dumps([vars(e) for e in plain]) == json.dumps([vars(e) for e in again])


def test_a_longer_run_draws_only_what_is_missing(folder, tokenizer, monkeypatch):
    task, drawn = parse_task("passkey"), []
    want = draw(task, 500, 2, 0, tokenizer)
    draft = type(task).draft
    monkeypatch.setattr(type(task), "draft", lambda self, key, t: drawn.append(key.index) or draft(self, key, t))
    more = draw(task, 500, 5, 0, tokenizer)
    assert drawn[-3:] == [2, 3, 4] and min(drawn) >= 2 and more[:2] == want and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("change", ["seed", "length", "knob", "template"])
def test_everything_that_decides_examples_is_in_the_key(change, folder, tokenizer):
    task = parse_task("passkey(digits=4)" if change == "knob" else "passkey")
    other = copy.deepcopy(tokenizer)
    if change == "template":
        other.chat_template = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    draw(parse_task("passkey"), 500, 1, 0, tokenizer)
    draw(task, 600 if change == "length" else 500, 1, int(change == "seed"), other)
    assert len(list(folder.iterdir())) == 2


def test_damage_is_mended_and_old_files_go(folder, tokenizer):
    task = parse_task("passkey")
    want = draw(task, 500, 1, 0, tokenizer)
    (file,) = folder.iterdir()
    file.write_text("{", encoding="utf-8")
    old = folder / "old.json"
    old.write_text("{}", encoding="utf-8")
    os.utime(old, (old.stat().st_mtime - MONTH - 9,) * 2)
    assert draw(task, 500, 1, 0, tokenizer) == want
    assert not old.exists() and json.loads(file.read_text(encoding="utf-8"))["complete"] is False


def test_refusals_stay_and_files_of_the_user_are_read_each_time(folder, tokenizer, tmp_path):
    with pytest.raises(Refused, match="ask for at least"):
        draw(parse_task("passkey"), 20, 1, 0, tokenizer)
    text = tmp_path / "text.txt"
    text.write_text("One sentence after another. " * 400, encoding="utf-8")
    assert draw(parse_task(f'perplexity(path="{text}")'), 500, 1, 0, tokenizer)
    assert not folder.exists()
