"""longspan beside kvpress: the same entries kept, and the time it takes.

    python benchmarks/kvpress_peer.py --setup                       makes the environment that kvpress needs
    python benchmarks/kvpress_peer.py --out docs/data/kvpress.json  compares (makes the environment if need be)
    python benchmarks/kvpress_peer.py --render                      prints the stored result as Markdown

*Entries kept*: both packages read the same tokens with the same weights in float32. Per layer and KV head the two
sets of kept positions must be equal; where they are not, the entries that changed places must be tied, in both
packages' scores, within `TIE`. KNorm does tie: in the first layer a token's key has the same norm wherever it stands.
*Time*: reading a prompt, compressing and writing 64 tokens, in processes that take turns, with the same PyTorch and
threads, and beside it each environment's time for dense attention without either package. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).resolve().parent / "peers"
ENVIRONMENT = ROOT / ".venv-kvpress"
RESULT = ROOT / "docs" / "data" / "kvpress.json"
KVPRESS = ("kvpress==0.5.5", "transformers<5.3")

METHODS = ("snapkv", "knorm", "streaming-llm", "tova", "keydiff")
DENSE = "dense"
PROTECTED = {"snapkv": 64, "tova": 1}
"""Newest entries that a method always keeps; their scores are a mark, not a measurement."""
TIE = 1e-5
"""Relative distance of two scores up to which float32 can't order them after thirty layers."""
INDEX_LENGTHS, INDEX_RATIOS = (603, 2003), (0.5, 0.8)
TIMED_LENGTHS, TIMED_RATIO, NEW_TOKENS = (2048, 4096), 0.8, 64
WARM_UP = 336
"""Tokens each method reads before it is timed; a fifth of them must hold the window of SnapKV."""


class NoPeer(RuntimeError):
    """The environment of kvpress can't be made here; the message says why."""


# ------------------------------------------------------------------------------------------------------ environment


def setup(folder: Path = ENVIRONMENT) -> Path:
    """The peer environment's Python, with the same PyTorch as here; makes the environment unless it is there.

    Raises:
        NoPeer: the packages can't be installed.
    """
    own = version("torch")
    wanted = [f"torch=={own.split('+')[0]}", *KVPRESS]
    python, stamp, made = folder / "bin" / "python", folder / ".installed", "\n".join([own, *KVPRESS])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made and python.exists():
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, wanted[0]], [*pip, *wanted]):
        _do(command)
    theirs = _do([str(python), "-c", "from importlib.metadata import version; print(version('torch'))"])
    if theirs != own:
        raise NoPeer(f"PyTorch is {own} here and {theirs} in {folder.name}; times of different builds say nothing.")
    stamp.write_text(made, encoding="utf-8")
    return python


def _do(command: list[str]) -> str:
    """Run a command of the set-up; what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPeer(f"{' '.join(command[1:])}: {error}") from error
    if done.returncode:
        raise NoPeer(f"{' '.join(command[1:])}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------- running both sides


def start_side(script: str, python: Path, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run one side's job in a process of its own and read its answer."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(job), encoding="utf-8")
    threads = str(job["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([str(python), str(PEERS / script), str(out / "job.json"), str(out)], env=environment,
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-3000:]}")
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def both_sides(job: dict[str, Any], python: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same job in longspan's environment, then in kvpress's."""
    ours = start_side("longspan_side.py", Path(sys.executable), job, out / "ours")
    return ours, start_side("kvpress_side.py", python, job, out / "theirs")


def prompts(lengths: Iterable[int]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The first tokens of Python's help texts, and where model and text come from."""
    from longspan.evaluation.texts import load_text
    from longspan.models import load

    loaded, text = load(), load_text("pydoc")
    ids = loaded.tokenizer(text.text[: 8 * max(lengths)], add_special_tokens=False)["input_ids"]
    origin = {"model": loaded.name, "folder": str(loaded.folder), "text": text.name, "text_sha256": text.sha256}
    return {str(n): ids[:n] for n in lengths}, origin


# ------------------------------------------------------------------------------------------------------ entries kept


def compare_kept(ours: dict[str, Tensor], theirs: dict[str, Tensor], protected: int = 0) -> dict[str, Any]:
    """How two packages' kept sets differ.

    Args:
        ours, theirs: ``kept`` (layers, heads, n) ascending positions, ``scores`` (layers, heads, tokens).
        protected: newest entries whose score is a mark.

    Returns:
        ``heads`` compared, how many are ``equal``, ``tied`` (every entry that changed places is tied in both packages'
        scores), and ``different``; which entries ``changed`` places, and the widest relative ``gap`` between their
        scores; and ``score_error``, the largest difference between the packages' scores relative to the largest score
        of the head.

    Raises:
        ValueError: the packages kept different numbers.
    """
    if ours["kept"].shape != theirs["kept"].shape:
        raise ValueError(f"kept {tuple(ours['kept'].shape)} here, {tuple(theirs['kept'].shape)} there "
                         "(layers, heads, entries).")
    layers, heads, _ = ours["kept"].shape
    found: dict[str, Any] = {"heads": layers * heads, "equal": 0, "tied": 0, "different": 0, "gap": 0.0, "changed": []}
    for layer in range(layers):
        for head in range(heads):
            a, b = (set(side["kept"][layer, head].tolist()) for side in (ours, theirs))
            if a == b:
                found["equal"] += 1
                continue
            gap = max(spread(side["scores"][layer, head], a ^ b) for side in (ours, theirs))
            found["gap"] = max(found["gap"], gap)
            found["tied" if gap <= TIE else "different"] += 1
            found["changed"].append({"layer": layer, "head": head, "gap": gap, "ours": sorted(a - b),
                                     "theirs": sorted(b - a)})
    end = ours["scores"].shape[-1] - protected
    x, y = (side["scores"][..., :end].double() for side in (ours, theirs))
    found["score_error"] = float(((x - y).abs().amax(-1) / y.abs().amax(-1).clamp(min=1e-30)).max())
    return found


def spread(scores: Tensor, positions: Iterable[int]) -> float:
    """Largest distance between the scores at `positions`, relative to the largest of them."""
    picked = scores[list(positions)].double()
    return float((picked.max() - picked.min()) / picked.abs().max().clamp(min=1e-30))


def kept_counts_agree(length: int, ratio: float) -> bool:
    """Whether both packages round to the same number of entries; each is right by its own definition."""
    return int(length * (1 - ratio)) == int(round(1 - ratio, 6) * length + 1e-9)


def compare_indices(python: Path, threads: int, lengths: Sequence[int] = INDEX_LENGTHS, new_tokens: int = 16,
                    say: Callable[[str], None] = print) -> dict[str, Any]:
    """Kept entries of every method at every length and ratio, float32."""
    ids, origin = prompts(lengths)
    cases = [(m, r, n) for n in lengths for r in INDEX_RATIOS for m in METHODS if kept_counts_agree(n, r)]
    runs = [{"method": m, "ratio": r, "prompt": str(n), "new_tokens": new_tokens, "record": True} for m, r, n in cases]
    job = {"folder": origin.pop("folder"), "dtype": "float32", "threads": threads, "prompts": ids, "warm_up": 0,
           "runs": runs}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        ours, theirs = both_sides(job, python, Path(temporary))
        for i, (method, ratio, length) in enumerate(cases):
            a, b = (load_file(Path(temporary) / name / f"{i}.safetensors") for name in ("ours", "theirs"))
            found = compare_kept(a, b, PROTECTED.get(method, 0))
            if method == "streaming-llm":
                found["score_error"] = None  # marks on both sides, and not the same ones
            tokens = (ours["rows"][i]["tokens"], theirs["rows"][i]["tokens"])
            rows.append({"method": method, "ratio": ratio, "tokens": length, "kept": a["kept"].shape[-1], **found,
                         "same_answer": agreeing(*tokens), "answer": new_tokens})
            say(f"{method:14} evicted {ratio}  {length:5} tokens  equal {found['equal']}/{found['heads']}  "
                f"tied {found['tied']}  different {found['different']}  gap {found['gap']:.1e}  "
                f"answer {agreeing(*tokens)}/{new_tokens}")
    return {**origin, "dtype": "float32", "tie": TIE, "rows": rows, "environments": environments(ours, theirs)}


def agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def environments(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    return {"longspan": ours["versions"], "kvpress": theirs["versions"]}


# --------------------------------------------------------------------------------------------------------------- time


def compare_times(python: Path, threads: int, rounds: int = 3, lengths: Sequence[int] = TIMED_LENGTHS,
                  new_tokens: int = NEW_TOKENS, dtype: str | None = None,
                  say: Callable[[str], None] = print) -> dict[str, Any]:
    """Seconds of prefill, compression and decoding; the two packages' processes take turns."""
    from longspan.models.load import default_dtype

    ids, origin = prompts(lengths)
    dtype = dtype or str(default_dtype()[0]).removeprefix("torch.")
    methods = (DENSE, *METHODS)
    seen: dict[tuple[int, str], list[dict[str, Any]]] = {}
    cases = [(length, method) for length in lengths for method in methods]
    runs = [{"method": m, "ratio": TIMED_RATIO, "prompt": str(n), "new_tokens": new_tokens} for n, m in cases]
    job = {"folder": origin.pop("folder"), "dtype": dtype, "threads": threads, "prompts": ids, "warm_up": WARM_UP,
           "runs": runs}
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(rounds):
            ours, theirs = both_sides(job, python, Path(temporary))
            for case, a, b in zip(cases, ours["rows"], theirs["rows"], strict=True):
                seen.setdefault(case, []).append({"ours": a, "theirs": b})
                say(f"round {turn + 1}  {case[0]:5} tokens  {case[1]:14} {_total(a):7.2f} s  kvpress {_total(b):7.2f} s")
    rows = [timed_row(method, length, turns) for (length, method), turns in seen.items()]
    return {**origin, "dtype": dtype, "ratio": TIMED_RATIO, "new_tokens": new_tokens, "rounds": rounds,
            "threads": threads, "rows": rows, "environments": environments(ours, theirs)}


def _total(row: dict[str, Any]) -> float:
    return row["prefill_s"] + row["decode_s"]


def timed_row(method: str, length: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, all rounds beside them, and ours as a multiple of theirs."""
    row: dict[str, Any] = {"method": method, "tokens": length}
    for name in ("ours", "theirs"):
        totals = [_total(turn[name]) for turn in turns]
        row[name] = {"total_s": statistics.median(totals), "rounds_s": totals} | {
            key: statistics.median(turn[name][key] for turn in turns) for key in ("prefill_s", "decode_s")}
    row["ratio"] = row["ours"]["total_s"] / row["theirs"]["total_s"]
    return row


# -------------------------------------------------------------------------------------------------------------- result


def machine(threads: int) -> dict[str, Any]:
    """What the result depends on."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    can = [flag for flag, yes in torch.cpu.get_capabilities().items() if yes is True and flag.endswith("bf16")]
    return {"cpu": names[0] if names else platform.processor(), "bfloat16": can, "cores": os.cpu_count(),
            "threads": threads, "python": platform.python_version()}


def render(result: dict[str, Any]) -> str:
    """The result as Markdown: what was compared, and a table for entries and one for times."""
    return "\n\n".join([*(_render_indices(result["indices"]) if "indices" in result else []),
                        *(_render_times(result["timing"], result["machine"]) if "timing" in result else [])]) + "\n"


def _render_indices(found: dict[str, Any]) -> list[str]:
    versions = found["environments"]["kvpress"]
    text = (f"Entries kept, against kvpress {versions['kvpress']}: {found['model']} in {found['dtype']}, the same "
            f"tokens, PyTorch {versions['torch']} on both sides. A head counts as tied when all entries that changed "
            f"places have the same score within {found['tie']:.0e} (relative) in both packages; *widest gap* is the "
            "largest such distance, *score error* the largest difference between the packages' scores.")
    return [text, _table(("method", "evicted", "tokens", "kept", "heads", "equal", "tied", "different",
                          "widest gap", "score error", "same answer tokens"), map(_index_cells, found["rows"]))]


def _index_cells(row: dict[str, Any]) -> tuple[str, ...]:
    error = "–" if row["score_error"] is None else f"{row['score_error']:.0e}" if row["score_error"] else "0"
    numbers = (f"{row[name]:,}" for name in ("tokens", "kept", "heads", "equal", "tied", "different"))
    gap = f"{row['gap']:.0e}" if row["gap"] else "0"
    return (row["method"], f"{row['ratio']:.0%}", *numbers, gap, error, f"{row['same_answer']} of {row['answer']}")


def _render_times(found: dict[str, Any], where: dict[str, Any]) -> list[str]:
    ours, theirs = (found["environments"][name] for name in ("longspan", "kvpress"))
    text = (f"Seconds to read a prompt, keep {1 - found['ratio']:.0%} of it and write {found['new_tokens']} tokens: "
            f"{found['model']} in {found['dtype']}, {found['threads']} threads of an {where['cpu']}, median of "
            f"{found['rounds']} rounds of alternating processes, PyTorch {ours['torch']} on both sides, transformers "
            f"{ours['transformers']} with longspan and {theirs['transformers']} with kvpress {theirs['kvpress']}. "
            "*Dense* is transformers alone in each environment.")
    return [text, _table(("method", "tokens", "longspan (prefill + decode)", "kvpress (prefill + decode)",
                          "longspan / kvpress"), map(_time_cells, found["rows"]))]


def _time_cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{t['total_s']:.2f} ({t['prefill_s']:.2f} + {t['decode_s']:.2f})" for t in (row["ours"], row["theirs"]))
    return (row["method"], f"{row['tokens']:,}", *times, f"{row['ratio']:.2f}")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the environment and stop")
    parser.add_argument("--render", action="store_true", help="print the stored result (--out) as Markdown and stop")
    parser.add_argument("--out", type=Path, help="the result as JSON (what --render reads, or docs/data/kvpress.json)")
    parser.add_argument("--only", choices=("indices", "timing"), help="one part; the other stays in --out as it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths of the timing", default=TIMED_LENGTHS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the timing; longspan's default otherwise")
    args = parser.parse_args()
    if args.render:
        print(render(json.loads((args.out or RESULT).read_text(encoding="utf-8"))), end="")
        return
    python = setup()
    if args.setup:
        print(python)
        return
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.only and args.out and args.out.is_file() else {}
    if args.only != "timing":
        result["indices"] = compare_indices(python, args.threads)
    if args.only != "indices":
        result["timing"] = compare_times(python, args.threads, args.rounds, args.lengths, dtype=args.dtype)
        result["machine"] = machine(args.threads)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(render(result), end="")


if __name__ == "__main__":
    main()
