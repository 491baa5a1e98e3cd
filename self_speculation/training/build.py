"""What is trained: a model from a configuration file or a checkpoint, its tokenizer, and its optimisers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import cli, distributed
from ..config import ModelConfig, RunError, UsageError
from ..loading import choose_device, load
from .config import DataConfig, TrainConfig
from .data import documents, is_held_out
from .tokenizer import train_tokenizer


def build_model(
    train: TrainConfig, model: ModelConfig, data: DataConfig, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, in training mode, on its device, and its tokenizer."""
    if train.config and model.model:
        raise UsageError("--config: give either --config (from scratch) or --model (continue from its weights)")
    if not train.config and not model.model:
        raise UsageError("--model: give a model to continue from, or --config to train from scratch")
    torch.manual_seed(seed)
    hf_model: Any
    if train.config:
        hf_model, tokenizer = from_scratch(Path(train.config), train.tokenizer, data)
        hf_model.to(choose_device(model.device))
    else:
        loaded = load(ModelConfig(**{**vars(model), "dtype": "float32", "compile": False}))
        hf_model, tokenizer = loaded.model.hf_model, loaded.tokenizer
    if train.lora_rank:
        hf_model = with_lora(hf_model, train.lora_rank, train.lora_alpha)
    return hf_model.train(), tokenizer


def from_scratch(
    path: Path, tokenizer_name: str | None, data: DataConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights after a config.json. Its tokenizer is made from the data where there is none."""
    folder = path if path.is_dir() else path.parent
    try:
        settings = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        config = AutoConfig.for_model(**settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"--config {path}: cannot be read as a model's config.json ({error})") from None
    if tokenizer_name is None and not (folder / "tokenizer.json").is_file():
        distributed.on_main(lambda: make_tokenizer(folder, config.vocab_size, data))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name or str(folder))
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"--config {path}: vocab_size {config.vocab_size} is less than the tokenizer's {len(tokenizer)}"
        )
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def make_tokenizer(folder: Path, vocab_size: int, data: DataConfig) -> None:
    """Train a tokenizer on every 8th training document and save it."""
    cli.note(f"no tokenizer in {folder}: training one of {vocab_size} tokens")
    texts = (document[1] for document in documents(data) if not is_held_out(document, data.held_out))
    train_tokenizer(itertools.islice(texts, 0, None, 8), vocab_size).save_pretrained(folder)


def with_lora(model: Any, rank: int, alpha: float) -> Any:
    """Freeze the weights and put LoRA matrices beside every linear layer (peft), inside the model as it is."""
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return inject_adapter_in_model(settings, model)


def merge_lora(model: Any) -> None:
    """Add the LoRA matrices to the weights and put the plain linear layers back."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())


def build_optimizers(model: torch.nn.Module, train: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside layers and AdamW for embeddings, head and norms."""
    matrices: list[Any] = []
    others: list[Any] = []
    vectors: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = parameter.ndim == 2 and (".layers." in name or name.startswith("adapter."))
            (matrices if inside else others if parameter.ndim >= 2 else vectors).append(parameter)
    if train.optimizer == "adamw":
        others, matrices = matrices + others, []
    groups = [
        {"params": others, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if groups := [group for group in groups if group["params"]]:
        optimizers.append(torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.95), fused=True))
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=train.muon_learning_rate, weight_decay=train.weight_decay, momentum=0.95)
        )
    return optimizers
