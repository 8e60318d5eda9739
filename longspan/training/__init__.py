"""Training: objectives, batches, and the one loop that trains everything.

``train(model, batches, TrainConfig(...), objective)`` is all it takes; `longspan.training.command` is what the command
line runs.
"""

from typing import TYPE_CHECKING

from longspan.layers.lazy import exports
from longspan.training.base import IGNORE, Batch, Batches, Objective, Outcome, dice
from longspan.training.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from longspan.training.command import TrainOptions
from longspan.training.config import TrainConfig, learning_rate
from longspan.training.data import SYNTHETIC, Bytes, Copy, Recall, TextBatches, TokenizerFile, read_text
from longspan.training.loop import Diverged, Trainer, TrainResult, evaluate, train
from longspan.training.truncation import Tally, backward

if TYPE_CHECKING:
    from longspan.training.grpo import Grpo
    from longspan.training.l2a import L2ANextToken
    from longspan.training.longce import LongCE
    from longspan.training.next_token import NextToken
    from longspan.training.pose import Pose
    from longspan.training.self_distillation import SelfDistillation

__getattr__ = exports(__name__, {"Grpo": "grpo", "L2ANextToken": "l2a", "LongCE": "longce", "NextToken": "next_token",
                                 "Pose": "pose", "SelfDistillation": "self_distillation"})
__all__ = [
    "Batch",
    "Batches",
    "Bytes",
    "Checkpoint",
    "Copy",
    "Diverged",
    "Grpo",
    "IGNORE",
    "L2ANextToken",
    "LongCE",
    "NextToken",
    "Objective",
    "Outcome",
    "Pose",
    "Recall",
    "SYNTHETIC",
    "SelfDistillation",
    "Tally",
    "TextBatches",
    "TokenizerFile",
    "TrainConfig",
    "TrainOptions",
    "TrainResult",
    "Trainer",
    "backward",
    "checkpoints",
    "dice",
    "evaluate",
    "learning_rate",
    "load_checkpoint",
    "read_text",
    "save_checkpoint",
    "train",
]
