"""The only place that knows the insides of transformers models."""

from .backbone import Backbone, Unsupported
from .batch import Batch, why_not
from .cache import KVCache
from .model import ExitStates, SelfSpeculativeModel
from .skip import SkipSet

__all__ = ["Backbone", "Batch", "ExitStates", "KVCache", "SelfSpeculativeModel", "SkipSet", "Unsupported", "why_not"]
