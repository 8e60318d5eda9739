"""Caches of documents that were read alone, joined for a question: the engine, its base class and the library."""

from longspan.cache.reuse.assemble import Assembled, Piece, assemble
from longspan.cache.reuse.base import Joined, Joint, Reuse, join
from longspan.cache.reuse.document import DocumentCache, read_alone
from longspan.cache.reuse.library import Counts, Library
from longspan.cache.reuse.repair import Fused, fill, repair

__all__ = ["Assembled", "Counts", "DocumentCache", "Fused", "Joined", "Joint", "Library", "Piece", "Reuse", "assemble", "fill",
           "join", "read_alone", "repair"]
