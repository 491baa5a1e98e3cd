"""Folders from which a killed run goes on to the same numbers, and the finished model's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from ..config import RunError
from ..files import replacing_folder
from .build import merge_lora

State = dict[str, Any]


def save_checkpoint(
    folder: Path, step: int, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: State
) -> None:
    """Write `folder/step-<step>` whole or not at all, then drop older ones.

    Only what is trained is written, as safetensors. There is no generator state: what is random depends on the seed,
    the step and the sample alone.
    """
    final = folder / f"step-{step}"
    with replacing_folder(final) as draft:
        save_file({name: p.detach().contiguous() for name, p in trained(model)}, draft / "trained.safetensors")
        torch.save({"optimizers": [o.state_dict() for o in optimizers], "step": step, **state}, draft / "state.pt")
    for other in folder.glob("step-*"):
        if other != final:
            shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State | None:
    """Put back the newest checkpoint in `folder` and return its state; None if there is none."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    if not found:
        return None
    newest = max(found, key=lambda path: int(path.name[5:]))
    try:
        weights = load_file(newest / "trained.safetensors")
        state = torch.load(newest / "state.pt", weights_only=True, map_location="cpu")
        with torch.no_grad():
            for name, parameter in trained(model):
                parameter.copy_(weights[name])
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise RunError(f"--resume: the checkpoint {newest} cannot be read ({error})") from error
    return state


def save_model(folder: Path, model: Any, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write the model for `from_pretrained`, LoRA merged, and its tokenizer; other files in the folder stay."""
    if any(".lora_" in name for name, _ in model.named_parameters()):
        merge_lora(model)
    model.to(dtype)
    model.config.use_cache = True
    if model.config._attn_implementation not in ("eager", "sdpa"):
        model.set_attn_implementation("sdpa")
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder / ".written") as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    for file in (folder / ".written").iterdir():
        os.replace(file, folder / file.name)
    (folder / ".written").rmdir()


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters that training changes."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
