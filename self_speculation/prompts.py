"""Where the prompts of generate.py come from: the command line, a file, or a person who types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import STREAMERS, RunError, UsageError, flag, require_choice

Prompt = str | list[dict[str, str]]  # plain text, or chat messages


@dataclass(frozen=True)
class PromptConfig:
    """Where prompts come from and how answers are shown."""

    prompt: str | None = flag(None, "the prompt; without it and --prompt_file, prompts are asked for")
    prompt_file: str | None = flag(
        None, "a .jsonl file whose lines have a field prompt, or a text file that is one prompt; - is standard input"
    )
    chat: bool = flag(False, "put prompts into the tokenizer's chat template")
    streamer: str = flag("standard", "none, standard or speculative (shows drafts accepted, rejected, corrected)")
    trace: str | None = flag(
        None, "write a page to this .html file: each token of each answer, what became of it, and the rounds' times"
    )
    compare_autoregressive: bool = flag(
        False, "answer each prompt autoregressively first, then report the speed-up and whether the texts are equal"
    )

    def __post_init__(self) -> None:
        require_choice("streamer", self.streamer, STREAMERS)
        if self.prompt is not None and self.prompt_file is not None:
            raise UsageError("--prompt_file: give either --prompt or --prompt_file")
        if self.prompt_file == "":
            raise UsageError("--prompt_file '': name a file")
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError(f"--prompt {self.prompt!r}: the prompt is empty")


def read_prompts(config: PromptConfig) -> Sequence[Prompt] | None:
    """The prompts given on the command line, each as text or as chat messages; None when they are to be asked for."""
    if config.prompt_file is not None:
        texts = _prompts_in(config.prompt_file)
    elif config.prompt is not None:
        texts = [config.prompt]
    else:
        return None
    return [[{"role": "user", "content": text}] for text in texts] if config.chat else texts


def _prompts_in(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise RunError(f"--prompt_file {path}: {reason}") from None
    if not path.endswith(".jsonl"):
        prompts = [text]
    else:
        lines = enumerate(text.split("\n"), 1)
        prompts = [_prompt_in(line, f"--prompt_file {path}: line {n}") for n, line in lines if line.strip()]
    if not any(prompt.strip() for prompt in prompts):
        raise UsageError(f"--prompt_file {path}: it is empty")
    return prompts


def _prompt_in(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
        if not (isinstance(prompt, str) and prompt.strip() and prompt.encode()):
            raise UsageError(f"{where}: the prompt is empty or no text")
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON ({error})") from None
    except (KeyError, TypeError):
        raise UsageError(f"{where} has no field prompt") from None
    except UnicodeEncodeError:
        raise UsageError(f"{where}: the prompt is no valid text") from None
    return prompt


def ask(chat: bool) -> Iterator[Prompt]:
    """Prompts typed by a person: each is a block of lines that ends with an empty line or the end of input."""
    messages: list[dict[str, str]] = []
    while True:
        if sys.stdin.isatty():
            print("\nprompt (an empty line ends it, Ctrl-D quits):", file=sys.stderr, flush=True)
        block: list[str] = []
        ended = True
        for line in sys.stdin:
            if not line.strip() and block:
                ended = False
                break
            if line.strip():
                block.append(line.rstrip("\n"))
        if block and chat:
            messages.append({"role": "user", "content": "\n".join(block)})
            yield messages
        elif block:
            yield "\n".join(block)
        if ended:
            return
