import json

import pytest
from tiny_tokenizer import tiny_tokenizer

from longspan.evaluation.base import prompt_parts, total_length
from longspan.evaluation.tasks.file_context import middle_cut
from longspan.evaluation.tasks.longbench import SUBSETS, LongBench, bucket
from longspan.registry import Refused


def row(**changes):
    return {"input": "Who?", "context": "It was Ada. " * 40, "answers": ["Ada", "Ada Lovelace"], "length": 120,
            "dataset": "hotpotqa", "all_classes": None, **changes}


@pytest.fixture()
def folder(tmp_path):
    def write(name, *rows):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\n")
        return str(tmp_path / f"{name}.jsonl")

    write.path = str(tmp_path)
    return write


def test_all_twenty_one_tasks_with_their_allowance():
    assert len(SUBSETS) == 21
    allowances = {name: subset.new_tokens for name, subset in SUBSETS.items()}
    assert allowances["gov_report"] == allowances["vcsum"] == 512
    assert allowances["hotpotqa"] == allowances["passage_count"] == 32
    assert allowances["narrativeqa"] == allowances["samsum"] == 128
    assert {name for name, subset in SUBSETS.items() if not subset.chat} == {
        "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, subset in SUBSETS.items() if subset.first_line} == {"trec", "triviaqa", "samsum", "lsht"}


def test_rows_in_the_order_of_the_file(folder):
    path = folder("hotpotqa", row(), row(input="When?", answers=["1843"]))
    found = list(LongBench(path=path).examples(2000, 10, 0, tiny_tokenizer()))
    assert [example.answers for example in found] == [("Ada", "Ada Lovelace"), ("1843",)]
    assert "When?" in found[1].question
    assert not found[0].meta["truncated"]
    assert found[0].context.endswith(row()["context"])
    task = LongBench(path=path)
    assert task.metric("Ada", found[0]) == 1.0
    assert task.metric("It was Ada Lovelace", found[0]) == pytest.approx(2 * 2 / (4 + 2))
    assert task.metric("", found[0]) == 0.0


def test_long_prompts_keep_first_and_last_half(folder):
    tokenizer = tiny_tokenizer()
    long = " ".join(f"w{i}" for i in range(2000))
    example, = LongBench(path=folder("hotpotqa", row(context=long))).examples(1000, 1, 0, tokenizer)
    assert total_length(example, tokenizer) <= 1000
    assert total_length(example, tokenizer) > 980
    assert example.meta["truncated"]
    kept = example.context.split()
    assert "w0" in kept
    assert kept[-1] == "w1999"
    gap = next(i for i, word in enumerate(kept) if word == "w1999") - len(kept) + 1
    assert gap == 0
    parts = prompt_parts(example, tokenizer)
    middle = len(parts.ids) // 2
    before, after = tokenizer.decode(parts.ids[:middle - 30]), tokenizer.decode(parts.ids[middle + 30:])
    assert "w1999" not in before and "w0 " in before
    assert "w1999" in after and "w0 " not in after


def test_middle_cut_counts_the_question_to_the_last_half():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("".join(f" {i % 10}" for i in range(100)), add_special_tokens=False)
    first, last = 30, 10
    assert middle_cut(ids, 40, 20, tokenizer) == tokenizer.decode(ids[:first]) + tokenizer.decode(ids[-last:])
    assert middle_cut(ids, 10, 50, tokenizer) == tokenizer.decode(ids[:10])


def test_few_shot_tasks_are_cut_at_the_first_newline_and_use_no_template(folder):
    path = folder("trec", row(dataset="trec", answers=["Food"], all_classes=["Food", "Sport"]))
    task, tokenizer = LongBench(path=path), tiny_tokenizer()
    example, = task.examples(1500, 1, 0, tokenizer)
    assert task.metric("\nFood\nSport", example) == 1.0
    assert task.metric("Food Sport", example) == 0.5
    assert tokenizer.bos_token_id not in prompt_parts(example, tokenizer).ids  # the template's turn marker


def test_upstream_scoring_is_a_flag(folder):
    classes = ["Animal", "Anim", "Animal food"]
    path = folder("trec", row(dataset="trec", answers=["Animal food"], all_classes=classes))
    example, = LongBench(path=path).examples(1500, 1, 0, tiny_tokenizer())
    assert LongBench(path=path).metric("Animal food", example) == 1.0
    assert LongBench(path=path, upstream=True).metric("Animal food", example) == 0.5


@pytest.mark.parametrize("name,right,wrong", [
    ("passage_count", "7", "8"), ("passage_retrieval_en", "Paragraph 7", "Paragraph 1"), ("lcc", "return x", ""),
    ("gov_report", "a good summary", "zzz"), ("qasper", "unanswerable", "yes"),
])
def test_metric_of_each_kind(folder, name, right, wrong):
    path = folder(name, row(dataset=name, answers=[right]))
    example, = LongBench(path=path).examples(2500, 1, 0, tiny_tokenizer())
    assert LongBench(path=path).metric(right, example) == 1.0
    assert LongBench(path=path).metric(wrong, example) == 0.0


def test_folder_names_and_long_bench_e(folder):
    folder("hotpotqa", row())
    folder("hotpotqa_e", row(length=5000))
    example, = LongBench(path=folder.path, name="hotpotqa_e").examples(2000, 1, 0, tiny_tokenizer())
    assert example.meta["bucket"] == "4-8k"
    assert example.meta["subset"] == "hotpotqa"
    assert [bucket(words) for words in (3999, 4000, 8000)] == ["0-4k", "4-8k", "8k+"]
    with pytest.raises(Refused, match="did you mean 'hotpotqa'"):
        list(LongBench(path=folder.path, name="hotpot").examples(2000, 1, 0, tiny_tokenizer()))


def test_files_that_are_not_there_or_not_right(folder, tmp_path):
    with pytest.raises(Refused, match="longbench needs path="):
        list(LongBench().examples(2000, 1, 0, tiny_tokenizer()))
    with pytest.raises(Refused, match="no such file"):
        list(LongBench(path=str(tmp_path / "none.jsonl")).examples(2000, 1, 0, tiny_tokenizer()))
    (tmp_path / "bad.jsonl").write_text("{not json}\n")
    with pytest.raises(Refused, match="line 1: not a JSON object"):
        list(LongBench(path=str(tmp_path / "bad.jsonl")).examples(2000, 1, 0, tiny_tokenizer()))
    path = folder("hotpotqa", {"input": "x", "answers": []})
    with pytest.raises(Refused, match="no field 'context'"):
        list(LongBench(path=path).examples(2000, 1, 0, tiny_tokenizer()))


def test_floor_holds_the_longest_question(folder):
    path = folder("hotpotqa", row(), row(input="Who was it then? " * 60))
    task, tokenizer = LongBench(path=path), tiny_tokenizer()
    floor = task.floor(tokenizer)
    assert floor > 600
    assert all(total_length(e, tokenizer) <= floor for e in task.examples(floor, 2, 0, tokenizer))
    assert task.text.sha256
