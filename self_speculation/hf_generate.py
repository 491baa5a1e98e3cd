"""Self-speculative decoding inside `model.generate`, as the callable that its `custom_generate` takes.

    from self_speculation import custom_generate

    model.generate(**inputs, max_new_tokens=64, custom_generate=custom_generate(exit_layer=4, num_speculations=4))

Everything else is as `generate` has it: it prepares logits processors, stopping criteria, lengths and ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from .config import GenerationConfig, UsageError, from_options
from .decoding import decode
from .drafters import make_drafter
from .generation import DEFAULT_SPECULATIONS, refuse_without_effect
from .loading import end_ids
from .modeling import SelfSpeculativeModel
from .nucleus import without_sorting
from .sampling import Sampler
from .stats import Stats
from .stopping import Stopper

REFUSED = (
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "guidance_scale",
    "watermarking_config", "token_healing",
)  # fmt: skip
"""Settings of transformers that would need more than the decoded tokens, or processors that remember."""


def custom_generate(**settings: Any) -> CustomGenerate:
    """What `model.generate(custom_generate=...)` takes.

    Args:
        settings: how to draft, in fields of `GenerationConfig`: `drafter`, `exit_layer`, `num_speculations`,
            `skip_layers`, ... Whether and how to sample, lengths and stops are `generate`'s own arguments.

    Raises:
        UsageError: a field that is `generate`'s own, or `early_exit` without an exit layer.
    """
    return CustomGenerate(**settings)


class CustomGenerate:
    """Decodes for `generate`. One serves many calls; it keeps the model it was last called with.

    Attributes: `stats`, the counts and times of the last call.
    """

    def __init__(self, **settings: Any):
        for name in ("generation_strategy", "batch_size", *GenerationConfig.STOPS, *GenerationConfig.DEFAULTS):
            if name in settings:
                raise UsageError(f"custom_generate({name}=...): this is for model.generate's own arguments to say")
        config = from_options(GenerationConfig, {"generation_strategy": "self_speculative", **settings})
        drafters = config.drafters() or (config.usual_drafter(),)
        if "early_exit" in drafters and config.exit_layer == -1:
            raise UsageError("custom_generate: early_exit needs exit_layer=1 to L-1 for a model of L layers")
        if config.draft_vocabulary:
            raise UsageError("custom_generate: draft_vocabulary needs the tokenizer, which generate does not hand on")
        length = config.num_speculations
        length = DEFAULT_SPECULATIONS[drafters[0]] if length == -1 else length
        values = {**vars(config), "drafter": "+".join(drafters), "num_speculations": length}
        self.config = GenerationConfig(**values)
        refuse_without_effect(self.config)
        self.model: SelfSpeculativeModel | None = None
        self.known: tuple[Any, torch.device, torch.dtype] | None = None  # that `model` was made of
        self.stats = Stats()

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: transformers.GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode for `generate`.

        Returns:
            [1, n] prompt and new tokens, an end-of-sequence id among them, as `generate` returns them.

        Raises:
            UsageError: beams, several rows, padding and what else cannot be done, by name.
            Unsupported: the architecture cannot be split at its layers.
        """
        _check(input_ids, generation_config, model_kwargs)
        known = (model, model.device, model.dtype)
        if self.model is None or self.known != known:
            self.known, self.model = known, SelfSpeculativeModel(model)
            self.drafter = make_drafter(self.config, self.model)
        prompt = input_ids[0].tolist()
        stopper = CriteriaStopper(
            stopping_criteria, prompt, budget=generation_config.max_length - len(prompt),
            eos_ids=end_ids(generation_config.eos_token_id, None), device=input_ids.device,
        )  # fmt: skip
        if stopper.budget > 0:
            sampler = ProcessorSampler(
                logits_processor, greedy=not generation_config.do_sample, device=self.model.device
            )
            self.stats = decode(
                self.model, self.drafter, prompt, sampler=sampler, stopper=stopper,
                num_speculations=self.config.num_speculations,
            ).stats  # fmt: skip
        if stopper.reason == "interrupted":
            raise KeyboardInterrupt
        sequences: Any = torch.cat([input_ids, input_ids.new_tensor([stopper.tokens])], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences


class ProcessorSampler(Sampler):
    """Draws by the logits processors that `generate` has prepared, on draft and target alike.

    Its seed comes from torch's generator, so `torch.manual_seed` before `generate` makes a text reproducible.
    """

    def __init__(self, processors: LogitsProcessorList, *, greedy: bool, device: torch.device):
        seed = 0 if greedy else int(torch.randint(1 << 62, ()))
        super().__init__(GenerationConfig(sample=not greedy, temperature=1.0, top_p=1.0), seed=seed, device=device)
        # some look at the tokens before, so each position is processed by itself
        self.history = without_sorting(processors)


class CriteriaStopper(Stopper):
    """Ends a text where the stopping criteria of `generate` end it. The id that ends it is part of it, as there."""

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        prompt: Sequence[int],
        *,
        budget: int,
        eos_ids: Sequence[int],
        device: torch.device,
    ):
        super().__init__(budget=budget)
        self.end_ids = frozenset(eos_ids)  # nothing is drafted past one
        self.criteria = criteria
        self.ids = torch.tensor([prompt], device=device)

    def push(self, block: Sequence[int]) -> int:
        for used, token in enumerate(block, 1):
            self.tokens.append(token)
            self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)
            if bool(self.criteria(self.ids, None).all()):
                self.reason = "criteria"
                return used
        return len(block)


def _check(input_ids: torch.Tensor, config: transformers.GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse what decoding does not do, rather than do something else."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UsageError(f"custom_generate: {mode.value.replace('_', ' ')} cannot be self-speculative")
    if config.num_return_sequences != 1 or len(input_ids) != 1:
        raise UsageError(f"custom_generate: one prompt at a time and one answer to it, not {len(input_ids)} rows")
    for name in REFUSED:
        value = getattr(config, name, None)
        if value and (name, value) != ("guidance_scale", 1):
            raise UsageError(f"custom_generate: {name}={value} cannot be followed while drafting")
    if model_kwargs.get("attention_mask") is not None and not model_kwargs["attention_mask"].all():
        raise UsageError("custom_generate: the prompt is padded; give it without padding")
    usual = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in usual)
    if others:
        raise UsageError(f"custom_generate: the argument {others[0]} cannot be followed while drafting")
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.flatten().tolist() != list(range(input_ids.shape[1])):
        raise UsageError("custom_generate: position_ids other than 0, 1, 2, ... cannot be followed")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise UsageError("custom_generate: a filled cache cannot be gone on from; give the whole prompt")
