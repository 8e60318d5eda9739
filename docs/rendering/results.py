"""Measured results from committed data: the demo's table and pictures, the speed benchmarks, the reproduction table.

Files in docs/data/ come from `longspan compare --out` (the demo), from `benchmarks/` and from `longspan reproduce`.
Nothing here measures, and no figure is typed by hand.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from longspan.reporting import human_bytes, human_seconds, markdown_table, pareto_svg
from longspan.reporting.experiments import reproduction_table
from longspan.reporting.tables import BESIDE, ranked
from rendering.text import cell, table

BENCHMARKS = {
    "block_sparse": "block_sparse.py",
    "reading": "reading.py",
    "speculative": "speculative.py",
    "low_bit": "low_bit.py",
    "context_parallel": "context_parallel.py",
    "entmax": "entmax.py",
    "plash_scaling": "plash_scaling.py",
    "drawing": "drawing.py",
    "ragged_decode": "ragged_decode.py",
    "decode_batch": "decode_batch.py",
    "score_cost": "score_cost.py",
    "kvpress": "kvpress_peer.py",
}
"""Files of docs/data/ that the benchmarks page shows, and the scripts in benchmarks/ that make them."""
HOW = {
    "demo": "run `make demo`, then `python docs/render.py --take demo`",
    "cache_sweep": "run `make sweep`",
    "pooling_blind_spot": "run `python benchmarks/pooling_blind_spot.py --out docs/data/pooling_blind_spot.json`",
    "reproduction": "run `longspan reproduce --out docs/reproduction`",
}
TITLES = {
    "dtype": "dtype",
    "length": "tokens",
    "tokens": "tokens",
    "density_asked": "density asked",
    "sdpa_s": "dense",
    "ours_s": "sparse",
    "pytorch_only_s": "PyTorch only",
    "pytorch_only_speedup": "PyTorch only, speedup",
    "limit": "limit (1/density)",
    "max_error": "largest error",
}
"""Column heads of benchmark rows; other keys are shown with spaces for underscores."""


UNRANKED = "No recipe is marked as the best: these figures are stored without the tests between recipes."
"""What a table says whose lines don't know how their recipes stand beside each other."""


class Missing(Exception):
    """A data file isn't there; says which, and how to make it."""


def stored(docs: Path, name: str) -> Any:
    """The JSON of docs/data/<name>.json."""
    file = docs / "data" / f"{name}.json"
    if not file.is_file():
        raise Missing(f"docs/data/{name}.json is missing; {HOW.get(name, 'run `make bench`')}.")
    return json.loads(file.read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------------- the demo


def take(run: Path, data: Path) -> Path:
    """Write data/demo.json from the folder of a finished ``longspan compare --out``."""
    from longspan.evaluation import read_parquet, summarise
    from longspan.experiments.base import machine

    if not (run / "rows.parquet").is_file():
        raise Missing(f"{run}/rows.parquet is missing; expected the --out folder of a finished `longspan compare`.")
    rows = read_parquet(run / "rows.parquet")
    lines = summarise(rows)
    for line in lines:
        line["achieved"].pop("kept_per_layer_and_head", None)
    one = {
        key: sorted({row[key] for row in rows})
        for key in ("dtype", "seed", "text_source", "text_hash", "max_new_tokens")
    }
    data.mkdir(parents=True, exist_ok=True)
    file = data / "demo.json"
    found = {"model": rows[0]["model"], "machine": machine(), **one, "rows": lines}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return file


def demo_table(docs: Path) -> str:
    """What was run, the picture, and the table."""
    found = stored(docs, "demo")
    return (
        f"![Accuracy against the memory of the key-value cache](images/pareto.svg)\n\n{demo_facts(found)}\n\n"
        + markdown_table(found["rows"])
    )


def demo_facts(found: dict[str, Any]) -> str:
    """One sentence on what the figures stand on."""
    lines = found["rows"]
    tasks = ", ".join(f"`{t}`" for t in dict.fromkeys(line["task"] for line in lines))
    lengths = " and ".join(f"{n:,}" for n in sorted({line["length"] for line in lines}))
    count = " or ".join(str(n) for n in sorted({line["n"] for line in lines}))
    when = " or ".join(dict.fromkeys(str(line["compress"]) for line in lines))
    machine = f" Machine: {found['machine']}." if found.get("machine") else ""
    return (
        f"{found['model']}, {tasks} at {lengths} tokens, {count} examples a line, compressed {when}.{machine} "
        "Accuracy with its 95% interval; *vs full*: points, paired on the same examples, ▼ ▲ beyond chance "
        f"(Holm, 5%), · no difference shown. {BESIDE if ranked(lines) else UNRANKED} Times are medians of this machine."
    )


def demo_pictures(docs: Path) -> dict[str, str]:
    """File name and content of the pictures."""
    lines = stored(docs, "demo")["rows"]
    return {"pareto.svg": pareto_svg(lines), "nll.svg": pareto_svg(lines, y="answer_nll")}


def demo_nll(docs: Path) -> str:
    stored(docs, "demo")
    return "![Answer likelihood against the memory of the key-value cache](images/nll.svg)\n"


# ------------------------------------------------------------------------------------------------- speed and memory


def benchmark(docs: Path, name: str) -> str:
    """One benchmark's result as Markdown: by its script's own ``render`` where there is one, else as a table."""
    found = stored(docs, name)
    own = getattr(script(docs.parent / "benchmarks" / BENCHMARKS[name]), "render", plain)
    return own(found).strip() + "\n"


def script(file: Path) -> ModuleType | None:
    """A benchmark's script as a module; nothing in it runs on import."""
    name = f"benchmark_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        return None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(sys.modules[name])
    finally:
        sys.path.remove(str(file.parent))
    return sys.modules[name]


def plain(found: dict[str, Any]) -> str:
    """The facts of a result as a line, and its rows as a table."""
    rows = found["rows"]
    facts = [
        f"{title(key)}: {short(key, value)}" for key, value in found.items() if not isinstance(value, (dict, list))
    ]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[cell(short(key, row.get(key))) for key in keys] for row in rows]
    align = "".join("l" if any(isinstance(row.get(key), str) for row in rows) else "r" for key in keys)
    return (f"{'; '.join(facts)}.\n\n" if facts else "") + table([title(key) for key in keys], lines, align)


def title(key: str) -> str:
    plain = key.removesuffix("_s").removesuffix("_bytes") if key not in TITLES else TITLES[key]
    return plain.replace("_", " ")


def short(key: str, value: Any) -> str:
    """A figure in the unit that its name says."""
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{name} {short('', part)}" for name, part in value.items())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("_bytes") or key == "bytes":
        return human_bytes(value)
    if key.endswith("tokens_per_s"):
        return f"{value:.1f}"
    if key.endswith("_s"):
        return human_seconds(value)
    if "speedup" in key or key in ("limit", "ratio"):
        return f"{value:.2f}×"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------- reproduction


def reproduction(docs: Path) -> str:
    """The table of stored outcomes."""
    folder = docs / "reproduction"
    if not any(folder.glob("*.json")):
        raise Missing(f"docs/reproduction holds no outcome; {HOW['reproduction']}.")
    return reproduction_table(folder)
