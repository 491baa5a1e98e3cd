"""Settings of `train.py`. Standard library only, like `self_speculation.config`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import UsageError, flag, parse_ids, require, require_choice

RECIPES = ("layerskip", "evaluate_exits", "adapter")
ADAPTER_KINDS = ("attention", "mlp", "layer", "feature")
CURRICULA = ("rotational", "gradual", "random", "draft", "all", "none")
LOSS_SCALES = ("paper", "uniform", "balanced", "draft")
DROPOUT_SCHEDULES = ("auto", "constant", "exponential")
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and what is held out of it."""

    data: str | None = flag(
        None,
        "python_source (permissively licensed packages from PyPI), a hub id, or a text, JSONL or Parquet file, a "
        "folder of them or a pattern such as 'books/*.txt'",
    )
    data_config: str | None = flag(None, "configuration of a hub data set")
    data_split: str = flag("train", "split of a hub data set")
    text_field: str = flag("text", "the field that holds the text, in JSONL, Parquet and hub data")
    held_out: float = flag(
        0.005, "share of the documents held out for evaluation, chosen by a hash of each; 1 evaluates all"
    )
    max_tokens: int = flag(0, "stop reading after so many training tokens; 0 reads everything")
    sequence_length: int = flag(512, "tokens a training sequence")

    def __post_init__(self) -> None:
        require(0 < self.held_out <= 1, "held_out", self.held_out, "must be above 0 and at most 1")
        require(self.sequence_length >= 2, "sequence_length", self.sequence_length, "must be 2 or more")
        require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "must be 0 or more")


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained: the LayerSkip recipe (arXiv 2404.16710, section 4) and its optimiser."""

    recipe: str = flag(
        "layerskip", "layerskip trains; evaluate_exits measures every layer of --model as an exit; adapter "
        "trains an exit adapter and leaves the model as it is"
    )  # fmt: skip
    config: str | None = flag(
        None, "config.json of a model to train from scratch, or its folder; a tokenizer that is not there is trained"
    )
    tokenizer: str | None = flag(None, "tokenizer of a model from scratch", unset="the folder of --config")
    save_model: str | None = flag(None, "folder of the trained model", unset="<output_dir>/train_<timestamp>/model")
    resume: str | None = flag(None, "a killed run's file or folder in --output_dir; the other flags as they were")

    layer_dropout: float = flag(0.0, "p_max, the dropout probability of the last layer")
    dropout_schedule: str = flag("auto", "S(t): constant, exponential, or auto (exponential from scratch)")
    exit_curriculum: str = flag(
        "rotational", "which exits learn at a step: rotational, gradual, random, draft, all or none"
    )
    rotation: int = flag(4, "R of the rotational curriculum: every R-th layer, rolled each step")
    early_exit_scale: float = flag(1.0, "e_scale: weight of the early exits under the loss scale `paper`")
    loss_scale: str = flag("paper", "weights of the exits' losses: paper, uniform, balanced or draft")
    draft_exits: str | None = flag(
        None, "exit layers that drafting will use, such as 2,4,6: the only ones the curricula random and draft take, "
        "and the ones that carry the loss scale draft", unset="every one"
    )  # fmt: skip
    self_distillation: float = flag(
        0.0, "what early exits learn: 0 the data, 1 the last layer's distribution, between them a mix"
    )
    last_layer_distillation: float = flag(
        0.0, "share of what the last layer learns that is the enabled early exits' distributions, the rest the data"
    )

    train_steps: int = flag(1000, "optimiser steps")
    max_minutes: float = flag(
        0.0, "fit the number of steps into this time by the speed of the first ones; 0 keeps --train_steps"
    )
    batch_size: int = flag(8, "sequences a forward pass and process")
    accumulation: int = flag(1, "forward passes a step")
    optimizer: str = flag("adamw", "adamw, or muon for the matrices inside layers and adamw for the rest")
    learning_rate: float = flag(1e-3, "highest learning rate of adamw")
    muon_learning_rate: float = flag(0.02, "highest learning rate of muon")
    final_learning_rate: float = flag(0.05, "share of the highest learning rate that the cosine ends at")
    warmup_steps: int = flag(50, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "weight decay of the matrices")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this norm; 0 is off")
    lora_rank: int = flag(0, "train LoRA matrices of this rank in place of the weights (peft); 0 trains the weights")
    lora_alpha: float = flag(16.0, "LoRA's alpha")

    log_every: int = flag(10, "steps a row of the training loss covers")
    eval_every: int = flag(0, "steps between evaluations on held-out text; 0 evaluates at the end only")
    eval_sequences: int = flag(64, "held-out sequences an evaluation reads")
    save_every: int = flag(200, "steps between checkpoints to resume from; 0 keeps none")

    def __post_init__(self) -> None:
        require_choice("recipe", self.recipe, RECIPES)
        require_choice("dropout_schedule", self.dropout_schedule, DROPOUT_SCHEDULES)
        require_choice("exit_curriculum", self.exit_curriculum, CURRICULA)
        require_choice("loss_scale", self.loss_scale, LOSS_SCALES)
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        require(0 <= self.layer_dropout < 1, "layer_dropout", self.layer_dropout, "must be at least 0 and below 1")
        require(0 <= self.self_distillation <= 1, "self_distillation", self.self_distillation, "must be from 0 to 1")
        mutual = self.last_layer_distillation
        require(0 <= mutual < 1, "last_layer_distillation", mutual, "must be 0 or more and below 1")
        for name in ("rotation", "train_steps", "batch_size", "accumulation", "log_every", "eval_sequences"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        for name in ("early_exit_scale", "max_minutes", "warmup_steps", "weight_decay", "max_grad_norm", "lora_rank",
                     "eval_every", "save_every", "final_learning_rate"):  # fmt: skip
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "must be 0 or more")
        for name in ("learning_rate", "muon_learning_rate", "lora_alpha"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "must be above 0")
        if self.lora_rank and self.config:
            raise UsageError(f"--lora_rank {self.lora_rank}: a model from scratch (--config) has no weights to keep")
        if self.config and self.recipe == "evaluate_exits":
            raise UsageError("--config: evaluate_exits measures a trained model; give --model")
        if not self.exits_for_drafting() and self.exit_curriculum == "draft":
            raise UsageError("--exit_curriculum draft: name the exits with --draft_exits")
        if self.recipe == "adapter":
            for name in ("config", "lora_rank", "save_model"):
                value = getattr(self, name)
                require(not value, name, value, "the recipe adapter leaves the model as it is")

    def exits_for_drafting(self) -> tuple[int, ...]:
        """`--draft_exits` as numbers, empty when not given."""
        return parse_ids("draft_exits", self.draft_exits) if self.draft_exits else ()

    def exponential_dropout(self) -> bool:
        """Whether S(t) grows over the training."""
        return self.dropout_schedule == "exponential" or (self.dropout_schedule == "auto" and self.config is not None)


@dataclass(frozen=True)
class AdapterTrainConfig:
    """The recipe `adapter`: what is trained beside the frozen model, and the text the model itself writes for it."""

    adapter_kind: str = flag(
        "feature", "attention, mlp or layer behind an early exit, or feature: a layer that goes on from the last states"
    )
    adapter_exit: int = flag(-1, "layers that run before the adapter; -1 is an eighth of them")
    adapter_from: int = flag(-1, "the layer, from 0, whose weights the adapter starts from; -1 is the last")
    draft_vocabulary: int = flag(0, "most frequent tokens that the draft's head knows; 0 is all")
    save_adapter: str | None = flag(None, "folder of the adapter", unset="<output_dir>/train_<timestamp>/adapter")
    scored_positions: float = flag(0.33, "share of the positions whose distributions are compared")
    regression: float = flag(0.2, "weight of the smooth L1 distance between the adapter's states and the model's")
    drifted: float = flag(0.3, "for feature, share of the inputs that are the adapter's own states")
    own_text: int = flag(
        0, "train on so many tokens that the model itself writes after beginnings from --data, kept in the cache; 0 "
        "trains on --data"
    )  # fmt: skip
    own_chat: float = flag(0.0, "share of them that is chat, in which the model writes the questions as well")
    own_temperature: float = flag(0.6, "temperature of every other text; the rest is greedy")
    own_batch: int = flag(64, "texts written at once")
    prompt_tokens: int = flag(64, "tokens of --data that a text of the model's own goes on from")

    def __post_init__(self) -> None:
        require_choice("adapter_kind", self.adapter_kind, ADAPTER_KINDS)
        for name in ("own_text", "draft_vocabulary", "regression"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "must be 0 or more")
        for name in ("own_chat", "drifted"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be between 0 and 1")
        require(0 < self.scored_positions <= 1, "scored_positions", self.scored_positions,
                "must be above 0 and at most 1")  # fmt: skip
        require(self.own_temperature > 0, "own_temperature", self.own_temperature, "must be above 0")
        for name in ("own_batch", "prompt_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
