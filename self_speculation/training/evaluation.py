"""Every layer as an exit, on held-out text: its loss, and how often its answer is the last layer's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .data import TokenFile
from .exit_model import ExitModel

EXIT_COLUMNS = ("run_id", "timestamp", "model", "data", "exit_layer", "loss", "perplexity", "agreement", "tokens")
Row = dict[str, Any]


@torch.no_grad()
def evaluate_exits(model: ExitModel, held_out: TokenFile, sequences: int, batch: int, autocast: Any) -> list[Row]:
    """Loss and agreement of every exit layer 1..L on the first `sequences` held-out sequences.

    Agreement is the share of positions at which the exit's most probable token is the last layer's: the acceptance
    rate of a draft of one token under greedy decoding, on text as people wrote it.
    """
    count, layers = min(sequences, len(held_out)), len(model.layers)
    losses, agreeing, tokens = torch.zeros(layers, dtype=torch.float64), torch.zeros(layers, dtype=torch.long), 0
    training = model.training
    model.eval()
    for start in range(0, count, batch):
        ids = torch.stack([held_out.sequence(i) for i in range(start, min(start + batch, count))])
        ids = ids.to(model.model.device)
        labels = ids[:, 1:].flatten()
        with autocast():
            hidden = model.hidden_states(ids[:, :-1], range(layers))
            answers = None
            for layer in reversed(range(layers)):
                logits = model.backbone.head(hidden.pop(layer)).float().flatten(0, 1)
                best = logits.argmax(-1)
                answers = best if answers is None else answers
                losses[layer] += F.cross_entropy(logits, labels, reduction="sum").item()
                agreeing[layer] += int((best == answers).sum())
        tokens += labels.numel()
    model.train(training)
    return [
        {
            "exit_layer": layer + 1,
            "loss": losses[layer].item() / tokens,
            "perplexity": float(torch.exp(losses[layer] / tokens)),
            "agreement": agreeing[layer].item() / tokens,
            "tokens": tokens,
        }
        for layer in range(layers)
    ]


def exit_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| exit layer | loss | perplexity | agreement with the last layer |", "| ---: | ---: | ---: | ---: |"]
    lines += [f"| {r['exit_layer']} | {r['loss']:.3f} | {r['perplexity']:.1f} | {r['agreement']:.1%} |" for r in rows]
    return "\n".join(lines)


def plot_exits(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw agreement and loss over the exit layer into a PNG."""
    from matplotlib.figure import Figure

    layers = [row["exit_layer"] for row in rows]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    agreement = figure.subplots()
    agreement.plot(layers, [row["agreement"] for row in rows], "o-", color="tab:blue", label="agreement")
    agreement.set(xlabel="exit layer", ylabel="agreement with the last layer", ylim=(0, 1.02), title=title)
    agreement.grid(alpha=0.3)
    loss = agreement.twinx()
    loss.plot(layers, [row["loss"] for row in rows], "s--", color="tab:red", label="loss")
    loss.set_ylabel("loss (nats a token)")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
