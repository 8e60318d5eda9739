"""Sweeps: a grid of cells, run by several processes, that can be stopped and gone on with at any time."""

from longspan.evaluation.sweeps.cells import Folder
from longspan.evaluation.sweeps.command import State, by_model, duration, read_status, state_of, sweep
from longspan.evaluation.sweeps.grid import Cell, Grid, read_grid

__all__ = ["Cell", "Folder", "Grid", "State", "by_model", "duration", "read_grid", "read_status", "state_of", "sweep"]
