"""Generate text from prompts and show what was drafted, accepted and corrected, and how fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from self_speculation import cli, distributed
from self_speculation.config import (
    STREAMERS,
    GenerationConfig,
    ModelConfig,
    RunConfig,
    RunError,
    UsageError,
    as_dict,
    flag,
    require,
    require_choice,
)

if TYPE_CHECKING:
    from self_speculation.decoding import Decoded
    from self_speculation.generation import Generator
    from self_speculation.loading import Loaded
    from self_speculation.records import RunLog
    from self_speculation.trace_page import TracePage

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
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("--prompt '': the prompt is empty")


def main(model: ModelConfig, generation: GenerationConfig, prompts: PromptConfig, run: RunConfig) -> int:
    """Generate text with one model that drafts with part of itself and verifies with the whole."""
    if not model.tp:
        distributed.keep_only_main()
    require(generation.batch_size == 1, "batch_size", generation.batch_size,
            "generate.py answers one prompt at a time; benchmark.py, eval.py and sweep.py decode batches")  # fmt: skip
    require(not (model.tp and prompts.trace), "trace", prompts.trace, "does not go with --tp")
    given = read_prompts(prompts) if distributed.is_main() else []  # a missing file is reported before loading
    from self_speculation.decoding import check_prompts
    from self_speculation.generation import Generator
    from self_speculation.loading import load
    from self_speculation.records import SAMPLE_COLUMNS, RunLog
    from self_speculation.trace_page import TracePage

    page = TracePage(prompts.trace) if prompts.trace is not None else None
    loaded = load(model)
    generator = Generator(loaded, generation, seed=run.seed, notify=cli.note)
    generators = [generator]
    if prompts.compare_autoregressive:
        generators.insert(0, Generator(loaded, generation.autoregressive(), seed=run.seed))
    ids_given = [encode(loaded, prompt) for prompt in given or ()]
    distributed.on_main(lambda: check_prompts(loaded.model, ids_given))  # before there are files
    log = RunLog("generate", run.output_dir, SAMPLE_COLUMNS, as_dict(model, generation, prompts, run), key=KEY)
    try:
        asked = given if given is not None else ask(prompts.chat)
        for number, prompt in enumerate(distributed.from_main(asked)):
            ids = encode(loaded, prompt)
            answers = [answer(each, ids, number, prompts.streamer, log, page) for each in generators]
            if len(answers) == 2 and distributed.is_main():
                compare(*answers)
            if isinstance(prompt, list):
                prompt.append({"role": "assistant", "content": answers[-1].text})
            if answers[-1].stop_reason == "interrupted":
                return 130
    finally:
        log.finish()
        cli.note(f"rows in {log.path}" + (f", trace in {page.path}" if page and page.sections else ""))
    return 0


KEY = ("sample_id", "generation_strategy")


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
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise RunError(f"--prompt_file {path}: {reason}") from None
    if not path.endswith(".jsonl"):
        prompts = [text]
    else:
        try:
            prompts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
        except (ValueError, KeyError, TypeError):
            raise RunError(f"--prompt_file {path}: every line must be JSON with a field prompt") from None
    if not prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
        raise UsageError(f"--prompt_file {path}: a prompt is empty")
    return prompts


def encode(loaded: Loaded, prompt: Prompt) -> list[int]:
    """A prompt as token ids."""
    return loaded.encode_chat(prompt) if isinstance(prompt, list) else loaded.encode(prompt)


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


def answer(
    generator: Generator, ids: list[int], number: int, streamer: str, log: RunLog, page: TracePage | None = None
) -> Decoded:
    """Generate one answer, show it and its figures, and write its row and its part of the page."""
    from self_speculation.streaming import make_streamer

    if distributed.follows():
        streamer = "none"
    if streamer == "speculative" and generator.config.generation_strategy == "autoregressive":
        streamer = "standard"
    observer = make_streamer(streamer)
    if page is None:
        decoded = generator(ids, sample_id=number, observer=observer)
    else:
        decoded = page.trace(generator, ids, number, observer)
    if streamer == "none" and distributed.is_main():
        print(decoded.text, flush=True)
    stats = decoded.stats
    row = {"sample_id": number, **generator.columns(), **stats.row(), "stop_reason": decoded.stop_reason}
    row["note"] = stats.note()
    log.write(row, prediction=decoded.text)
    figures = [
        f"{generator.config.generation_strategy}: {stats.new_tokens} tokens",
        f"prefill {stats.prefill_s:.3f} s",
        f"decode {stats.decode_s:.3f} s",
    ]
    if stats.compile_s:
        figures.append(f"compiling {stats.compile_s:.1f} s, not counted")
    if stats.tokens_per_second is not None:
        figures.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.acceptance_rate is not None:
        figures.append(f"acceptance {stats.acceptance_rate:.1%} ({stats.accepted}/{stats.drafted})")
    if stats.drafted and stats.tokens_per_round is not None:
        figures.append(f"{stats.tokens_per_round:.2f} tokens/round")
    if distributed.is_main():
        print(f"[{', '.join(figures)}; ended by {decoded.stop_reason}]", file=sys.stderr, flush=True)
    return decoded


def compare(plain: Decoded, speculative: Decoded) -> None:
    """Say how much faster the second answer came, and whether both are the same."""
    speeds = plain.stats.tokens_per_second, speculative.stats.tokens_per_second
    ratio = f"{speeds[1] / speeds[0]:.2f} x the autoregressive speed, " if speeds[0] and speeds[1] else ""
    equal = "identical" if plain.tokens == speculative.tokens else "DIFFERENT"
    print(f"[{ratio}texts {equal}]", file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main, (ModelConfig, GenerationConfig, PromptConfig, RunConfig))
