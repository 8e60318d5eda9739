"""Writing the answer: token by token, with drafts that are checked several at a time, or block by block."""

from longspan.decoding.base import Checker, Draft, Drafter, Exact, Proposal, Target, Verifier
from longspan.decoding.block_sampler import Sampling, denoise, forced_nlls
from longspan.decoding.blocks import Denoising, Prefix, Reads, read_blocks
from longspan.decoding.law import Law, pick
from longspan.decoding.noise import Noise
from longspan.decoding.plain import Generated, end_ids, greedy, read, token_nlls
from longspan.decoding.speculative import write
from longspan.decoding.verify import Verdict, verify

__all__ = ["Checker", "Denoising", "Draft", "Drafter", "Exact", "Generated", "Law", "Noise", "Prefix", "Proposal",
           "Reads", "Sampling", "Target", "Verdict", "Verifier", "denoise", "end_ids", "forced_nlls", "greedy", "pick",
           "read", "read_blocks", "token_nlls", "verify", "write"]
