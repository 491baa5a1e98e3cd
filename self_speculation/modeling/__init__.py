"""The only place that knows the insides of transformers models."""

from .backbone import Backbone, Unsupported
from .cache import KVCache
from .model import ExitStates, SelfSpeculativeModel
from .skip import SkipSet

__all__ = ["Backbone", "ExitStates", "KVCache", "SelfSpeculativeModel", "SkipSet", "Unsupported"]
