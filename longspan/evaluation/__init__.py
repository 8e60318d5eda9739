"""Judging it: tasks, metrics, the runner, statistics."""

from longspan.evaluation.base import Example, Task
from longspan.evaluation.measure import AFTER, BEFORE, measure
from longspan.evaluation.oracles import parse_oracle
from longspan.evaluation.runner import Request, parse_task, read_parquet, run
from longspan.evaluation.statistics import summarise

__all__ = ["AFTER", "BEFORE", "Example", "Request", "Task", "measure", "parse_oracle", "parse_task", "read_parquet", "run",
           "summarise"]
