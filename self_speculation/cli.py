"""argv -> settings, and how a script ends: one line and an exit code for every error, nothing lost on Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from argparse import Action, ArgumentError
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import distributed
from .config import KINDS, RunError, UsageError, did_you_mean

Loss = tuple[int, str | None]
_interrupted_by: Loss | None = None  # the process whose loss interrupted this one, None where a person did


def parse(configs: Sequence[Any], description: str, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Read the command line into one instance of each class in `configs`.

    Flags must be written out in full (`--sample False`, `--exit_layer 8`); dashes work as underscores do. A mistake
    raises `UsageError`, which names the flag and, where a similar flag exists, suggests it.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def _get_value(self, action: Action, value: str) -> Any:
            try:
                return super()._get_value(action, value)
            except ArgumentError:
                allowed = KINDS[action.type if action.type in (int, float) else bool]
                raise UsageError(f"{action.option_strings[0]} {value or repr('')}: must be {allowed}") from None

        def error(self, message: str) -> NoReturn:
            raise UsageError(message.removeprefix("argument "))

    parser = Parser(configs, description=description, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this text and stop")
    names = {option.lstrip("-").replace("-", "_") for action in parser._actions for option in action.option_strings}
    given = list(sys.argv[1:] if argv is None else argv)
    *settings, rest, unknown = parser.parse_args_into_dataclasses(
        given, return_remaining_strings=True, look_for_args_file=False
    )
    if rest.help:
        if distributed.is_main():
            parser.print_help()
        sys.exit(0)
    for argument in unknown:
        if argument.startswith("-"):
            name = argument.split("=")[0]
            hint = did_you_mean(name.lstrip("-").replace("-", "_"), sorted(names), "--") or "; --help lists the flags"
            raise UsageError(f"unknown flag {name}{hint}")
        raise UsageError(f"unexpected argument {argument!r}; every value follows its flag")
    return tuple(settings)


def run(main: Callable[..., int | None], configs: Sequence[type], argv: Sequence[str] | None = None) -> NoReturn:
    """Parse, call `main(*settings)` and exit: 0, 1 (run error), 2 (usage error) or 130 (interrupted).

    `main`'s docstring is the description `--help` prints. Only the first process prints; `--debug` shows tracebacks.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = _asks_for_debug(arguments)
    _set_up_signals()
    unsaid: str | None = ""  # what the other processes shall say, None where all is well
    try:
        _set_up_logging(debug)
        code = main(*parse(configs, main.__doc__ or "", arguments)) or 0
        unsaid = None
    except KeyboardInterrupt:
        code = 1 if _interrupted_by else 130
        _report_loss(_interrupted_by)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if distributed.world_size() > 1:
            _ignore_signals()
        if debug:
            raise
        code = 2 if isinstance(error, UsageError) else 1
        gone = distributed.lost(seconds=1) if _of_the_network(error) else None
        if gone:
            _report_loss(gone)
        else:
            unsaid = _print_error(error)
    finally:
        if distributed.world_size() > 1:
            _ignore_signals()
        distributed.leave(unsaid)
    sys.exit(code)


def _asks_for_debug(arguments: Sequence[str]) -> bool:
    """What `--debug` says, before the command line is understood."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--debug":
            return following.startswith("--") or following.lower() in ("", "true", "yes", "y", "t", "1")
    return False


def note(message: str) -> None:
    """One line of information for the person at the terminal, from one process only."""
    if distributed.speaks():
        print(f"note: {message}", file=sys.stderr, flush=True)


def _report_loss(gone: Loss | None) -> None:
    """One line about the process whose end has ended this one, from one of those that are left."""
    if gone and gone[1] != "" and distributed.speaks():
        died = "died (killed, or out of memory); the others end, finished rows are kept"
        print(
            f"error: process {gone[0]}{f' {died}' if gone[1] is None else f': {gone[1]}'}", file=sys.stderr, flush=True
        )


def _of_the_network(error: Exception) -> bool:
    """Whether it may come from talking to a process that is gone."""
    return type(error).__name__.startswith("Dist") or "gloo" in str(error).lower()


def _print_error(error: Exception) -> str:
    """Print an error in one line, where it is this process that shall; else return the line, for the others.

    Anything but usage and run errors is a fault of ours, still one line unless --debug.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, (UsageError, RunError)):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    failed_rank = getattr(error, "failed_rank", 0)
    if not (distributed.is_main() or failed_rank):
        return "" if distributed.lost(seconds=3) else text  # the main process mostly meets the same error itself
    where = f"process {failed_rank}: " if failed_rank else ""
    print(f"error: {where}{text}", file=sys.stderr, flush=True)
    return ""


def _set_up_signals() -> None:
    """The first SIGINT or SIGTERM (which torchrun sends after Ctrl-C) interrupts; later ones let the rows be saved."""

    def interrupt(number: int, frame: object) -> None:
        global _interrupted_by
        _interrupted_by = distributed.lost()
        _ignore_signals()
        raise KeyboardInterrupt

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)


def _ignore_signals() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def _set_up_logging(debug: bool) -> None:
    warnings.simplefilter("default" if debug else "ignore")
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(name)s: %(message)s")
    for name in ("transformers", "datasets", "urllib3", "huggingface_hub", "matplotlib", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING if debug else logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "warning" if debug else "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
