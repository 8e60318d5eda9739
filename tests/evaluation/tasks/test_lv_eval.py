import json

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import total_length
from longspan.evaluation.tasks.lv_eval import LVEval
from longspan.registry import Refused


def write(folder, name, *rows):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(folder / f"{name}.jsonl")


def row(**changes):
    return {"input": "Who?", "context": "It was Ada, they say. " * 200, "answers": ["ada lovelace", "ada"],
            "answer_keywords": "lovelace", **changes}


def test_the_gate_and_the_first_reference(tmp_path):
    path = write(tmp_path, "hotpotwikiqa_mixup_16k", row(), row(input="When?", answer_keywords=None))
    task, tokenizer = LVEval(path=path), tiny_tokenizer()
    found = list(task.examples(700, 9, 0, tokenizer))
    assert len(found) == 2
    assert all(total_length(example, tokenizer) <= 700 and example.meta["truncated"] for example in found)
    assert "Who?" in found[0].question
    assert found[0].max_new_tokens == 64
    assert task.metric("Ada Lovelace", found[0]) == 1.0
    assert task.metric("Ada", found[0]) == 0.0  # the keyword is missing
    assert task.metric("Ada", found[1]) == pytest.approx(2 / 3)  # no keywords: F1 with the first reference only
    assert task.metric("", found[0]) == 0.0
    assert task.text.sha256


def test_factrecall_in_a_folder(tmp_path):
    write(tmp_path, "factrecall_en_32k", row(answers=["ada"]))
    task = LVEval(path=str(tmp_path), name="factrecall_en_32k")
    example, = task.examples(700, 1, 0, tiny_tokenizer())
    assert example.max_new_tokens == 16
    assert task.metric("ada", example) == 1.0
    with pytest.raises(Refused, match="did you mean 'factrecall_en_32k'"):
        list(LVEval(path=str(tmp_path), name="factrecall_en").examples(700, 1, 0, tiny_tokenizer()))


def test_refusals(tmp_path):
    with pytest.raises(Refused, match="lv-eval needs path="):
        list(LVEval().examples(700, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="no field 'answers'"):
        broken = row()
        del broken["answers"]
        list(LVEval(path=write(tmp_path, "factrecall_en_16k", broken)).examples(700, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="unknown set of LV-Eval"):
        list(LVEval(path=write(tmp_path, "mystery_16k", row())).examples(700, 1, 0, tiny_tokenizer()))
