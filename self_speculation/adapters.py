"""Exit adapters on disk: `adapter.safetensors` and `adapter.json`, which says for which model they were made."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from .config import RunError, UsageError
from .loading import EMBEDDED, fingerprint
from .modeling import KINDS, Adapter, AdapterShape, SelfSpeculativeModel

WEIGHTS, ABOUT = "adapter.safetensors", "adapter.json"
FIELDS = ("kind", "exit_layer", "from_layer", "vocabulary")


def save_adapter(folder: Path, adapter: Adapter, model: torch.nn.Module, model_name: str, trained: Any) -> None:
    """Write the adapter in bfloat16; `trained` says how it was made. Other files in the folder stay."""
    weights = {name: weight.detach().to(torch.bfloat16).cpu() for name, weight in adapter.named_parameters()}
    if adapter.token_ids is not None:
        weights["token_ids"] = adapter.token_ids.to(torch.int32).cpu()
    about = {"model": model_name, "fingerprint": fingerprint(model), **asdict(adapter.shape), "trained": trained}
    drafts = {name: folder / f"{name}.{os.getpid()}.tmp" for name in (WEIGHTS, ABOUT)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drafts[WEIGHTS].write_bytes(save({key: value.contiguous() for key, value in weights.items()}))
        drafts[ABOUT].write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for name, draft in drafts.items():
            draft.replace(folder / name)
    except OSError as error:
        raise RunError(f"--save_adapter {folder}: {error.strerror or error}") from None
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()


def load_adapter(model: SelfSpeculativeModel, name: str | None) -> Adapter:
    """The adapter called `name` (a folder, or one under checkpoints/); None finds the one made for the model.

    Raises:
        RunError: there is no such folder, or its files cannot be read.
        UsageError: none was made for this model, or the one named was made for another.
    """
    mine = fingerprint(model.hf_model)
    if name is None:
        folder = next((path.parent for path in _embedded() if _about(path.parent)["fingerprint"] == mine), None)
        if folder is None:
            raise UsageError("--drafter adapter: no adapter was made for this model; name one with --adapter, or train "
                             "one with train.py --recipe adapter")  # fmt: skip
    else:
        folder = _folder(name)
    about = _about(folder)
    if about["fingerprint"] != mine:
        raise UsageError(f"--adapter {name}: it was made for {about['model']}, whose weights are not this model's")
    try:
        weights = load_file(folder / WEIGHTS)
        token_ids = weights.pop("token_ids", None)
        adapter = Adapter(model.backbone, AdapterShape(**{field: about[field] for field in FIELDS}), token_ids)
        lacking, _ = adapter.load_state_dict(weights, strict=False)
        if lacking := [name for name in lacking if name != "token_ids"]:
            raise KeyError(f"lacks {lacking[0]}")
    except (OSError, ValueError, KeyError, RuntimeError, IndexError, SafetensorError) as error:
        raise RunError(f"--adapter {folder}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    adapter.name = folder.resolve().name
    return adapter.eval().requires_grad_(False)


def _embedded() -> list[Path]:
    return sorted(EMBEDDED.glob(f"*/{ABOUT}"))


def _folder(name: str) -> Path:
    for folder in (Path(name).expanduser(), EMBEDDED / name):
        if (folder / ABOUT).is_file():
            return folder
    known = ", ".join(path.parent.name for path in _embedded()) or "none here"
    raise RunError(f"--adapter {name}: no folder with {ABOUT} and no adapter's name ({known})")


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about["kind"] not in KINDS:
            raise ValueError(f"kind {about['kind']}")
        return {name: about[name] for name in (*FIELDS, "model", "fingerprint")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"--adapter {folder}: {ABOUT} cannot be read ({type(error).__name__}: {error})") from None
