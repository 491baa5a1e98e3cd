"""Tiny random models of every family, whose greedy texts are lively and whose top two logits lie well apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import transformers as t
from transformers import PreTrainedModel

from self_speculation.config import GenerationConfig
from self_speculation.decoding import Decoded, DraftAlone, Observer, decode
from self_speculation.drafters import AdapterDrafter, Context, Draft, Drafter, make_drafter
from self_speculation.modeling import KINDS, Adapter, AdapterShape, SelfSpeculativeModel
from self_speculation.sampling import Sampler
from self_speculation.stats import Round
from self_speculation.stopping import Stopper

LAYERS = 6
VOCAB = 96
WINDOW = 8
POSITIONS = 512
WAYS = ("direct", "view")

Config = Any


def _config(kind: type, **more: Any) -> Config:
    """A small configuration with values that matter: grouped heads, a sliding window narrower than the prompts."""
    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": POSITIONS,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return kind(**{**common, **more})


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], Config]] = {
    "llama": lambda: _config(t.LlamaConfig),
    "llama2": lambda: _config(t.LlamaConfig, num_key_value_heads=4),  # facebook/layerskip-llama2-*: every head its own
    "llama3": lambda: _config(t.LlamaConfig, rope_parameters=LLAMA3_ROPE),  # facebook/layerskip-llama3-*
    "llama3_tied": lambda: _config(t.LlamaConfig, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama_eager": lambda: _config(t.LlamaConfig),
    "mistral": lambda: _config(t.MistralConfig, sliding_window=None),
    "mistral_sliding": lambda: _config(t.MistralConfig, sliding_window=WINDOW),
    "qwen2": lambda: _config(t.Qwen2Config),
    "qwen2_sliding": lambda: _config(
        t.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3
    ),
    "qwen3": lambda: _config(t.Qwen3Config),
    "qwen3_sliding": lambda: _config(
        t.Qwen3Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3
    ),
    "phi3": lambda: _config(t.Phi3Config, sliding_window=WINDOW, partial_rotary_factor=0.5),
    "gemma": lambda: _config(t.GemmaConfig, tie_word_embeddings=True),
    "gemma2": lambda: _config(
        t.Gemma2Config, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0,
    ),
    "gemma3": lambda: _config(
        t.Gemma3TextConfig, sliding_window=WINDOW, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "granite": lambda: _config(
        t.GraniteConfig, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.7,
        attention_multiplier=0.2,
    ),
    "cohere": lambda: _config(t.CohereConfig, logit_scale=0.7, use_qk_norm=True, tie_word_embeddings=True),
    "olmo2": lambda: _config(t.Olmo2Config),
    "starcoder2": lambda: _config(t.Starcoder2Config, sliding_window=WINDOW, use_bias=True),
    "smollm3": lambda: _config(t.SmolLM3Config, no_rope_layer_interval=3),
    "mixtral": lambda: _config(t.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: _config(
        t.Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "olmoe": lambda: _config(t.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
}  # fmt: skip

FAMILIES = tuple(CONFIGS)
ATTENTION = {"llama_eager": "eager"}  # others use what the family prefers, which is eager for gemma2


SHRINK = 0.6  # each layer changes the hidden states so many times as much as the layer before it


def hf_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model of that family, made once."""
    return _kept(family, dtype)


@cache
def _kept(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return new_hf_model(family, dtype)


def new_hf_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model whose later layers change the hidden states less and less, so that early exits are often right."""
    config = CONFIGS[family]()
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=ATTENTION.get(family))
    model.eval().requires_grad_(False)
    model.config._experts_implementation = "eager"  # the faster ones do not know float64
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.data = _random_weight(name, weight.data, generator, config)
    model.generation_config.eos_token_id = None
    return model.to(dtype)


def _random_weight(name: str, weight: torch.Tensor, generator: torch.Generator, config: Config) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 0
    less = SHRINK**layer
    gemma = config.model_type.startswith("gemma")
    if "norm" in name:
        ends_a_sublayer = "post_" in name and config.model_type in ("olmo2", "gemma2", "gemma3_text")
        usual = less if ends_a_sublayer else 1.0
        return 0.2 * usual * noise + (usual - 1.0 if gemma else usual)  # Gemma adds 1 to its norms' weights
    if weight.ndim == 1:
        return 0.2 * noise
    if "embed" in name or "lm_head" in name:
        if gemma and "embed" in name:
            return noise / config.hidden_size**0.5  # Gemma multiplies its embeddings
        return 0.2 * noise if config.tie_word_embeddings else noise  # else a tied head repeats the last token
    scale = 1.5 / weight.shape[-1] ** 0.5
    return scale * noise * (less if any(part in name for part in ("o_proj", "down_proj", "c_proj")) else 1.0)


@cache
def split(family: str, way: str = "direct", dtype: torch.dtype = torch.float64) -> SelfSpeculativeModel:
    """The tiny model as decoding sees it; way "view" runs its layers through the family's own forward."""
    model = SelfSpeculativeModel(hf_model(family, dtype))
    if way == "view":
        model.backbone.direct = None
    return model


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """A random prompt; long ones repeat a stretch, so that looking it up finds something."""
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
    return ids[: length - length // 3] + ids[: length // 3]


@cache
def oracle(family: str, prompt: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float64) -> list[int]:
    """The new tokens of `model.generate`, greedy, none of them an end of sequence."""
    ids = torch.tensor([prompt])
    new = hf_model(family, dtype).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=steps, min_new_tokens=steps
    )
    return new[0, len(prompt) :].tolist()


def run(
    model: SelfSpeculativeModel,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    steps: int = 60,
    num_speculations: int = 4,
    seed: int = 0,
    end: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    decode_text: Callable[[list[int]], str] | None = None,
    vocab_limit: int | None = None,
    observer: Observer | None = None,
    draft_alone: DraftAlone | None = None,
    **settings: Any,
) -> Decoded:
    """The real loop on a tiny model; greedy unless settings of `GenerationConfig` say otherwise."""
    config = GenerationConfig(**{"sample": False, **settings})
    return decode(
        model,
        drafter,
        list(prompt),
        sampler=Sampler(config, seed=seed, vocab_limit=vocab_limit),
        stopper=Stopper(eos_ids=end, stop_strings=stop_strings, budget=steps, decode=decode_text),
        num_speculations=num_speculations,
        draft_alone=draft_alone,
        observer=observer,
    )


class ScriptedDrafter(Drafter):
    """Proposes what a function of the text so far says, as point masses or with the distributions given beside."""

    def __init__(self, script: Callable[[list[int], int], list[int]]):
        self.script = script
        self.outcomes: list[Round] = []

    def propose(self, context: Context, limit: int) -> Draft:
        return Draft(self.script(context.tokens, limit)[:limit])

    def observe(self, context: Context, outcome: Round) -> None:
        self.outcomes.append(outcome)


DRAFTERS: dict[
    str, dict[str, Any]
] = {  # as the command line names them, with the settings they need; "" drafts nothing
    "": {},
    "early_exit": {},
    "early_exit/12": {},  # with a head over so many tokens
    "skip_layer/12": {},
    "skip_layer": {"skip_attn_layers": "1,3", "skip_mlp_layers": "2-3"},
    "prompt_lookup": {},
    "prompt_lookup+early_exit": {},
    "adapter": {},
    "prompt_lookup+adapter": {},
}


def new_drafter(name: str, model: Any, exit_layer: int = 2, num_speculations: int = 4, **settings: Any) -> Drafter:
    """A drafter as the command line would make it."""
    strategy = "self_speculative" if name else "autoregressive"
    drafter, _, size = name.partition("/")
    config = GenerationConfig(
        generation_strategy=strategy, drafter=drafter or None, exit_layer=exit_layer, draft_vocabulary=int(size or 0),
        num_speculations=num_speculations, **DRAFTERS[name], **settings,
    )  # fmt: skip
    token_ids = torch.arange(model.vocab_size - 1, -1, -1)[: int(size)] if size else None
    return make_drafter(config, model, new_adapter(model, exit_layer) if "adapter" in name else None, token_ids)


def adapter_cache_error(drafter: Drafter, context: Context) -> float:
    """How far keys and values of an adapter in `drafter` are from those of a fresh pass over the text so far."""
    worst = 0.0
    for part in getattr(drafter, "parts", [drafter]):
        index = part.adapter.shape.from_layer if isinstance(part, AdapterDrafter) else None
        if index is not None and part.known and part.cache.layers[index].is_initialized:
            model, known, ahead = context.model, part.known, part.adapter.ahead
            read = model.ids(context.tokens[:known])
            states = model.run(read, model.new_cache(known), 0, stop=part.depth)
            fresh = model.new_cache(known)
            model.run_adapter(part.adapter, model.ids(context.tokens[ahead : known + ahead]), fresh, 0, states)
            for name in ("keys", "values"):
                ours, theirs = (getattr(c.layers[index], name)[:, :, :known] for c in (part.cache, fresh))
                worst = max(worst, float((ours - theirs).abs().max()))
    return worst


def new_adapter(model: Any, exit_layer: int) -> Any:
    """An untrained adapter whose kind goes by the exit layer; `feature` for the deepest."""
    kind = KINDS[exit_layer % len(KINDS)]
    shape = AdapterShape(kind, model.num_layers if kind == "feature" else exit_layer, from_layer=exit_layer)
    if not isinstance(model, SelfSpeculativeModel):
        return SimpleNamespace(shape=shape, ahead=int(kind == "feature"), token_ids=None, name="")
    token_ids = torch.arange(VOCAB - 1, -1, -1) if exit_layer % 2 else None
    with torch.random.fork_rng(), torch.no_grad():
        return Adapter(model.backbone, shape, token_ids).eval().requires_grad_(False)
