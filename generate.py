"""Generate text from prompts and show what was drafted, accepted and corrected, and how fast."""

from __future__ import annotations

from self_speculation import cli, distributed
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, as_dict, require
from self_speculation.prompts import PromptConfig, ask, read_prompts


def main(model: ModelConfig, generation: GenerationConfig, prompts: PromptConfig, run: RunConfig) -> int:
    """Generate text with one model that drafts with part of itself and verifies with the whole."""
    if not model.tp:
        distributed.keep_only_main()
    require(generation.batch_size == 1, "batch_size", generation.batch_size,
            "generate.py answers one prompt at a time; benchmark.py, eval.py and sweep.py decode batches")  # fmt: skip
    require(not (model.tp and prompts.trace), "trace", prompts.trace, "does not go with --tp")
    given = read_prompts(prompts) if distributed.is_main() else []  # a missing file is reported before loading
    from self_speculation import answering
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
    ids_given = [answering.encode(loaded, prompt) for prompt in given or ()]
    distributed.on_main(lambda: check_prompts(loaded.model, ids_given))  # before there are files
    config = as_dict(model, generation, prompts, run)
    log = RunLog("generate", run.output_dir, SAMPLE_COLUMNS, config, key=answering.KEY)
    try:
        asked = given if given is not None else ask(prompts.chat)
        for number, prompt in enumerate(distributed.from_main(asked)):
            ids = answering.encode(loaded, prompt)
            answers = [answering.answer(each, ids, number, prompts.streamer, log, page) for each in generators]
            if len(answers) == 2 and distributed.is_main():
                answering.compare(*answers)
            if isinstance(prompt, list):
                prompt.append({"role": "assistant", "content": answers[-1].text})
            if answers[-1].stop_reason == "interrupted":
                return 130
    finally:
        if log.finish():
            cli.note(f"rows in {log.path}" + (f", trace in {page.path}" if page and page.sections else ""))
        elif distributed.is_main():
            log.withdraw()
            cli.note("nothing was asked, so there are no rows")
    return 0


if __name__ == "__main__":
    cli.run(main, (ModelConfig, GenerationConfig, PromptConfig, RunConfig))
