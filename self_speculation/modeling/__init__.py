"""The only place that knows the insides of transformers models."""

from .adapter import KINDS, Adapter, AdapterShape
from .backbone import Backbone, Unsupported
from .batch import Batch
from .batch_check import why_not
from .cache import KVCache
from .draft_head import OUTSIDE, DraftHead, DraftVocabulary
from .model import ExitStates, KeptStates, SelfSpeculativeModel
from .skip import SkipSet

__all__ = [
    "KINDS", "OUTSIDE", "Adapter", "AdapterShape", "Backbone", "Batch", "DraftHead", "DraftVocabulary", "ExitStates",
    "KVCache", "KeptStates", "SelfSpeculativeModel", "SkipSet", "Unsupported", "why_not",
]  # fmt: skip
