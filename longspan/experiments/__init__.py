"""One file per published system: its claim, measured here."""

from longspan.experiments.base import Done, Experiment, Outcome, find, names, perform

__all__ = ["Done", "Experiment", "Outcome", "find", "names", "perform"]
