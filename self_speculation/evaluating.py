"""lm-eval tasks: settings, loading with errors in one line, and running."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import hub
from .config import RunError, UsageError, did_you_mean, flag, require, require_choice, require_folder
from .task_settings import parse_gen_kwargs

if TYPE_CHECKING:
    from .harness import SelfSpeculativeLM

Row = dict[str, Any]

LISTS = ("list", "list_groups", "list_tags", "list_subtasks", "list_tasks")
VERBOSITIES = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")


@dataclass(frozen=True)
class EvalConfig:
    """Which tasks, and how lm-eval runs them. Names and meanings are lm-eval's own."""

    tasks: list[str] | None = flag(
        None, "names of tasks, groups or tags, patterns such as mmlu_*, or .yaml files, separated by commas or spaces; "
        "list prints all there are, list_groups, list_tags and list_subtasks parts of them",
    )  # fmt: skip
    include_path: str | None = flag(None, "a folder with more tasks, such as data/tasks, which work offline")
    num_fewshot: int | None = flag(None, "solved examples in each prompt", unset="the task's own number")
    limit: float | None = flag(None, "only the first so many documents of each task; a share of them when below 1")
    use_cache: str | None = flag(
        None, "keep answers in <path>_rank<r>.db and take them from there when model and settings are the same"
    )
    cache_requests: bool = flag(False, "keep the prompts built for each task, for the next run")
    rewrite_requests_cache: bool = flag(False, "build the kept prompts anew")
    delete_requests_cache: bool = flag(False, "delete all kept prompts first")
    bootstrap_iters: int = flag(100000, "resamplings for standard errors that have no formula; 0 leaves them all out")
    check_integrity: bool = flag(False, "run lm-eval's tests of the tasks first; needs a checkout of lm-eval")
    write_out: bool = flag(False, "print the first prompt of each task")
    log_samples: bool = flag(False, "put prompt, document and reference of each sample beside its prediction")
    system_instruction: str | None = flag(None, "text that stands before everything else, as the system's message")
    apply_chat_template: bool = flag(False, "put prompts into the tokenizer's chat template")
    fewshot_as_multiturn: bool | None = flag(
        None, "solved examples as turns of the chat", unset="True with --apply_chat_template"
    )
    gen_kwargs: str | None = flag(
        None, "generation arguments that win over the task's, such as temperature=0.8,max_gen_toks=64, or as JSON"
    )
    verbosity: str = flag("ERROR", "how much lm-eval says: CRITICAL, ERROR, WARNING, INFO or DEBUG")
    predict_only: bool = flag(False, "generate and keep predictions, compute no scores")
    confirm_run_unsafe_code: bool = flag(False, "allow tasks such as humaneval to run programs the model wrote")
    random_seed: int = flag(0, "seed of Python's random module")
    numpy_random_seed: int = flag(1234, "seed of NumPy")
    torch_random_seed: int = flag(1234, "seed of PyTorch")
    fewshot_random_seed: int = flag(1234, "seed that chooses solved examples")

    def __post_init__(self) -> None:
        require_choice("verbosity", self.verbosity.upper(), VERBOSITIES)
        if self.limit is not None:
            whole = self.limit < 1 or self.limit == int(self.limit)
            require(
                self.limit > 0 and whole, "limit", self.limit, "must be a whole number, or a share above 0 and below 1"
            )
        for name in ("num_fewshot", "bootstrap_iters"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "must be 0 or more")
        for name in ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"):
            value = getattr(self, name)
            require(0 <= value < 2**32, name, value, f"must be from 0 to {2**32 - 1}")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UsageError("--fewshot_as_multiturn True: turns need --apply_chat_template True")
        require_folder("use_cache", self.use_cache, file=True)
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise RunError(f"--include_path {self.include_path}: no such folder")
        if not self.names():
            raise UsageError("--tasks: name at least one; --tasks list prints them")
        parse_gen_kwargs(self.gen_kwargs)

    def names(self) -> list[str]:
        """The tasks asked for, each once."""
        return list(dict.fromkeys(name for text in self.tasks or [] for name in text.split(",") if name))


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks, and the groups they were asked for by."""

    tasks: dict[str, Any]
    groups: dict[str, Any] = field(default_factory=dict)


def listing(config: EvalConfig) -> str | None:
    """The table that `--tasks list` asks for, None when tasks are to be run."""
    names = config.names()
    if not set(names) & set(LISTS):
        return None
    require(len(names) == 1, "tasks", ",".join(names), "a list cannot be run; ask for it alone")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=config.include_path)
    only = {"list_groups": "groups", "list_tags": "tags", "list_subtasks": "subtasks"}.get(names[0])
    return manager.list_all_tasks(**{f"list_{kind}": only in (None, kind) for kind in ("groups", "tags", "subtasks")})


def load_tasks(config: EvalConfig) -> Tasks:
    """Load all tasks with their data.

    Raises:
        UsageError: a task that does not exist, or runs code without leave.
        RunError: its data cannot be had.
    """
    from lm_eval.utils import setup_logging

    setup_logging(config.verbosity.upper())
    if config.write_out:  # lm-eval logs the prompts as information
        logging.getLogger("lm_eval.evaluator_utils").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
    manager, specs = _find(config)
    if config.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    else:
        for spec in specs:
            _refuse_unsafe(spec, _config_of(manager, spec).get("unsafe_code", False))
    loaded = Tasks({})
    for spec in specs:
        with _explained(spec, str(_config_of(manager, spec).get("dataset_path") or "")):
            found = manager.load([spec])
        loaded.tasks.update(found["tasks"])
        loaded.groups.update(found.get("groups", {}))
    for name, task in loaded.tasks.items():
        if not config.confirm_run_unsafe_code:
            _refuse_unsafe(name, getattr(task, "UNSAFE_CODE", False))
        if getattr(task, "MULTIMODAL", False):
            raise UsageError(f"--tasks {name}: the task has images or sound; models here read text only")
        _set_up(task, config)
        _check_shots(name, task)
    if config.check_integrity:
        _check_integrity(specs)
    return loaded


def run_tasks(lm: SelfSpeculativeLM, tasks: Tasks, config: EvalConfig) -> dict[str, Any]:
    """lm-eval's results for the loaded tasks. The other processes must be serving `lm`."""
    import numpy
    import torch
    from lm_eval.caching.cache import delete_cache
    from lm_eval.evaluator import evaluate

    if config.apply_chat_template and not lm.tokenizer.chat_template:
        raise UsageError(f"--apply_chat_template: the tokenizer of {lm.loaded.name} has no chat template")
    if config.delete_requests_cache:
        delete_cache()
    random.seed(config.random_seed)
    numpy.random.seed(config.numpy_random_seed)
    torch.manual_seed(config.torch_random_seed)
    multiturn = config.apply_chat_template if config.fewshot_as_multiturn is None else config.fewshot_as_multiturn
    results = evaluate(
        lm, {"tasks": tasks.tasks, "groups": tasks.groups},
        limit=config.limit if config.limit is None or config.limit < 1 else int(config.limit),
        cache_requests=config.cache_requests or config.rewrite_requests_cache,
        rewrite_requests_cache=config.rewrite_requests_cache,
        bootstrap_iters=config.bootstrap_iters,
        write_out=config.write_out,
        log_samples=True,
        system_instruction=config.system_instruction,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=multiturn,
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
    )  # fmt: skip
    assert results is not None
    return dict(results)


def _find(config: EvalConfig) -> tuple[Any, list[str]]:
    """A task manager, and what it can load for the names asked for. lm-eval's own tasks, which take seconds to index,
    are looked at only for names that `--include_path` does not have."""
    from lm_eval.tasks import TaskManager

    names = config.names()
    if config.include_path is not None:
        manager = TaskManager(include_path=config.include_path, include_defaults=False)
        if all(name in manager.all_tasks for name in names):
            return manager, names
    manager = TaskManager(include_path=config.include_path)
    specs: list[str] = []
    for name in names:
        files = [str(Path(name).absolute())] if name.endswith(".yaml") and Path(name).is_file() else []
        found = files or manager.match_tasks([name])
        if not found:
            raise UsageError(f"--tasks {name}: no such task (--tasks list prints all, --include_path adds others)"
                             f"{did_you_mean(name, manager.all_tasks)}")  # fmt: skip
        specs += [spec for spec in found if spec not in specs]
    return manager, specs


def _config_of(manager: Any, spec: str) -> Row:
    """A task's YAML as the index has it; {} for groups, tags and files."""
    entry = manager.task_index.get(spec)
    config = getattr(entry, "cfg", None)
    return config if isinstance(config, dict) else {}


def _refuse_unsafe(name: str, unsafe: object) -> None:
    if unsafe:
        raise UsageError(f"--tasks {name}: scoring runs programs that the model wrote; allow it with "
                         "--confirm_run_unsafe_code True, best inside a container")  # fmt: skip


def _set_up(task: Any, config: EvalConfig) -> None:
    """lm-eval's rules for flags that change a task. Generation arguments are left to the model, which ranks them."""
    if config.predict_only:
        task.override_metric(metric_name="bypass")
    own = task.get_config("num_fewshot")
    if config.num_fewshot is not None and own != 0:  # a task that says 0 means it
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=config.fewshot_random_seed)


def _check_shots(name: str, task: Any) -> None:
    """Raise `UsageError` where a task has too few solved examples; one that is asked itself is none for itself."""
    shots = task.get_config("num_fewshot")
    examples = getattr(getattr(task, "sampler", None), "df", None)
    if not shots or examples is None:
        return
    there = len(examples) - (task.fewshot_cfg.split == task.config.test_split)
    require(shots <= there, "num_fewshot", shots, f"{name} has {there} solved examples to choose from")


def _check_integrity(specs: list[str]) -> None:
    from lm_eval.evaluator_utils import run_task_tests

    try:
        run_task_tests(task_list=specs)
    except FileNotFoundError:
        raise RunError("--check_integrity: lm-eval's tests are not part of its package; install it from a checkout"
                       ) from None  # fmt: skip
    except ValueError as error:
        raise RunError(f"--check_integrity: {error}") from None


@contextlib.contextmanager
def _explained(spec: str, data: str) -> Iterator[None]:
    """Turn what loading a task raises into one line that says what to do."""
    level = logging.getLogger("huggingface_hub").level
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except (RunError, UsageError):
        raise
    except ModuleNotFoundError as error:
        raise RunError(f"--tasks {spec}: the task needs the package {error.name}; pip install {error.name}") from error
    except Exception as error:
        text = " ".join(str(error).split())
        named = re.search(r"'([\w.-]+/[\w.-]+)'", text)
        data = data or (named[1] if named else "")
        what = f"task {spec}: data set {data}" if data else f"task {spec}"
        if hub.restricted(text):
            raise RunError(f"{what}: access is restricted; ask for it on the data set's page on the Hugging Face hub, "
                           "then run `hf auth login`") from error  # fmt: skip
        if isinstance(error, ConnectionError) or any(
            sign in text for sign in ("Couldn't reach", "couldn't connect", "ffline", "resolve", "not cached")
        ):
            raise RunError(
                f"{what}: the Hugging Face hub cannot be reached; copy the task's .yaml, let it read a local file "
                "(dataset_path: json, dataset_kwargs: data_files: ...) and give its folder as --include_path, or try "
                "the tasks in --include_path data/tasks"
            ) from error
        raise RunError(f"{what}: cannot be loaded: {text[:300]}") from error
    finally:
        logging.getLogger("huggingface_hub").setLevel(level)
