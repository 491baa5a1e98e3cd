"""Names such as `early_exit:exit_layer=4:num_speculations=3` -> generators, for comparing ways of decoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .config import DRAFTERS, GenerationConfig, check_options, parse_key_values, require
from .decoding import Decoded
from .generation import DEFAULT_SPECULATIONS, Generator
from .loading import Loaded
from .peers import PEERS, PeerGenerator

AUTOREGRESSIVE = "autoregressive"
TEXTS = ("skip_attn_layers", "skip_mlp_layers", "skip_layers", "adapter")  # settings that are text, whatever they say
_LIST = re.compile(r",(?=\s*[a-z])")  # not the commas of a list of layers


class Answers(Protocol):
    """What a strategy can do: `generation.Generator` and `peers.PeerGenerator`."""

    config: GenerationConfig

    def __call__(self, prompt: Any, *, sample_id: object = 0) -> Decoded: ...

    def each(self, prompts: Iterable[tuple[object, Any]]) -> Iterator[tuple[object, Decoded]]: ...

    def columns(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Strategy:
    """One way of decoding, under the name it was asked for by."""

    name: str
    generator: Answers

    def with_steps(self, loaded: Loaded, max_steps: int) -> Answers:
        """The same with another budget, for warming up."""
        config = replace(self.generator.config, max_steps=max_steps)
        if isinstance(self.generator, PeerGenerator):
            return PeerGenerator(self.generator.name, loaded, config)
        return Generator(loaded, config)


def parse_strategies(text: str, base: GenerationConfig) -> dict[str, tuple[str, GenerationConfig]]:
    """`A,B:setting=value,...` as name -> (kind, settings): kind is autoregressive, a drafter, a chain or a peer.

    Each starts from the settings in `base`. Autoregressive decoding, which the others are compared with, is put in
    front when it is not named.

    Raises:
        UsageError: an unknown strategy or setting, or one named twice.
    """
    names = [name.strip() for name in _LIST.split(text)]
    if AUTOREGRESSIVE not in names:
        names.insert(0, AUTOREGRESSIVE)
    require(len(set(names)) == len(names), "compare", text, "each strategy can be named once")
    return {name: _parse(name, base) for name in names}


def _parse(name: str, base: GenerationConfig) -> tuple[str, GenerationConfig]:
    kind, *settings = name.split(":")
    known = kind == AUTOREGRESSIVE or kind in PEERS or all(part in DRAFTERS for part in kind.split("+"))
    allowed = (
        f"choose from {', '.join((AUTOREGRESSIVE, *DRAFTERS, *PEERS))}, or a chain such as prompt_lookup+early_exit"
    )
    require(known, "compare", name, allowed)
    values: dict[str, Any] = {}
    for setting in settings:
        field_name, equals, value = setting.partition("=")
        require(bool(equals), "compare", name, "write a setting as name=value")
        require(field_name not in values, "compare", name, f"{field_name} is set twice")
        text = "," in value or field_name in TEXTS
        values |= {field_name: value} if text else parse_key_values("compare", setting)
    check_options(GenerationConfig, values, f"--compare {name}: ")
    return kind, replace(base.autoregressive() if kind == AUTOREGRESSIVE else _drafting(kind, base), **values)


def _drafting(kind: str, base: GenerationConfig) -> GenerationConfig:
    """`base` without what is for other drafters than those in `kind`."""
    parts = () if kind in PEERS else tuple(kind.split("+"))
    unused: dict[str, Any] = {}
    if "adapter" not in parts:
        unused |= {"adapter": None}
    if "early_exit" not in parts and kind not in PEERS:
        unused |= {"exit_layer": -1}
    if "skip_layer" not in parts:
        unused |= {"skip_attn_layers": None, "skip_mlp_layers": None, "skip_layers": None}
    if kind in ("prompt_lookup", *PEERS):
        unused |= {"adaptive_draft_exit": False, "carry_draft_exit": False, "draft_exit_threshold": None,
                   "draft_vocabulary": 0}  # fmt: skip
    return replace(base, generation_strategy="self_speculative", drafter="+".join(parts) or None, **unused)


def make_strategies(
    loaded: Loaded,
    parsed: dict[str, tuple[str, GenerationConfig]],
    *,
    seed: int,
    notify: Callable[[str], None] = lambda message: None,
    prompts: Sequence[Sequence[int]] = (),
) -> list[Strategy]:
    """Build the generators. A peer takes what it leaves open from the first of ours that uses the same.

    Args:
        prompts: token ids of prompts like those to come; what our strategies leave open is chosen by the first of them.
    """

    def told(name: str) -> Callable[[str], None]:
        return lambda text: notify(f"{name}: {text}")

    ours = {
        name: Generator(loaded, config, seed=seed, notify=told(name), prompts=prompts)
        for name, (kind, config) in parsed.items()
        if kind not in PEERS
    }
    made: list[Strategy] = []
    for name, (kind, config) in parsed.items():
        if kind not in PEERS:
            made.append(Strategy(name, ours[name]))
            continue
        drafter = kind.removeprefix("hf_")
        like = next(
            (g.config for g in ours.values() if drafter in g.config.drafters() and g.config.num_speculations), None
        )
        exit_layer, length = config.exit_layer, config.num_speculations
        if exit_layer == -1 and drafter == "early_exit":
            exit_layer = like.exit_layer if like else max(1, loaded.model.num_layers // 4)
        if length < 1:
            length = like.num_speculations if like else DEFAULT_SPECULATIONS.get(drafter, 1)
        config = replace(config, exit_layer=exit_layer, num_speculations=length)
        made.append(Strategy(name, PeerGenerator(kind, loaded, config, seed=seed)))
    return made
