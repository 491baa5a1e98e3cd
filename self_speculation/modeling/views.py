"""Shallow copies of modules that share their parameters."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn


def view_of(module: nn.Module, **replaced: nn.Module | list) -> Any:
    """A shallow copy of `module`, sharing its parameters, in which some children are others.

    Where accelerate has put a hook around the module (`device_map`), which is bound to that module, the view gets it
    around its own forward.
    """
    view = copy.copy(module)
    view._modules = {name: child for name, child in module._modules.items() if name not in replaced}
    for name, child in replaced.items():
        setattr(view, name, child)
    if (hook := view.__dict__.get("_hf_hook")) is not None:
        view.__dict__["forward"] = partial(_hooked, view, hook)
    return view


def _hooked(view: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = hook.pre_forward(view, *args, **kwargs)
    return hook.post_forward(view, type(view).forward(view, *args, **kwargs))
