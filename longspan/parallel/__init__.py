"""One sequence over many devices: context parallelism, its exchanges, and what they cost."""

from longspan.parallel.account import Account, Shape
from longspan.parallel.base import ContextParallel, Weights, sum_gradients
from longspan.parallel.comm import Communicator, PeerLost
from longspan.parallel.launch import RankFailed, launch

__all__ = ["Account", "Communicator", "ContextParallel", "PeerLost", "RankFailed", "Shape", "Weights", "launch",
           "sum_gradients"]
