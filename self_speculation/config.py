"""Settings of every script as frozen dataclasses. Standard library only.

Each field carries its own help text, and each class checks its own values: a value that cannot be used raises
`UsageError`, whose message names the flag, the value and what is allowed. `cli.py` turns these classes into flags.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

STRATEGIES = ("autoregressive", "self_speculative")
DRAFTERS = ("early_exit", "skip_layer", "prompt_lookup", "adapter")
DRAFT_EXIT_RULES = ("paper", "blog")
STREAMERS = ("none", "standard", "speculative")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
KINDS = {str: "text", int: "a whole number", float: "a number", bool: "True or False", list: "a list"}


class UsageError(ValueError):
    """The user asked for something that cannot be done as written; scripts print it in one line and exit with 2."""


class RunError(RuntimeError):
    """A run could not go on (missing model, unreadable file); scripts print it in one line and exit with 1."""


def flag(default: Any = MISSING, help: str = "", *, unset: Any = None, metavar: str | None = None) -> Any:
    """A dataclass field with a help text.

    A field whose default is None but which falls back to a documented value later names that value as `unset`.
    """
    metadata = {"help": help if unset is None else f"{help} (default when not given: {unset})"}
    if metavar is not None:
        metadata["metavar"] = metavar
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(condition: bool, flag_name: str, value: Any, allowed: str) -> None:
    """Raise `UsageError` unless `condition` holds, naming the flag, the value and what is allowed."""
    if not condition:
        raise UsageError(f"--{flag_name} {repr('') if value == '' else value}: {allowed}")


def require_choice(flag_name: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, flag_name, value, f"choose one of {', '.join(choices)}")


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def require_folder(flag_name: str, value: str | None, file: bool = False) -> None:
    """Raise `RunError` unless `value` is a folder that can be written to, or made; with `file`, a name in such a one.
    None is none to check."""
    if value is None:
        return
    path = Path(value).absolute()
    place = _existing(path.parent if file else path)
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError:
        raise RunError(f"--{flag_name} {value}: {place} is not a folder that can be written to") from None


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`; did you mean ...?` with the most similar of `names` behind `prefix`, empty when none is similar."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def from_options(kind: type[T], options: dict[str, Any]) -> T:
    """An instance of a settings class, for callers from Python; paths may be given as such.

    Raises:
        UsageError: an option that the class does not have, or a value that it does not take.
    """
    options = {name: _plain(value) for name, value in options.items()}
    check_options(kind, options, "")
    return kind(**options)


def _plain(value: Any) -> Any:
    """A path as text, NumPy's numbers as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, (Integral, Real)) and hasattr(value, "item") else value


def check_options(kind: type, options: dict[str, Any], where: str) -> None:
    """Raise `UsageError` for an option that the settings class does not have, or whose value is of another kind.

    Args:
        where: what the message begins with.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
    for name, value in options.items():
        if name not in hints:
            raise UsageError(f"{where}there is no setting {name}{did_you_mean(name, hints)}")
        hint = hints[name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        allowed = [get_origin(part) or part for part in parts]
        if not any(_is_a(part, value) for part in allowed):
            words = [KINDS[part] for part in allowed if part is not NoneType]
            raise UsageError(f"{where}{name} {value!r}: must be {' or '.join(words)}")
        if isinstance(value, (list, tuple)):
            each = next(element for part in parts for element in get_args(part))
            for one in value:
                if not _is_a(each, one):
                    raise UsageError(f"{where}{name} {value!r}: each must be {KINDS[each]}")


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value is of a kind; numbers may be NumPy's, but True is no number."""
    wider: dict[type, Any] = {int: Integral, float: Real, list: (list, tuple)}
    return isinstance(value, wider.get(kind, kind)) and (kind is bool or not isinstance(value, bool))


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | None = flag(
        None,
        "hub id, folder, GGUF file, or a short name (selfspec-16l, smollm2-135m, gemma3-270m)",
        unset="selfspec-16l",
    )
    model_args: str | None = flag(
        None,
        "more arguments for from_pretrained, as JSON or as name=value,name=value",
        metavar="ARGS",
    )
    revision: str | None = flag(None, "branch, tag or commit of a hub model")
    dtype: str = flag(
        "auto",
        "auto, float32, bfloat16, float16 or float64; auto is the checkpoint's own on a GPU, on a CPU "
        "bfloat16 where the processor multiplies it natively and float32 elsewhere",
    )
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    attn_implementation: str | None = flag(None, "eager, sdpa, flash_attention_2, ...", unset="the model's own choice")
    compile: bool = flag(
        False, "compile draft steps and verification with torch.compile when they are first needed; in "
        "training, the layers and the loss"
    )  # fmt: skip
    pack_weights: bool = flag(
        False, "on a CPU in bfloat16 or float32, keep a second copy of the weights in oneDNN's own layout"
    )  # fmt: skip
    device_map: str | None = flag(
        None,
        "spread the layers over all GPUs, then memory, then disk: auto, balanced, balanced_low_0, sequential, or JSON "
        'from module names to devices, such as {"": 0, "model.layers.20": "cpu", "model.layers.21": "disk"}',
    )
    offload_folder: str | None = flag(None, "where --device_map puts layers that go to disk")
    tp: bool = flag(False, "tensor parallel: the processes of torchrun hold one model together, each a part of a layer")

    def __post_init__(self) -> None:
        require(self.model != "", "model", "", "name one, or leave the flag out for the default")
        require_choice("dtype", self.dtype, DTYPES)
        self.parsed_model_args()
        self.parsed_device_map()
        require(self.offload_folder is None or self.device_map is not None, "offload_folder", self.offload_folder,
                "goes with --device_map")  # fmt: skip
        require(self.device_map is None or self.device == "auto", "device", self.device,
                "--device_map says where the model goes")  # fmt: skip
        require(not (self.tp and self.device_map), "tp", self.tp, "give either --tp or --device_map")
        require(not (self.compile and (self.tp or self.device_map)), "compile", self.compile,
                "models that --tp or --device_map spread are not compiled")  # fmt: skip
        require(not (self.pack_weights and (self.compile or self.tp or self.device_map)), "pack_weights", True,
                "goes with neither --compile nor --tp nor --device_map")  # fmt: skip

    def parsed_model_args(self) -> dict[str, Any]:
        """`--model_args` as a dictionary."""
        return parse_key_values("model_args", self.model_args)

    def parsed_device_map(self) -> str | dict[str, Any] | None:
        """`--device_map` as accelerate takes it."""
        if self.device_map is None:
            return None
        if not self.device_map.lstrip().startswith("{"):
            require_choice("device_map", self.device_map, DEVICE_MAPS)
            return self.device_map
        places = parse_key_values("device_map", self.device_map)
        require(bool(places), "device_map", self.device_map, "name at least one module")
        return places


@dataclass(frozen=True)
class RunConfig:
    """What every script shares beside the model."""

    seed: int = flag(42, "seed of everything random; each sample's own seed is derived from it")
    output_dir: str = flag("./logs", "folder of the result files")
    debug: bool = flag(False, "show the traceback of an error")

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, "seed", self.seed, f"must be from 0 to {2**31 - 1}")
        require(self.output_dir != "", "output_dir", "", "name a folder")
        require_folder("output_dir", self.output_dir)


@dataclass(frozen=True)
class GenerationConfig:
    """How text is generated. Sampling fields and `max_steps` are None until given; `resolved` fills in the defaults."""

    generation_strategy: str = flag("autoregressive", "autoregressive or self_speculative")
    drafter: str | None = flag(
        None,
        "early_exit, skip_layer, prompt_lookup, adapter, or a chain such as prompt_lookup+early_exit",
        unset="skip_layer with sub-layers to skip, adapter with an adapter, else early_exit",
    )
    exit_layer: int = flag(
        -1,
        "number of layers a draft runs, 1 to L-1 for a model of L layers; -1 lets the toolkit "
        "choose when self-speculative and runs the whole model when autoregressive",
    )
    num_speculations: int = flag(-1, "most tokens drafted a round; -1 lets the toolkit choose, 0 drafts nothing")
    max_steps: int | None = flag(None, "most new tokens", unset=512)
    batch_size: int = flag(1, "prompts decoded at once; each gives the text that it gives alone")
    sample: bool | None = flag(None, "sample instead of taking the most probable token", unset=True)
    temperature: float | None = flag(None, "sampling temperature; 0 is greedy", unset=0.6)
    top_k: int | None = flag(None, "keep the k most probable tokens; 0 keeps all", unset=0)
    top_p: float | None = flag(None, "keep the smallest set of tokens with this probability in all", unset=0.9)
    min_p: float | None = flag(None, "drop tokens below this share of the largest probability", unset=0)
    repetition_penalty: float | None = flag(None, "above 1 makes tokens seen before less probable", unset=1)
    no_repeat_ngram_size: int | None = flag(None, "no n-gram of this size occurs twice; 0 is off", unset=0)
    stop_words: list[str] | None = flag(None, "strings at which the text ends; more than one may be given")
    stop_token_ids: list[int] | None = flag(None, "token ids at which the text ends, beside the model's own")
    ignore_eos: bool = flag(False, "do not end at an end-of-sequence id, so that texts have equal, full length")
    lookup_ngram: int = flag(
        5, "longest n-gram that prompt_lookup matches; shorter matches propose 2 tokens for each matched"
    )
    skip_attn_layers: str | None = flag(None, "layers whose attention a draft skips, such as 3,5-8")
    skip_mlp_layers: str | None = flag(None, "layers whose MLP a draft skips")
    skip_layers: str | None = flag(None, 'a JSON file with {"attn": [...], "mlp": [...]}, as search.py writes it')
    adapter: str | None = flag(
        None, "folder or name of an adapter that train.py --recipe adapter made", unset="the one made for the model"
    )
    draft_vocabulary: int = flag(
        0, "how many tokens a draft's head scores, those of the text and the most frequent others; 0 is all, or what "
        "an adapter was trained for; skip_layer may then skip nothing else"
    )  # fmt: skip
    draft_exit_threshold: float | None = flag(
        None, "stop drafting once the draft's own probability of a token is below this; the threshold to start from "
        "when it adapts", unset="drafts run to --num_speculations; adapting starts at 0.6, by the rule blog at 0.5"
    )  # fmt: skip
    adaptive_draft_exit: bool = flag(False, "adapt the threshold to how drafts fare (Draft & Verify, section 3.3)")
    draft_exit_rule: str = flag("paper", "how it adapts: paper, or blog (the variant of a published rebuild)")
    draft_exit_alpha: float = flag(0.9, "the acceptance that the threshold aims at")
    draft_exit_eps: float = flag(0.01, "how far the threshold moves a round")
    draft_exit_b1: float = flag(0.5, "share of the past in the running acceptance")
    draft_exit_b2: float = flag(0.9, "share of the past in the threshold")
    carry_draft_exit: bool = flag(False, "carry the adapted threshold over from prompt to prompt")

    STOPS: ClassVar[tuple[str, ...]] = ("stop_words", "stop_token_ids", "ignore_eos")
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "max_steps": 512, "sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0,
        "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    }  # fmt: skip

    def __post_init__(self) -> None:
        require_choice("generation_strategy", self.generation_strategy, STRATEGIES)
        for part in self.drafters():
            choices = f"choose one of {', '.join(DRAFTERS)}, or a chain such as prompt_lookup+early_exit"
            require(part in DRAFTERS, "drafter", part, choices)
        require(len(set(self.drafters())) == len(self.drafters()), "drafter", self.drafter, "name each drafter once")
        require(self.exit_layer == -1 or self.exit_layer >= 1, "exit_layer", self.exit_layer,
                "must be at least 1 and below the model's number of layers, or -1")  # fmt: skip
        require(self.num_speculations >= -1, "num_speculations", self.num_speculations, "must be -1, 0 or more")
        least = {"batch_size": 1, "lookup_ngram": 1, "max_steps": 1, "top_k": 0, "no_repeat_ngram_size": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            require(value is None or value >= bound, name, value, f"must be {bound} or more")
        require(self.adaptive_draft_exit or not self.carry_draft_exit, "carry_draft_exit", True,
                "it is for what --adaptive_draft_exit adapts")  # fmt: skip
        require(self.batch_size == 1 or not self.carry_draft_exit, "batch_size", self.batch_size,
                "--carry_draft_exit carries a threshold from prompt to prompt, one at a time")  # fmt: skip
        if self.temperature is not None:
            usable = self.temperature == 0 or 1e-5 <= self.temperature < float("inf")
            require(usable, "temperature", self.temperature, "must be 0, or 1e-5 or more")
        if self.top_p is not None:
            require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        if self.min_p is not None:
            require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be between 0 and 1")
        if self.repetition_penalty is not None:
            require(0 < self.repetition_penalty < float("inf"), "repetition_penalty", self.repetition_penalty,
                    "must be above 0")  # fmt: skip
        for token in self.stop_token_ids or ():
            require(token >= 0, "stop_token_ids", token, "must be 0 or more")
        require(self.draft_vocabulary >= 0, "draft_vocabulary", self.draft_vocabulary, "must be 0 (all) or more")
        require_choice("draft_exit_rule", self.draft_exit_rule, DRAFT_EXIT_RULES)
        for name in ("draft_exit_threshold", "draft_exit_alpha", "draft_exit_eps", "draft_exit_b1", "draft_exit_b2"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, name, value, "must be between 0 and 1")
        self.skipped()
        require(all(self.stop_words or ["x"]), "stop_words", "''", "an empty string cannot end a text")

    def drafters(self) -> tuple[str, ...]:
        """The parts of `--drafter`, in the order in which they are asked."""
        return () if self.drafter is None else tuple(self.drafter.split("+"))

    def usual_drafter(self) -> str:
        """What drafts where `--drafter` is left out: what the other settings are for."""
        skips = any(self.skipped()) or self.skip_layers is not None
        return "skip_layer" if skips else "adapter" if self.adapter else "early_exit"

    def skipped(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers whose attention, and layers whose MLP, a draft skips; both empty when none are given."""
        if self.skip_layers is None:
            return parse_ids("skip_attn_layers", self.skip_attn_layers or ""), parse_ids(
                "skip_mlp_layers", self.skip_mlp_layers or ""
            )
        require(not (self.skip_attn_layers or self.skip_mlp_layers), "skip_layers", self.skip_layers,
                "give a file or lists of layers, not both")  # fmt: skip
        try:
            chosen = json.loads(Path(self.skip_layers).read_text(encoding="utf-8"))
            lists = chosen["attn"], chosen["mlp"]
            if not all(isinstance(ids, list) and all(type(index) is int for index in ids) for ids in lists):
                raise TypeError
            return tuple(lists[0]), tuple(lists[1])
        except OSError as error:
            raise RunError(f"--skip_layers {self.skip_layers}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f'--skip_layers {self.skip_layers}: must be JSON with {{"attn": [...], "mlp": [...]}}'
            ) from None

    def autoregressive(self) -> GenerationConfig:
        """Autoregressive decoding by the whole model, with the same sampling, stops and budget."""
        return replace(
            self, generation_strategy="autoregressive", drafter=None, exit_layer=-1, num_speculations=-1,
            skip_attn_layers=None, skip_mlp_layers=None, skip_layers=None, adapter=None, draft_exit_threshold=None,
            adaptive_draft_exit=False, carry_draft_exit=False, draft_vocabulary=0,
        )  # fmt: skip

    def first_draft_exit_threshold(self) -> float:
        """The threshold that adapting starts from."""
        if self.draft_exit_threshold is not None:
            return self.draft_exit_threshold
        return 0.5 if self.draft_exit_rule == "blog" else 0.6

    def resolved(self, *weaker: dict[str, Any]) -> GenerationConfig:
        """Fill every field that was not given: from the dictionaries in turn (strongest first), then the defaults."""
        missing: dict[str, Any] = {name: value for name, value in self.DEFAULTS.items() if getattr(self, name) is None}
        for name in missing:
            missing[name] = next((given[name] for given in weaker if given.get(name) is not None), missing[name])
        return replace(self, **missing)

    @property
    def greedy(self) -> bool:
        """True when the most probable token is taken at every step."""
        return not self.resolved().sample or self.resolved().temperature == 0


def parse_key_values(flag_name: str, text: str | None) -> dict[str, Any]:
    """`{"a": 1}` or `a=1,b=x` as a dictionary; values are read as JSON where they can be, else kept as text."""
    if not text:
        return {}
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"--{flag_name} {text}: not valid JSON ({error})") from None
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        require(bool(equals) and bool(name.strip()), flag_name, text, "write name=value,name=value or JSON")
        try:
            values[name.strip()] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except json.JSONDecodeError:
            values[name.strip()] = value
    return values


def parse_ids(flag_name: str, text: str) -> tuple[int, ...]:
    """`3,5-8` as (3, 5, 6, 7, 8)."""
    ids: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        numbers = first.isdecimal() and (not dash or last.isdecimal())
        require(numbers and int(first) <= int(last or first) < 10_000, flag_name, text, "write ids such as 3,5-8")
        ids.update(range(int(first), int(last or first) + 1))
    require(bool(ids) or not text, flag_name, text, "write ids such as 3,5-8")
    return tuple(sorted(ids))


def as_dict(*configs: Any) -> dict[str, Any]:
    """All fields of several settings in one dictionary."""
    return {field.name: getattr(config, field.name) for config in configs for field in fields(config)}
