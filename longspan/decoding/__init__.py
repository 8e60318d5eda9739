"""Writing the answer: token by token, or with drafts that are checked several at a time."""

from longspan.decoding.base import Checker, Draft, Drafter, Exact, Proposal, Target, Verifier
from longspan.decoding.law import Law, pick
from longspan.decoding.noise import Noise
from longspan.decoding.plain import Generated, end_ids, greedy, read, token_nlls
from longspan.decoding.speculative import write
from longspan.decoding.verify import Verdict, verify

__all__ = ["Checker", "Draft", "Drafter", "Exact", "Generated", "Law", "Noise", "Proposal", "Target", "Verdict", "Verifier",
           "end_ids", "greedy", "pick", "read", "token_nlls", "verify", "write"]
