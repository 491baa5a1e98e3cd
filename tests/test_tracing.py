"""The page of --trace: every token with what became of it, nothing asked of the network, the same text as without."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from self_speculation.config import GenerationConfig, RunError, UsageError
from self_speculation.decoding import Observer
from self_speculation.generation import Generator
from self_speculation.loading import load
from self_speculation.stopping import Stopper
from self_speculation.trace_page import TracePage, page
from self_speculation.tracing import KINDS, Trace, TracedSampler
from tests.folders import byte_tokenizer
from tests.runs import save_exit_friendly
from tests.test_stopping import byte_generator, prompt

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SPECULATIVE = {"generation_strategy": "self_speculative", "num_speculations": 4}
WAYS = {
    "autoregressive": {},
    "early_exit": {**SPECULATIVE, "exit_layer": 3},
    "skip_layer": {**SPECULATIVE, "skip_attn_layers": "1,3"},
    "prompt_lookup": {**SPECULATIVE, "drafter": "prompt_lookup"},
    "chain": {**SPECULATIVE, "drafter": "prompt_lookup+early_exit", "exit_layer": 3},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(str(save_exit_friendly(tmp_path_factory.mktemp("model"))), dtype="float32")


def traced(generator, ids):
    trace = Trace(generator.loaded.tokenizer, generator.loaded.model.device)
    sampler = generator.sampler(0, TracedSampler)
    sampler.trace = trace
    return generator(ids, observer=trace, sampler=sampler), trace


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_trace_tells_what_happened_and_changes_nothing(loaded, way, sample):
    generator = Generator(loaded, GenerationConfig(sample=sample, temperature=1.5, max_steps=24, **WAYS[way]))
    plain = generator("hello there, hello")
    decoded, trace = traced(generator, loaded.encode("hello there, hello"))
    assert decoded.tokens == plain.tokens
    assert [token.id for token in trace.tokens if token.kind not in ("rejected", "discarded")] == decoded.tokens
    assert {token.kind for token in trace.tokens} <= set(KINDS)
    rounds = decoded.stats.rounds
    assert [(r.drafted, r.accepted, r.new_tokens) for r in trace.rounds] == [
        (r.drafted, r.accepted, r.new_tokens) for r in rounds
    ]
    assert tuple(map(sum, zip(*trace.by_depth(), strict=True))) == (
        (decoded.stats.drafted, decoded.stats.accepted) if decoded.stats.drafted else ()
    )
    for number, each in enumerate(rounds, 1):
        own = [token for token in trace.tokens if token.round == number]
        assert [token.kind for token in own].count("accepted") == each.accepted
        assert sum(token.depth is not None for token in own) == each.drafted
    for token in trace.tokens:
        assert token.target_probability is not None and 0 <= token.target_probability <= 1
        if token.kind == "accepted" and not sample:
            assert token.target_probability > 1 / 258  # the most probable of 258
    drafts = [token.draft_probability for token in trace.tokens if token.depth]
    if way in ("early_exit", "skip_layer"):
        assert drafts and all(probability is not None and 0 < probability <= 1 for probability in drafts)
    if way == "prompt_lookup":
        assert drafts and not any(drafts)


def test_probabilities_are_the_models_own(loaded):
    """The target's, against a plain forward of the text."""
    import torch

    generator = Generator(loaded, GenerationConfig(sample=False, max_steps=20, **WAYS["early_exit"]))
    ids = loaded.encode("hello")
    decoded, trace = traced(generator, ids)
    with torch.no_grad():
        logits = loaded.model.hf_model(torch.tensor([[*ids, *decoded.tokens]])).logits[0]
    kept = [token for token in trace.tokens if token.kind not in ("rejected", "discarded")]
    for place, token in enumerate(kept):
        expected = logits[len(ids) + place - 1].softmax(-1)[token.id]
        assert token.target_probability == pytest.approx(float(expected), abs=1e-4)


def test_stops_inside_a_block_leave_what_the_counts_leave():
    for stops in ({"stop_words": ["d"]}, {"max_steps": 3}, {"stop_words": ["bc"]}, {}):
        for draft in ("abcdef", "abcxyz", "zzzzzz"):
            decoded, trace = traced(byte_generator("abcdef", draft, num_speculations=4, **stops), prompt("x"))
            counts = [(r.drafted, r.accepted, r.new_tokens) for r in decoded.stats.rounds]
            assert [(r.drafted, r.accepted, r.new_tokens) for r in trace.rounds] == counts
            kept = [token for token in trace.tokens if token.kind not in ("rejected", "discarded")]
            assert [token.id for token in kept] == decoded.tokens


def test_parts_of_a_character_are_shown_as_bytes():
    tokenizer = byte_tokenizer()
    trace = Trace(tokenizer, None)
    stopper = Stopper(budget=9, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    ids = tokenizer("a☕")["input_ids"][-4:]
    assert trace.spell([], ids, stopper) == ["a", "⟨E2⟩", "⟨98⟩", "☕"]
    assert trace.spell(ids, [tokenizer.eos_token_id], stopper) == ["</s>"]


class Structure(HTMLParser):
    """Checks that tags are balanced and keeps what the page holds."""

    VOID = ("meta", "input", "br", "line", "rect")

    def __init__(self):
        super().__init__()
        self.open, self.tokens, self.asked, self.text, self.rects = [], [], [], "", 0

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.asked += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        self.rects += tag == "rect"
        if named.get("data-k") in KINDS:
            self.tokens.append(named)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in self.VOID
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def parsed(path) -> Structure:
    structure = Structure()
    structure.feed(path.read_text(encoding="utf-8"))
    structure.close()
    assert structure.open == [] and structure.asked == []
    return structure


EVIL = "</pre><script>document.title='stolen'</script>&amp;\x00\"'>"


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    """A text and a prompt that try to leave their place, beside drafts that fail now and then."""
    path = tmp_path_factory.mktemp("page") / "trace.html"
    pages = TracePage(str(path))
    generator = byte_generator(EVIL + " ☕", EVIL[:20] + "<b>" * 9, num_speculations=4)
    pages.trace(generator, [*prompt(EVIL)], 0, None)
    pages.trace(byte_generator("plain"), prompt("x"), 1, Observer())
    return path


def test_the_page_is_whole_and_escapes_what_models_say(evil_page):
    structure = parsed(evil_page)
    assert "document.title='stolen'" in structure.text.replace("⏎", "")
    text = evil_page.read_text(encoding="utf-8")
    assert text.count("<script") == 1 == text.count("</script")
    assert not re.search(r"(https?:)?//\w|url\(|@import", text)
    assert "\x00" not in text and "␀" in text
    assert {each["data-k"] for each in structure.tokens} >= {"prefill", "accepted", "rejected", "correction"}
    assert structure.rects > 10
    assert text.count("<section>") == 2


def test_the_page_is_refused_where_it_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match=r"--trace page.txt: .*\.html"):
        TracePage("page.txt")
    for path in (tmp_path / "nowhere" / "page.html", tmp_path / "folder.html"):
        (tmp_path / "folder.html").mkdir(exist_ok=True)
        with pytest.raises(RunError, match="cannot be written"):
            TracePage(str(path))


def test_a_text_that_ends_at_once_has_a_page(tmp_path):
    path = tmp_path / "t.html"
    TracePage(str(path)).trace(byte_generator(""), prompt("x"), 0, None)
    assert "ended by" in parsed(path).text


PROBE = """<script>
const found = {};
const rejected = document.querySelector('.text .rejected');
found.rejected = getComputedStyle(rejected).textDecorationLine;
rejected.dispatchEvent(new PointerEvent('pointerover', {bubbles: true, clientX: 50, clientY: 50}));
found.tip = document.getElementById('tip').textContent;
found.lit = document.querySelectorAll('.same').length;
document.querySelector('.show').click();
found.hidden = getComputedStyle(rejected).display;
found.background = getComputedStyle(document.body).backgroundColor;
found.wide = document.documentElement.scrollWidth <= innerWidth;
found.title = document.title;
document.body.innerHTML = '<pre id=found></pre>';
document.getElementById('found').textContent = JSON.stringify(found);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(evil_page, tmp_path, scheme):
    import json
    from html import unescape

    path = tmp_path / "probe.html"
    path.write_text(evil_page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--window-size=700,900", "--dump-dom",
        f"file://{path}",
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)[1]))
    assert found["rejected"] == "line-through" and found["hidden"] == "none"
    assert found["tip"].startswith("rejected draft\nround ") and "\ntarget " in found["tip"]
    assert found["lit"] > 1 and found["wide"]
    assert found["title"] == "Self-speculation trace"
    assert found["background"] == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")


def test_an_empty_page_is_html(tmp_path):
    path = tmp_path / "empty.html"
    path.write_text(page([]))
    parsed(path)
