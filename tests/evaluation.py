"""Models under lm-eval, and the local tasks run with them."""

from __future__ import annotations

from pathlib import Path

from self_speculation import evaluating
from self_speculation.config import GenerationConfig
from self_speculation.evaluating import EvalConfig
from self_speculation.harness import SelfSpeculativeLM

ROOT = Path(__file__).resolve().parent.parent
LOCAL = str(ROOT / "data" / "tasks")
STRATEGIES = {
    "autoregressive": {},
    "early_exit": {"exit_layer": 3, "num_speculations": 4},
    "prompt_lookup": {"drafter": "prompt_lookup", "num_speculations": 5},
    "skip_layer": {"skip_attn_layers": "2,4", "skip_mlp_layers": "3", "num_speculations": 3},
    "chain": {"drafter": "prompt_lookup+early_exit", "exit_layer": 2, "num_speculations": 4},
}


def make(loaded, name="early_exit", gen_kwargs=None, **settings):
    if name != "autoregressive":
        settings = {"generation_strategy": "self_speculative", **STRATEGIES[name], **settings}
    return SelfSpeculativeLM(loaded, GenerationConfig(**settings), gen_kwargs=gen_kwargs)


def run_local(lm, names="local_math,local_choice,local_perplexity", **settings):
    """(scores, texts) of the local tasks."""
    config = EvalConfig(tasks=[names], include_path=LOCAL, **{"limit": 3, "bootstrap_iters": 0, **settings})
    tasks = evaluating.load_tasks(config)
    if "local_math" in tasks.tasks:
        tasks.tasks["local_math"].set_config("generation_kwargs", {"max_gen_toks": 24}, update=True)
    results = evaluating.run_tasks(lm, tasks, config)
    answers = {task: [sample["resps"] for sample in samples] for task, samples in results["samples"].items()}
    return results["results"], answers
