"""Generation settings of one lm-eval request: explicit flag > `--gen_kwargs` > the task's own > lm-eval's defaults.

lm-eval's defaults are greedy decoding and 256 new tokens. A task that samples without saying how much leaves the rest
to the toolkit's own defaults (temperature 0.6, top_p 0.9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .config import GenerationConfig, UsageError, parse_key_values

DEFAULT_STEPS = 256
STEP_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NUMBERS: dict[str, Callable[[Any], float]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
    "no_repeat_ngram_size": int,
}  # fmt: skip
KNOWN = ("do_sample", "until", *STEP_NAMES, *NUMBERS)
FIELDS = ("sample", "max_steps", "stop_words", *NUMBERS)

Level = dict[str, Any]


def explicit_level(config: GenerationConfig) -> Level:
    """What was given by flags, as a level."""
    return _decided({name: value for name in FIELDS if (value := getattr(config, name)) is not None})


def level(kwargs: Mapping[str, Any]) -> Level:
    """lm-eval's generation arguments under the names of `GenerationConfig`; those it does not know are left out."""
    given: Level = {}
    steps = next((kwargs[name] for name in STEP_NAMES if kwargs.get(name) is not None), None)
    if steps is not None:
        given["max_steps"] = int(steps)
    if kwargs.get("do_sample") is not None:
        given["sample"] = _truth(kwargs["do_sample"])
    if kwargs.get("until") is not None:
        given["stop_words"] = stop_strings(kwargs["until"])
    given.update({name: kind(kwargs[name]) for name, kind in NUMBERS.items() if kwargs.get(name) is not None})
    return _decided(given)


def stop_strings(until: str | Iterable[str]) -> list[str]:
    """`until` as a list. An empty string ends nothing: every text would be empty."""
    return [text for text in ([until] if isinstance(until, str) else until) if text]


def combined(levels: Sequence[Level]) -> Level:
    """One set of settings of several levels, strongest first.

    Whether to sample is decided by the first level that says so, by `sample` or by a temperature; a temperature of 0
    that stands in a weaker level then does not count.
    """
    defaults = {"sample": False, "max_steps": DEFAULT_STEPS, "stop_words": []}
    found: Level = {}
    for given in levels:
        weaker = {name: value for name, value in given.items() if name not in found}
        if found.get("sample") and weaker.get("temperature") == 0:
            del weaker["temperature"]
        found |= weaker
    return defaults | found


def parse_gen_kwargs(text: str | None) -> dict[str, Any]:
    """`--gen_kwargs` as a dictionary.

    Raises:
        UsageError: it cannot be read, or names something that decoding here does not know.
    """
    kwargs = parse_key_values("gen_kwargs", text)
    for name in kwargs:
        if name not in KNOWN:
            raise UsageError(f"--gen_kwargs {name}: choose from {', '.join(KNOWN)}")
    try:
        GenerationConfig(**combined([level(kwargs)]))
    except UsageError as error:
        raise UsageError(f"--gen_kwargs {text}: {error}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"--gen_kwargs {text}: {error}") from None
    return kwargs


def unknown(kwargs: Mapping[str, Any]) -> list[str]:
    """Arguments of a task that decoding here does not know and that would change its text."""
    neutral = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    return [name for name, value in kwargs.items() if name not in KNOWN and neutral.get(name, ...) != value]


def _truth(value: Any) -> bool:
    """A value of `do_sample`, which YAML or JSON may have left as text."""
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        raise ValueError(f"do_sample {value}: must be True or False")
    return value.lower() == "true" if isinstance(value, str) else bool(value)


def _decided(given: Level) -> Level:
    """A temperature says whether to sample where nothing else does; a temperature of 0 is greedy in any case."""
    if given.get("temperature") is not None:
        given["sample"] = given.get("sample", True) and given["temperature"] > 0
    return given
