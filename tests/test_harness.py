"""The lm-eval model: scores and texts equal lm-eval's own, and every trap of a request."""

from __future__ import annotations

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

from self_speculation import distributed
from self_speculation.config import GenerationConfig, UsageError
from self_speculation.harness import SelfSpeculativeLM, create
from self_speculation.loading import DEFAULT_MODEL, load
from self_speculation.task_settings import combined, explicit_level, level, parse_gen_kwargs, stop_strings
from tests.evaluation import STRATEGIES, make, run_local
from tests.folders import CHAT_TEMPLATE, byte_tokenizer, save_tiny_model, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=768)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def hf(loaded):
    """lm-eval's own model on the same weights."""
    return HFLM(pretrained=loaded.model.hf_model, tokenizer=loaded.tokenizer, batch_size=1)


def texts(lm, *requests):
    """Answers to (context, generation arguments) pairs."""
    given = [Instance("generate_until", {}, request, 0, ("task", n, 1)) for n, request in enumerate(requests)]
    return lm.generate_until(given)


def likelihoods(lm, *requests):
    return lm.loglikelihood(
        [Instance("loglikelihood", {}, request, 0, ("t", n, 1)) for n, request in enumerate(requests)]
    )


@pytest.fixture(scope="module")
def hf_results(hf):
    return run_local(hf)


@pytest.mark.parametrize("name", STRATEGIES)
def test_scores_and_texts_equal_lm_evals_own_model(name, loaded, hf_results):
    assert run_local(make(loaded, name)) == hf_results


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m", DEFAULT_MODEL])
def test_scores_and_texts_equal_lm_evals_own_model_on_real_weights(model):
    big = load(model, dtype="float32")
    theirs = run_local(HFLM(pretrained=big.model.hf_model, tokenizer=big.tokenizer, batch_size=1))
    for name in STRATEGIES:
        assert run_local(make(big, name)) == theirs, name


@pytest.fixture(scope="module")
def long_text(hf):
    """What the tiny model says to `hello`."""
    return texts(hf, ("hello", {"until": [], "max_gen_toks": 40}))[0]


@pytest.mark.parametrize("form", ["string", "list", "two", "empty list", "absent"])
def test_until(form, loaded, hf, long_text):
    stop, later = long_text[9:11], long_text[15:17]
    until = {"string": stop, "list": [stop], "two": [later, stop], "empty list": [], "absent": None}[form]
    kwargs = {"max_gen_toks": 30} | ({} if until is None else {"until": until})
    (ours,) = texts(make(loaded), ("hello", dict(kwargs)))
    assert [ours] == texts(hf, ("hello", dict(kwargs)))
    if form in ("string", "list", "two"):
        assert ours == long_text[: long_text.index(stop)]


@pytest.mark.parametrize("until", ["", [""]])
def test_an_empty_string_ends_nothing(until, loaded, long_text):
    assert texts(make(loaded), ("hello", {"until": until, "max_gen_toks": 40})) == [long_text]


def test_requests_of_several_tasks_each_have_their_own_settings(loaded, hf, long_text):
    requests = [
        ("hello", {"until": long_text[5:7], "max_gen_toks": 20}),
        ("hello", {"until": [long_text[9:11]], "max_gen_toks": 12}),
        ("another", {"until": [], "max_gen_toks": 3}),
        ("hello", {"until": [], "max_new_tokens": 7, "do_sample": False, "temperature": 0.0}),
    ]
    ours = texts(make(loaded), *requests)
    assert ours == texts(hf, *requests)
    assert len(set(ours)) == 4


def test_a_long_context_loses_its_beginning_as_in_lm_eval(loaded, hf):
    told = []
    lm = make(loaded)
    lm.notify = told.append
    request = ("abcdefghij" * 90, {"until": [], "max_gen_toks": 10})
    assert texts(lm, request) == texts(hf, request)
    assert "758" in told[0]


def test_no_room_for_a_context_is_said(loaded):
    with pytest.raises(UsageError, match="--max_steps 768.*768 positions"):
        texts(make(loaded), ("hello", {"until": [], "max_gen_toks": 768}))


def test_an_empty_context_starts_from_the_beginning_of_a_sequence(loaded):
    assert make(loaded)._encode_context("", 10) == [256]


def test_a_special_token_as_stop_string(loaded):
    """Case of Llama and Qwen tasks, whose until lists the end of a turn: it is not part of the decoded text."""
    lm = make(loaded)
    request = Instance("generate_until", {}, ("hello", {"until": ["<s>"]}), 0, ("t", 0, 1))
    assert lm._with_settings_of(request).config.stop_token_ids == [256, 257]


@pytest.mark.parametrize(
    ("flags", "gen_kwargs", "task", "expected"),
    [
        ({}, {}, {}, {"sample": False, "max_steps": 256}),
        ({}, {}, {"do_sample": True}, {"sample": True, "temperature": None}),
        ({}, {}, {"do_sample": False, "temperature": 0.7}, {"sample": False}),
        ({}, {}, {"do_sample": True, "temperature": 0.0}, {"sample": False}),
        # lm-eval #1329, #1416, #1800: the command line's temperature wins over the task's do_sample
        ({}, {"temperature": 0.8}, {"do_sample": False, "temperature": 0.0}, {"sample": True, "temperature": 0.8}),
        ({}, {"temperature": 0}, {"do_sample": True, "temperature": 0.7}, {"sample": False}),
        ({}, {"do_sample": True}, {"do_sample": False, "temperature": 0.0}, {"sample": True, "temperature": None}),
        ({}, {"max_new_tokens": 5}, {"max_gen_toks": 9}, {"max_steps": 5}),
        ({"max_steps": 3}, {"max_gen_toks": 5}, {"max_gen_toks": 9}, {"max_steps": 3}),
        ({"temperature": 0.5}, {"temperature": 0.8}, {}, {"sample": True, "temperature": 0.5}),
        ({"sample": False}, {"temperature": 0.8}, {"do_sample": True}, {"sample": False}),
        ({"temperature": 0.0}, {"do_sample": True}, {}, {"sample": False}),
        ({}, {"top_p": 0.5}, {"top_p": 0.9, "top_k": 7}, {"top_p": 0.5, "top_k": 7, "sample": False}),
        ({}, {"until": "x"}, {"until": ["y"]}, {"stop_words": ["x"]}),
        ({"stop_words": ["z"]}, {"until": "x"}, {"until": ["y"]}, {"stop_words": ["z"]}),
    ],
)  # fmt: skip
def test_precedence(flags, gen_kwargs, task, expected):
    settings = combined([explicit_level(GenerationConfig(**flags)), level(gen_kwargs), level(task)])
    assert {name: settings.get(name) for name in expected} == expected


def test_settings_reach_the_decoder(loaded):
    lm = make(loaded, "autoregressive", gen_kwargs={"temperature": 0.8, "max_gen_toks": 6}, top_k=9)
    texts(lm, ("hello", {"do_sample": False, "temperature": 0.0, "until": []}))
    (row,) = lm.rows.values()
    assert (row["sample"], row["temperature"], row["top_k"], row["max_steps"]) == (True, 0.8, 9, 6)


def test_gen_kwargs_are_checked():
    assert parse_gen_kwargs('{"until": ["a", "b"], "temperature": 0}') == {"until": ["a", "b"], "temperature": 0}
    assert stop_strings("x") == ["x"]
    for wrong in ("num_beams=4", "temperature=-1", "temperature=warm", "max_gen_toks=0", "temperature"):
        with pytest.raises(UsageError, match="--gen_kwargs"):
            parse_gen_kwargs(wrong)


def test_sampling_is_seeded_by_sample_and_repeat(loaded):
    kwargs = {"until": [], "max_gen_toks": 12, "temperature": 1.5, "top_p": 1.0}
    request = Instance("generate_until", {}, ("hello", kwargs), 0, ("task", 0, 2))
    first = make(loaded, "autoregressive").generate_until([request, request])
    assert first == make(loaded, "autoregressive").generate_until([request, request])
    assert first[0] != first[1]


def truncated(loaded, layers):
    """A model of only the first layers."""
    model = loaded.model.hf_model
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": layers})
    part = LlamaForCausalLM(config).eval()
    part.load_state_dict(model.state_dict(), strict=False)
    return part


def test_autoregressive_with_an_exit_scores_with_the_exit(loaded, hf):
    """Case LayerSkip #15."""
    requests = [("hello", " world"), ("Question:", " honey"), ("", "abc")]
    exit_lm = make(loaded, "autoregressive", exit_layer=2)
    part = HFLM(pretrained=truncated(loaded, 2), tokenizer=loaded.tokenizer, batch_size=1)
    for ours, theirs in zip(likelihoods(exit_lm, *requests), likelihoods(part, *requests), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
        assert ours[1] == theirs[1]
    assert likelihoods(exit_lm, *requests) != likelihoods(hf, *requests)
    kwargs = {"until": [], "max_gen_toks": 8}
    assert texts(exit_lm, ("hello", kwargs)) == texts(part, ("hello", kwargs))


def test_autoregressive_with_a_skip_set_scores_without_the_sublayers(loaded, hf):
    lm = make(loaded, "autoregressive", skip_attn_layers="3-5", skip_mlp_layers="3-5")
    part = HFLM(pretrained=truncated(loaded, 3), tokenizer=loaded.tokenizer, batch_size=1)
    (ours,), (theirs,) = likelihoods(lm, ("hello", " world")), likelihoods(part, ("hello", " world"))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-4)


def test_speculative_scores_are_unchanged_and_it_says_so(loaded, hf):
    told = []
    lm = make(loaded)
    lm.notify = told.append
    requests = [("hello", " world"), ("hello", " there")]
    assert likelihoods(lm, *requests) == likelihoods(hf, *requests)
    likelihoods(lm, *requests)
    assert len(told) == 1
    assert "cannot speed this task up" in told[0]


def test_one_beginning_of_sequence_with_and_without_a_chat_template(loaded):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    assert tokenizer("x")["input_ids"][0] == 256
    lm = make(type(loaded)(loaded.name, loaded.model, tokenizer))
    chat = lm.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat.startswith("<s><user>hi")
    for context in (chat, "plain"):
        ids = lm._encode_context(context, 10)
        assert ids[0] == 256
        assert ids.count(256) == 1
        assert lm.tok_encode(context).count(256) == 1


def cached(loaded, path, **settings):
    config = GenerationConfig(**{"generation_strategy": "self_speculative", **STRATEGIES["early_exit"], **settings})
    return SelfSpeculativeLM(loaded, config, use_cache=str(path))


def test_kept_answers_are_for_the_same_model_and_settings_only(loaded, tmp_path, monkeypatch):
    request = ("hello", {"until": [], "max_gen_toks": 6})
    lm = cached(loaded, tmp_path / "answers")
    first = texts(lm, request), likelihoods(lm, ("a", "b"))
    lm.close()
    computed = []
    hand_out = SelfSpeculativeLM._hand_out
    monkeypatch.setattr(SelfSpeculativeLM, "_hand_out", lambda *a: computed.append(a[1]) or hand_out(*a))

    def again(model, **settings):
        computed.clear()
        lm = cached(model, tmp_path / "answers", **settings)
        answers = texts(lm, request), likelihoods(lm, ("a", "b"))
        lm.close()
        return answers, len(computed)

    assert again(loaded) == (first, 0)
    assert again(loaded, max_steps=5)[1] == 2
    assert again(loaded, exit_layer=2)[1] == 2
    torch.manual_seed(5)
    other = tiny_llama(max_position_embeddings=768)
    with torch.no_grad():
        other.model.layers[5].mlp.down_proj.weight.mul_(1.5)
    assert again(type(loaded)(loaded.name, type(loaded.model)(other), loaded.tokenizer))[1] == 2


def test_kept_prompts_do_not_freeze_generation_settings(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    for steps in (3, 5):
        lm = make(loaded, gen_kwargs={"max_gen_toks": steps})
        run_local(lm, "local_math", cache_requests=True)
        assert {row["new_tokens"] for row in lm.rows.values()} == {steps}
    assert any(tmp_path.iterdir())


def test_texts_of_batches_are_those_of_single_requests(loaded):
    """Requests of several settings and lengths; each batch holds those of equal settings."""
    requests = [
        ("x " * length, {"until": [], "max_gen_toks": steps, "do_sample": sample})
        for length in (1, 40, 7, 90, 3) for steps, sample in ((6, False), (9, True), (4, False))
    ]  # fmt: skip
    alone, together = make(loaded), make(loaded, batch_size=3)
    assert texts(together, *requests) == texts(alone, *requests)
    times = ("prefill_s", "decode_s", "tokens_per_second", "batch_size")
    assert [{k: v for k, v in row.items() if k not in times} for row in together.rows.values()] == [
        {k: v for k, v in alone.rows[key].items() if k not in times} for key in together.rows
    ]


def test_a_failure_elsewhere_is_reported_by_the_main_process(loaded, monkeypatch):
    failed = ({}, {}, UsageError("--max_steps 9: in process 1"))
    monkeypatch.setattr(distributed, "gather", lambda value: [value, failed])
    with pytest.raises(UsageError, match="process 1"):
        texts(make(loaded), ("hello", {"until": [], "max_gen_toks": 2}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": "auto"}, "--batch_size auto: must be a number"),
        ({"exit_layer": "abc"}, "exit_layer 'abc': must be a whole number"),
        ({"stop_words": "foo"}, "stop_words 'foo'"),
        ({"nonsense": 1}, "--model_args nonsense"),
    ],
)
def test_lm_evals_own_arguments_are_checked(folder, given, says):
    with pytest.raises(UsageError, match=says):
        create({"pretrained": str(folder), **given})
