"""TableLong (arXiv:2603.21719): questions over tables whose answers come from executing SQL."""

from longspan.evaluation.tables.dependence import (
    Coding,
    Decay,
    Profile,
    decay,
    information,
    profile_sequences,
    profile_tables,
    same_column,
    shuffle_cells,
    shuffle_rows,
    shuffled_control,
    word_codes,
)
from longspan.evaluation.tables.executors import Result, run, same, select
from longspan.evaluation.tables.filtering import Judged, judge
from longspan.evaluation.tables.pool import Column, Database, Link, Table, read_csv
from longspan.evaluation.tables.queries import FAMILIES, Query, cells_needed, sql
from longspan.evaluation.tables.serialise import FORMS, serialise
from longspan.evaluation.tables.verification import doubted, unfit

__all__ = ["FAMILIES", "FORMS", "Coding", "Column", "Database", "Decay", "Judged", "Link", "Profile", "Query", "Result",
           "Table", "cells_needed", "decay", "doubted", "information", "judge", "profile_sequences", "profile_tables",
           "read_csv", "run", "same", "same_column", "select", "serialise", "shuffle_cells", "shuffle_rows",
           "shuffled_control", "sql", "unfit", "word_codes"]
