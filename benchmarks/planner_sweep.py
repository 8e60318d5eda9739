"""What the planner is judged on (`longspan reproduce planner-check`), kept from two sweeps; nothing is measured here.

    longspan sweep docs/examples/planner_grid.yaml --workers 2 --out runs/planner
    longspan sweep docs/examples/planner_bytes.yaml --out runs/planner_bytes
    python benchmarks/planner_sweep.py runs/planner runs/planner_bytes --out docs/data/planner_sweep.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

from longspan.evaluation.runner import read_parquet, write_parquet

COLUMNS = ("model", "fingerprint", "dtype", "recipe", "task", "length", "seed", "index", "score_name", "score", "answer_nll",
           "context_tokens", "cache_bytes")


def collect(quality: Path, sizes: Path, out: Path) -> int:
    """Write the columns that planner-check reads, of the judged sweep and of the one for bytes; returns how many rows."""
    rows = [{"part": part} | {name: row[name] for name in COLUMNS}
            for part, folder in (("quality", quality), ("bytes", sizes)) for row in read_parquet(folder / "rows.parquet")]
    write_parquet(out, rows)
    return len(rows)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("quality", type=Path, help="folder of the judged sweep")
    ask.add_argument("bytes", type=Path, help="folder of the sweep for bytes")
    ask.add_argument("--out", type=Path, default=Path("docs/data/planner_sweep.parquet"))
    given = ask.parse_args()
    print(f"{given.out}: {collect(given.quality, given.bytes, given.out)} rows")


if __name__ == "__main__":
    main()
