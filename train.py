"""Train a model whose early layers draft well (LayerSkip), or measure every layer of a model as an exit."""

from __future__ import annotations

from self_speculation import cli
from self_speculation.config import ModelConfig, RunConfig, UsageError
from self_speculation.training.config import DataConfig, TrainConfig


def main(train: TrainConfig, data: DataConfig, model: ModelConfig, run: RunConfig) -> None:
    """Train a model to exit early by the LayerSkip recipe, from a configuration file or from its weights."""
    if data.data is None:
        raise UsageError("--data: give python_source, a hub id, or text, JSONL or Parquet files")
    from self_speculation.training.recipes import RECIPES

    RECIPES[train.recipe](train, data, model, run)


if __name__ == "__main__":
    cli.run(main, (TrainConfig, DataConfig, ModelConfig, RunConfig))
