"""What is streamed is the text that is returned, for every streamer, stop and drafter."""

import io
import random
import re

import pytest

from self_speculation.config import STREAMERS
from self_speculation.streaming import (
    BOLD,
    GREEN,
    RED_STRUCK,
    RESET,
    SpeculativeStreamer,
    StandardStreamer,
    make_streamer,
)
from tests.test_stopping import byte_generator, prompt


class Watched(io.StringIO):
    """Remembers every piece that was written."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def without_marks(shown: str) -> str:
    """What remains of a coloured stream when rejected drafts are taken out."""
    shown = re.sub(re.escape(RED_STRUCK) + ".*?" + re.escape(RESET), "", shown, flags=re.S)
    for code in (GREEN, BOLD, RESET):
        shown = shown.replace(code, "")
    return shown


def streamed(generator, kind):
    file = Watched()
    streamer = StandardStreamer(file) if kind == "standard" else SpeculativeStreamer(file, colour=True)
    decoded = generator(prompt("x"), observer=streamer)
    return without_marks(file.getvalue()), decoded, file


TEXTS = ("plain words and more", "naïve café ☕ 𝄞𝄞 end", "aaaaaab aab", "stop sto stop!", "\n\nafter\n", "")


@pytest.mark.parametrize("kind", ("standard", "speculative"))
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_returned_text(kind, text):
    """Case: LayerSkip's standard streamer went past the stop. Drafts are right, wrong, or right for a while."""
    drafts = (text, text[:5] + "zzzzzzzzzz", "☕" * 12, text[:3])
    stops = (None, ["stop!"], ["aab"], ["☕ 𝄞"], ["zzz", "end"], ["\n\n"], ["and m", "d more"])
    for number, draft in enumerate(drafts):
        for stop in stops:
            for budget in (1, 3, 7, 200):
                generator = byte_generator(text, draft, num_speculations=number + 2, stop_words=stop, max_steps=budget)
                shown, decoded, _ = streamed(generator, kind)
                assert shown == decoded.text + "\n"


def test_random_bytes_and_stops():
    """Texts cut anywhere, so that bytes that are no text occur too."""
    rng = random.Random(1)
    for _ in range(150):
        text = "".join(rng.choices("abé☕𝄞 \n", k=rng.randint(0, 12)))
        draft = "".join(rng.choice((c, "ü", "b")) for c in text)
        stops = ["".join(rng.choices("abé☕", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
        generator = byte_generator(
            text, draft, num_speculations=rng.randint(1, 7), stop_words=stops or None, max_steps=rng.randint(1, 40)
        )
        for kind in ("standard", "speculative"):
            shown, decoded, _ = streamed(generator, kind)
            assert shown == decoded.text + "\n", (text, draft, stops)


def test_a_character_is_shown_when_its_last_byte_has_come():
    _, _, file = streamed(byte_generator("a☕b", num_speculations=1, draft="zzzz"), "standard")
    assert "".join(file.pieces) == "a☕b\n" and not any("�" in piece for piece in file.pieces)
    assert file.pieces[0] == "a" and "☕" in file.pieces


def test_what_may_become_a_stop_string_is_held_back():
    _, _, file = streamed(byte_generator("abSTxy", "z" * 9, num_speculations=1, stop_words=["STOP"]), "standard")
    assert [piece for piece in file.pieces if piece] == ["a", "b", "STx", "y", "\n"]


def test_the_speculative_streamer_without_a_terminal_marks_as_word_diff_does():
    file = io.StringIO()
    generator = byte_generator("abcdef", "abcxyz", num_speculations=4)
    generator(prompt("x"), observer=SpeculativeStreamer(file))
    assert file.getvalue() == "{+a+}bc[-xy-]{+d+}[-yz-]{+e+}[-z-]{+f+}\n"
    assert re.sub(r"\[-.*?-\]|\{\+|\+\}", "", file.getvalue()) == "abcdef\n"


def test_every_streamer_can_be_made():
    made = {name: make_streamer(name) for name in STREAMERS}
    assert made["none"] is None
    assert type(made["standard"]) is StandardStreamer and type(made["speculative"]) is SpeculativeStreamer


def test_a_streamer_serves_prompt_after_prompt():
    file = io.StringIO()
    streamer = StandardStreamer(file)
    for text in ("first", "second ☕", ""):
        byte_generator(text)(prompt("x"), observer=streamer)
    assert file.getvalue() == "first\nsecond ☕\n\n"
