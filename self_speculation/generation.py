"""A loaded model and one set of generation settings, ready to answer prompts. All scripts generate through this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from numbers import Integral
from os import PathLike, fspath
from typing import Any

from . import auto
from .adapters import load_adapter
from .batching import Begin, decode_batch
from .config import GenerationConfig, UsageError, from_options, require
from .decoding import Decoded, DraftAlone, Observer, Text, check_prompts, decode
from .drafters import AdapterDrafter, make_drafter, skip_set
from .forecast import Forecast
from .loading import Loaded, load
from .modeling import Adapter, KVCache, why_not
from .sampling import Sampler, sample_seed
from .skip_sets import ready_set
from .stopping import Stopper
from .vocabulary import draft_token_ids

DEFAULT_SPECULATIONS = {"early_exit": 6, "skip_layer": 6, "prompt_lookup": 10, "adapter": 2}
ADAPTIVE_SPECULATIONS = {"paper": 12, "blog": 8}
SETTINGS_COLUMNS = (
    "generation_strategy", "drafter", "exit_layer", "num_speculations", "draft_exit_threshold", "sample", "temperature",
    "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "max_steps",
)  # fmt: skip


class Generator:
    """Answers prompts with one strategy.

    Args:
        loaded: model and tokenizer.
        config: generation settings; what they leave open is chosen here, and `notify` is told what and why.
        seed: each prompt is sampled with a seed of its own, made of this one and its id.
        prompts: token ids of prompts like those to come, to choose by.

    Raises:
        UsageError: settings that do not go together, or that the model cannot follow.
    """

    def __init__(
        self,
        loaded: Loaded,
        config: GenerationConfig,
        *,
        seed: int = 42,
        notify: Callable[[str], None] = lambda message: None,
        prompts: Sequence[Sequence[int]] = (),
    ):
        if not isinstance(loaded, Loaded):
            raise UsageError(f"a model is what load() returns, or its name, not {type(loaded).__name__}")
        self.loaded = loaded
        self.seed = seed
        if config.exit_layer != -1:
            loaded.model.check_exit_layer(config.exit_layer)
        for token in config.stop_token_ids or ():
            require(token < loaded.model.vocab_size, "stop_token_ids", token,
                    f"{loaded.name} has the ids 0 to {loaded.model.vocab_size - 1}")  # fmt: skip
        adapter = load_adapter(loaded.model, config.adapter) if uses_adapter(config) else None
        chosen: list[str] = []  # told once it is known that there is nothing to refuse
        self.config = choose(config.resolved(), loaded, chosen.append, prompts, adapter)
        self.adapter = adapter if uses_adapter(self.config) else None
        for message in chosen:
            notify(message)
        self.draft_alone = None
        if self.config.generation_strategy == "autoregressive":
            self.draft_alone = draft_alone(self.config, loaded, self.adapter)
        by_adapter = self.draft_alone is not None and self.draft_alone.adapter is not None
        why_alone = "an adapter that decodes alone keeps the states of one text" if by_adapter else None
        if self.config.batch_size > 1 and (reason := why_alone or why_not(loaded.model)):
            notify(f"--batch_size {self.config.batch_size}: prompts are decoded one at a time; {reason}")
            self.config = replace(self.config, batch_size=1)
        if self.config.batch_size > 1 and loaded.model.compiled:
            notify("--compile: batches are not compiled, only what is decoded with --batch_size 1")
        self.token_ids = draft_token_ids(self.config, loaded, self.adapter)
        self.drafter = make_drafter(self.config, loaded.model, self.adapter, self.token_ids)

    def __call__(
        self,
        prompt: str | Sequence[int],
        *,
        sample_id: object = 0,
        observer: Observer | None = None,
        sampler: Sampler | None = None,
    ) -> Decoded:
        """Generate from a prompt, given as text or token ids; `sampler` takes the place of the sample's own."""
        return decode(
            self.loaded.model,
            self.drafter,
            self.ids(prompt),
            sampler=sampler or self.sampler(sample_id),
            stopper=self.stopper(),
            num_speculations=max(0, self.config.num_speculations),
            draft_alone=self.draft_alone,
            observer=observer,
        )

    def each(self, prompts: Iterable[tuple[object, str | Sequence[int]]]) -> Iterator[tuple[object, Decoded]]:
        """Generate from (sample id, prompt) pairs, `batch_size` at once; (sample id, text) pairs as texts end.

        Texts are those that each prompt gives alone. A prompt is taken from `prompts` once there is a place for it.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        if self.config.batch_size == 1:
            for sample_id, prompt in prompts:
                yield sample_id, self(prompt, sample_id=sample_id).complete()
            return
        ids: list[object] = []

        def begin(prompt: str | Sequence[int], sample_id: object, new_cache: Callable[[int], KVCache]) -> Text:
            return Text(
                self.loaded.model,
                make_drafter(self.config, self.loaded.model, self.adapter, self.token_ids),
                self.ids(prompt),
                sampler=self.sampler(sample_id),
                stopper=self.stopper(),
                num_speculations=max(0, self.config.num_speculations),
                new_cache=new_cache,
            )

        def waiting() -> Iterator[Begin]:
            for sample_id, prompt in prompts:
                ids.append(sample_id)
                yield partial(begin, prompt, sample_id)

        for number, decoded in decode_batch(self.loaded.model, waiting(), self.config.batch_size, self.draft_alone):
            yield ids[number], decoded

    def stopper(self) -> Stopper:
        """A stopper for one text."""
        config, loaded = self.config, self.loaded
        return Stopper(
            eos_ids=() if config.ignore_eos else loaded.eos_ids,
            stop_ids=config.stop_token_ids or (),
            stop_strings=config.stop_words or (),
            budget=config.max_steps or 0,
            decode=loaded.decode,
        )

    def ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """A prompt as token ids; a list, a tuple or an array of ids is taken as it is."""
        if isinstance(prompt, str):
            return self.loaded.encode(prompt)
        ids: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # NumPy's and torch's
        listed = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray))
        if listed and all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
            return [int(token) for token in ids]
        raise UsageError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__} {str(prompt)[:40]}")

    def sampler(self, sample_id: object = 0, kind: type[Sampler] = Sampler) -> Sampler:
        """A sampler with the seed of this sample."""
        model = self.loaded.model
        seed = sample_seed(self.seed, sample_id)
        return kind(self.config, seed=seed, device=model.device, vocab_limit=len(self.loaded.tokenizer))

    def with_settings(self, **settings: Any) -> Generator:
        """The same strategy with other sampling settings, stops or budget (fields of `GenerationConfig`)."""
        if others := set(settings) - {*GenerationConfig.DEFAULTS, *GenerationConfig.STOPS}:
            raise UsageError(f"with_settings({min(others)}=...): make another Generator for this")
        other = copy(self)
        other.config = replace(self.config, **settings).resolved()
        return other

    def columns(self) -> dict[str, Any]:
        """The settings as columns of a result row; those that do not apply are left out."""
        config, model = self.config, self.loaded.model
        row = {name: getattr(config, name) for name in SETTINGS_COLUMNS}
        row.update({name: None for name in ("exit_layer", "num_speculations") if row[name] == -1})
        if config.greedy:
            row.update(sample=False, temperature=None, top_k=None, top_p=None, min_p=None)
        if config.adaptive_draft_exit:
            row["draft_exit_rule"] = config.draft_exit_rule
        return row | {
            **(self.draft_alone.skip.columns() if self.draft_alone and self.draft_alone.skip else {}),
            **(self.draft_alone.adapter.columns() if self.draft_alone and self.draft_alone.adapter else {}),
            **self.drafter.columns(),
            "model": self.loaded.name,
            "dtype": model.dtype_name,
            "device": model.device.type,
            "compile": model.compiled and config.batch_size == 1,
            "seed": self.seed,
        }


def choose(
    config: GenerationConfig,
    loaded: Loaded,
    notify: Callable[[str], None],
    prompts: Sequence[Sequence[int]] = (),
    adapter: Adapter | None = None,
) -> GenerationConfig:
    """Replace -1 by what the toolkit chooses, and complete the drafter.

    Early exits, and the number of speculations of a skip set or an adapter, are chosen by a prediction (`auto`); where
    they do not pay, `num_speculations` becomes 0, or the drafters beside them are left to themselves. `skip_layer`
    without a set takes the one that was found for these weights, if there is one.
    """
    if "skip_layer" in config.drafters() and not any(config.skipped()) and (path := ready_set(loaded)):
        notify(f"chose --skip_layers {path}")
        config = replace(config, skip_layers=str(path))
    if config.exit_layer != -1 and uses_adapter(config) and "early_exit" not in config.drafters():
        raise UsageError(f"--exit_layer {config.exit_layer}: an adapter has an exit of its own; leave the flag out")
    if config.generation_strategy == "autoregressive":
        if config.drafter not in (None, "early_exit", "skip_layer", "adapter"):
            raise UsageError(
                f"--drafter {config.drafter}: autoregressive decoding has no drafter; "
                "add --generation_strategy self_speculative"
            )
        why = "autoregressive decoding drafts nothing; add --generation_strategy self_speculative"
        require(not config.draft_vocabulary, "draft_vocabulary", config.draft_vocabulary, why)
        _refuse_draft_exit(config, why)
        return replace(config, num_speculations=-1)
    config = replace(config, drafter=config.drafter or config.usual_drafter())
    refuse_without_effect(config)
    fixed_length = config.num_speculations != -1 or config.adaptive_draft_exit or "skip_layer" in config.drafters()
    if config.num_speculations == 0:
        return config
    forecast = _one_part(config, loaded, adapter)
    if forecast is None and "early_exit" in config.drafters() and (config.exit_layer == -1 or not fixed_length):
        if fixed_length and config.num_speculations == -1:
            config = replace(config, num_speculations=_fixed_speculations(config, notify))
        forecast = Forecast(loaded, config)
    if forecast is not None:
        cell = auto.choose_cell(forecast, notify, prompts)
        if cell is not None:
            return replace(config, exit_layer=cell.exit_layer or -1, num_speculations=cell.num_speculations)
        one = "early_exit" if forecast.by_exit else "skip_layer" if forecast.skip is not None else "adapter"
        others = [part for part in config.drafters() if part != one]
        if not others:
            return replace(config, num_speculations=0)
        config = replace(config, drafter="+".join(others), exit_layer=-1)
    if config.num_speculations == -1:
        config = replace(config, num_speculations=_fixed_speculations(config, notify))
    return config


def refuse_without_effect(config: GenerationConfig) -> None:
    """Raise `UsageError` for a setting that none of the drafters looks at."""
    settings = {"exit_layer": "early_exit", "skip_attn_layers": "skip_layer", "skip_mlp_layers": "skip_layer",
                "skip_layers": "skip_layer", "adapter": "adapter"}  # fmt: skip
    for name, drafter in settings.items():
        value = getattr(config, name)
        require(value in (None, -1) or drafter in config.drafters(), name, value,
                f"it is for {drafter}, and the drafter is {config.drafter}; leave one of them out")  # fmt: skip
    size = config.draft_vocabulary
    require(not size or config.drafter != "prompt_lookup", "draft_vocabulary", size,
            "prompt_lookup has no head; it is for early_exit, skip_layer and adapter")  # fmt: skip
    if config.drafter == "prompt_lookup":
        _refuse_draft_exit(config, "prompt_lookup has no probabilities; it is for early_exit, skip_layer and adapter")


def _refuse_draft_exit(config: GenerationConfig, why: str) -> None:
    """Raise `UsageError` where drafts shall end by their own probabilities."""
    require(config.draft_exit_threshold is None, "draft_exit_threshold", config.draft_exit_threshold, why)
    require(not config.adaptive_draft_exit, "adaptive_draft_exit", True, why)


def _one_part(config: GenerationConfig, loaded: Loaded, adapter: Adapter | None) -> Forecast | None:
    """The forecast of a skip set or an adapter whose number of speculations is to be predicted: no other layers draft,
    and in full length."""
    kinds = set(config.drafters()) - {"prompt_lookup"}
    if config.num_speculations != -1 or config.adaptive_draft_exit or config.draft_exit_threshold is not None:
        return None
    if kinds == {"skip_layer"}:
        return Forecast(loaded, config, skip=skip_set(config, loaded.model))
    if kinds == {"adapter"}:
        return Forecast(loaded, config, adapter=adapter)
    return None


def usual_speculations(config: GenerationConfig) -> int:
    """How many tokens the drafter drafts a round where the number is neither given nor predicted."""
    if config.adaptive_draft_exit:
        return ADAPTIVE_SPECULATIONS[config.draft_exit_rule]
    return DEFAULT_SPECULATIONS[config.drafters()[0]]


def _fixed_speculations(config: GenerationConfig, notify: Callable[[str], None]) -> int:
    number = usual_speculations(config)
    notify(f"chose --num_speculations {number}")
    return number


def uses_adapter(config: GenerationConfig) -> bool:
    """Whether an adapter drafts, or decodes alone."""
    return "adapter" in config.drafters() or (config.drafter is None and config.adapter is not None)


def draft_alone(config: GenerationConfig, loaded: Loaded, adapter: Adapter | None = None) -> DraftAlone | None:
    """The part of the model that autoregressive decoding shall take for the whole, None for all of it."""
    if adapter is not None:
        return DraftAlone(adapter=AdapterDrafter(adapter))
    if any(config.skipped()) or config.drafter == "skip_layer":
        return DraftAlone(skip=skip_set(config, loaded.model))
    return DraftAlone(stop=config.exit_layer) if config.exit_layer != -1 else None


def generate(
    loaded: Loaded | str | PathLike[str],
    prompt: str | Sequence[int],
    *,
    seed: int = 42,
    observer: Observer | None = None,
    **settings: Any,
) -> Decoded:
    """Generate from one prompt.

    Args:
        loaded: what `load` returned, or a model's name or folder.
        prompt: text or token ids.
        settings: fields of `GenerationConfig`, such as `generation_strategy="self_speculative", exit_layer=8`.

    Returns:
        `Decoded`: tokens, text, stop_reason, and stats with counts and times.

    Raises:
        UsageError: a setting that there is not (the nearest is named), or that cannot be followed.
    """
    config = from_options(GenerationConfig, settings)
    return Generator(_loaded(loaded), config, seed=seed)(prompt, observer=observer)


def generate_each(
    loaded: Loaded | str | PathLike[str], prompts: Iterable[str | Sequence[int]], *, seed: int = 42, **settings: Any
) -> list[Decoded]:
    """Generate from several prompts, `batch_size` at once (one of the settings): what each gives alone, in order.

    Each prompt is sampled with a seed of its own, made of `seed` and its place in `prompts`.

    Raises:
        UsageError: as `generate`, or a prompt that cannot be followed, before any is decoded.
        KeyboardInterrupt: Ctrl-C.
    """
    config = from_options(GenerationConfig, settings)
    if isinstance(prompts, (str, bytes)):
        raise UsageError("generate_each takes a list of prompts; generate takes one")
    generator = Generator(_loaded(loaded), config, seed=seed)
    ids = [generator.ids(prompt) for prompt in prompts]
    check_prompts(generator.loaded.model, ids)
    found = dict(generator.each(enumerate(ids)))
    return [found[place] for place in range(len(ids))]


def _loaded(model: Loaded | str | PathLike[str]) -> Loaded:
    return load(fspath(model)) if isinstance(model, (str, PathLike)) else model
