"""Under the recipe `full` the harness's scores are those of its own `hf` model."""

from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.peer

TEXT = "The river is cold in March, and the bridge near the mill was closed for repairs. " * 6
TURN = [{"role": "user", "content": TEXT + "What was closed?"}]
STARTS = ("", "The bridge ", TEXT, TEXT * 3, TEXT + "What was closed? Answer:")


def request(*args):
    return SimpleNamespace(args=args, task_name="a")


@pytest.fixture(scope="module", params=["tiny", "bundled"])
def pair(request, tmp_path_factory):
    """Ours and theirs on the same weights, in float32."""
    from lm_eval.models.huggingface import HFLM
    from tiny_folder import write_tiny_folder

    from longspan.evaluation.harness import LongspanLM
    from longspan.models import load

    folder = None if request.param == "bundled" else write_tiny_folder(tmp_path_factory.mktemp("tiny"), positions=512)
    loaded = load(folder, dtype="float32", device="cpu")
    theirs = HFLM(pretrained=str(loaded.folder), dtype="float32", device="cpu", batch_size=1, max_length=256)
    return LongspanLM(loaded, "full", max_length=256), theirs


def prompts(model):
    shown = model.apply_chat_template(TURN)
    return (*STARTS, shown)


def test_the_chat_template_and_tokens_are_theirs(pair):
    ours, theirs = pair
    assert prompts(ours) == prompts(theirs)
    for text in prompts(ours)[1:]:
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours._encode_pair(text, " yes") == theirs._encode_pair(text, " yes")
    assert ours.max_length == theirs.max_length and ours.prefix_token_id == theirs.prefix_token_id


def test_likelihoods_are_theirs(pair):
    ours, _ = pair
    asked = [request(text, more) for text in prompts(ours) for more in ("the bridge", " a", " near the old mill")]
    mine, other = (model.loglikelihood(asked, disable_tqdm=True) for model in pair)
    assert [v for v, _ in mine] == pytest.approx([v for v, _ in other], abs=2e-3, rel=1e-5)
    assert [g for _, g in mine] == [g for _, g in other]
    assert ours.ledger.means()["truncated"] > 0  # the long prompt lost its left end, in both


def test_rolling_likelihoods_are_theirs(pair):
    asked = [request(TEXT * 5), request("Short.")]
    mine, other = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in pair)
    assert mine == pytest.approx(other, rel=1e-5, abs=1e-3)


def test_texts_are_theirs(pair):
    for options in ({"until": [" the", "\n"], "max_gen_toks": 12}, {"until": [], "max_gen_toks": 8}):
        asked = [request(text, dict(options)) for text in prompts(pair[0])[1:]]
        mine, other = (model.generate_until(asked, disable_tqdm=True) for model in pair)
        assert mine == other
        assert any(mine)
