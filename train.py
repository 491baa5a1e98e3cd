"""Train a model whose early layers draft well (LayerSkip), or an adapter that lets a frozen model draft."""

from __future__ import annotations

from self_speculation import cli
from self_speculation.config import ModelConfig, RunConfig, UsageError, as_dict, require, require_folder
from self_speculation.training.config import AdapterTrainConfig, DataConfig, TrainConfig


def main(train: TrainConfig, adapter: AdapterTrainConfig, data: DataConfig, model: ModelConfig, run: RunConfig) -> None:
    """Train a model to exit early by the LayerSkip recipe, or an adapter through which a frozen model drafts."""
    if data.data is None:
        raise UsageError("--data: give python_source, a hub id, or text, JSONL or Parquet files")
    if model.pack_weights:
        raise UsageError("--pack_weights True: packed weights cannot be trained, nor trained through")
    if train.recipe != "adapter":
        for name, value in as_dict(adapter).items():
            require(value == getattr(AdapterTrainConfig(), name), name, value, "is for --recipe adapter")
    require_folder("save_model", train.save_model)
    require_folder("save_adapter", adapter.save_adapter)
    if train.recipe == "adapter":
        from self_speculation.training.adapters import train_adapter

        train_adapter(train, adapter, data, model, run)
    else:
        from self_speculation.training.recipes import RECIPES

        RECIPES[train.recipe](train, data, model, run)


if __name__ == "__main__":
    cli.run(main, (TrainConfig, AdapterTrainConfig, DataConfig, ModelConfig, RunConfig))
