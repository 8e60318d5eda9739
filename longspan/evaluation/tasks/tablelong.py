"""TableLong (arXiv:2603.21719): questions over tables whose answers come from executing SQL.

Tables of our own schemas, or the user's CSV files, are shown as text; a question filters them, counts or sums over them, or joins
two or three. The answer is a JSON list. Any length, no annotator and no judge: SQL and a second executor agree on every answer.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from longspan.evaluation.base import Draft, Example, Key, Task
from longspan.evaluation.tables.contexts import MOST_TABLES
from longspan.evaluation.tables.generator import ANSWER_ROOM, PREFIX, Wishes, draft
from longspan.evaluation.tables.pool import Own, Source, own_sources
from longspan.evaluation.tables.queries import FAMILIES
from longspan.evaluation.tables.reward import reward
from longspan.evaluation.tables.schemas import LANGUAGES, synthetic_sources
from longspan.evaluation.tables.serialise import FORMS
from longspan.evaluation.texts import Text, make_text
from longspan.registry import Refused, knob, method


@method("tablelong", kind="task", system="tablelong", paper="arXiv:2603.21719",
        summary="Questions over tables: look up, compute, or join; answers by SQL.")
class TableLong(Task):
    """Exact reward of the JSON list that is written. Rows that the answer needs are marked as spans, tables as documents."""

    family: str = knob("mixed", "retrieval, computation, association (joins), or mixed (they take turns)",
                       choices=(*FAMILIES, "mixed"))
    serialisation: str = knob("markdown", "how tables are written: markdown, csv, json (lines), pairs (column: value)",
                              choices=tuple(FORMS))
    tables: int | None = knob(None, "tables shown; drawn from what has room if left out", low=1, high=MOST_TABLES)
    cells: int | None = knob(None, "about how many cells a question needs (rows scanned x columns used); drawn broadly if left "
                             "out", low=1)
    language: str = knob("en", "language of tables and questions: en, zh", choices=LANGUAGES)
    reasoning: int = knob(0, "tokens for reasoning and answer; 0: the answer is written at once", low=0)
    csv: str = knob("", "CSV files of your own to ask about, separated by commas; other tables only fill")

    own_text = True

    def check(self) -> None:
        if 0 < self.reasoning < ANSWER_ROOM:
            raise Refused(f"tablelong(reasoning={self.reasoning}): expected 0, or at least {ANSWER_ROOM} tokens for the answer.")
        if self.tables == 1 and self.family in ("association", "mixed"):
            raise Refused(f"tablelong(family={self.family}, tables=1): association joins two tables; expected tables=2, or "
                          "another family.")
        if self.tables == 1 and self.cells is not None:
            raise Refused(f"tablelong(tables=1, cells={self.cells}): one table that fills the length is needed as a whole; "
                          "expected more tables, or no cells=.")

    @property
    def text(self) -> Text | None:
        """The user's files; none where all tables are drawn."""
        files = self._files()
        if not files:
            return None
        own_sources(files)  # refuses what can't be read
        return make_text("csv", self.csv, "\0".join(file.read_text(encoding="utf-8-sig") for file in files))

    def draft(self, key: Key, tokenizer: Any) -> Draft:
        own, sources = self._sources()
        return draft(key, sources, self._wishes(), tokenizer, preferred=len(own))

    def metric(self, prediction: str, example: Example) -> float:
        # At once, the list may begin on a line of its own.
        said = prediction if self.reasoning else f"{PREFIX} {prediction.strip()}".replace("\n", " ")
        return reward(said, example.meta["gold"], ordered=example.meta["ordered"], decimals=example.meta["decimals"])

    def _wishes(self) -> Wishes:
        return Wishes(self.family, self.serialisation, self.language, self.tables, self.cells, self.reasoning)

    def _sources(self) -> tuple[tuple[Own, ...], list[Source]]:
        """The user's tables, and all: the user's, then those of our schemas whose names they leave free."""
        files = self._files()
        own = _own(tuple((str(file), file.stat().st_mtime_ns if file.is_file() else 0) for file in files))
        taken = {source.name.lower() for source in own}
        return own, [*own, *(source for source in synthetic_sources(self.language) if source.name.lower() not in taken)]

    def _files(self) -> list[Path]:
        return [Path(part.strip()).expanduser() for part in self.csv.split(",") if part.strip()]


@lru_cache(maxsize=4)
def _own(files: tuple[tuple[str, int], ...]) -> tuple[Own, ...]:
    """The user's files as they are now."""
    return tuple(own_sources([file for file, _ in files]))
