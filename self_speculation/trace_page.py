"""Traces as one self-contained page of HTML: tokens by what became of them, figures, and a timeline of the rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .config import RunError, require
from .decoding import Decoded, Observer
from .files import one_line_errors, replacing
from .generation import Generator
from .stats import Stats
from .tracing import KINDS, Observers, Trace, TracedSampler, TracedToken

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_WIDTH, _UP, _DOWN = 1000, 60, 30  # of the timeline: pixels across, above and below the line


class TracePage:
    """The page at `path`, written anew after every answer, whole or not at all.

    Raises:
        UsageError: `path` does not end in .html.
        RunError: it cannot be written.
    """

    def __init__(self, path: str):
        require(path.endswith((".html", ".htm")), "trace", path, "the page is HTML; give a name that ends in .html")
        self.path = Path(path)
        if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise RunError(f"--trace {path}: cannot be written; give a file in a folder that exists")
        self.sections: list[str] = []

    def trace(self, generator: Generator, prompt: list[int], sample_id: int, observer: Observer | None) -> Decoded:
        """Let `generator` answer a prompt and add the answer to the page; `observer` is told what it does too."""
        loaded = generator.loaded
        trace = Trace(loaded.tokenizer, loaded.model.device)
        sampler: Any = generator.sampler(sample_id, TracedSampler)
        sampler.trace = trace
        observers = Observers([trace] if observer is None else [trace, observer])
        decoded = generator(prompt, sample_id=sample_id, observer=observers, sampler=sampler)
        title = f"Prompt {sample_id}: {strategy(generator)}, {loaded.name}"
        self.add(title, str(loaded.tokenizer.decode(prompt)), trace, decoded.stats, decoded.stop_reason)
        return decoded

    def add(self, title: str, prompt: str, trace: Trace, stats: Stats, end: str) -> None:
        """Add one answer; `end` says what ended it."""
        self.sections.append(section(title, prompt, trace, stats, end))
        with one_line_errors(f"--trace {self.path}"), replacing(self.path) as file:
            file.write(page(self.sections))


def strategy(generator: Generator) -> str:
    """How it decodes, in a few words."""
    config = generator.config
    words = [config.generation_strategy]
    words += [config.drafter] if config.drafter else []
    words += [f"exit layer {config.exit_layer}"] if config.exit_layer > 0 else []
    words += [f"up to {config.num_speculations} drafts a round"] if config.num_speculations > 0 else []
    words.append("greedy" if config.greedy else f"temperature {config.temperature}")
    return ", ".join([*words, generator.loaded.model.dtype_name])


def page(sections: Sequence[str]) -> str:
    """A whole page; its policy forbids the browser to ask for anything."""
    return _PAGE.replace("@STYLE", _STYLE).replace("@SCRIPT", _SCRIPT).replace("@BODY", "\n".join(sections))


def section(title: str, prompt: str, trace: Trace, stats: Stats, end: str) -> str:
    """One answer."""
    tiles = [("tokens", str(stats.new_tokens)), ("rounds", str(len(stats.rounds)))]
    if stats.acceptance_rate is not None:
        tiles.append(("drafts accepted", f"{stats.accepted} of {stats.drafted} · {stats.acceptance_rate:.1%}"))
    if stats.tokens_per_round is not None:
        tiles.append(("tokens/round", f"{stats.tokens_per_round:.2f}"))
    if stats.tokens_per_second is not None:
        tiles.append(("tokens/s, traced", f"{stats.tokens_per_second:.1f}"))
    tiles += [("prefill", _seconds(stats.prefill_s)), ("decoding", _seconds(stats.decode_s)), ("ended by", end)]
    kinds = [kind for kind in KINDS if any(token.kind == kind for token in trace.tokens)]
    return "\n".join(
        [
            "<section>",
            f"<h2>{_text(title)}</h2>",
            "<dl class=tiles>",
            *(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in tiles),
            "</dl>",
            f"<details><summary>prompt, {stats.prompt_tokens} tokens</summary><pre>{_text(prompt)}</pre></details>",
            "<p class=legend>",
            *(f'<span class="t {kind}" title="{KINDS[kind]}">{kind}</span>' for kind in kinds),
            "<label><input type=checkbox class=show checked> show rejected drafts</label>" * ("rejected" in kinds),
            "</p>",
            f"<pre class=text>{''.join(map(_token, trace.tokens))}</pre>",
            _depths(trace.by_depth()),
            _timeline(trace),
            "</section>",
        ]
    )


def _token(token: TracedToken) -> str:
    known = {"d": token.depth, "q": _share(token.draft_probability), "p": _share(token.target_probability)}
    data = "".join(f' data-{name}="{value}"' for name, value in known.items() if value is not None)
    outside = token.kind in ("rejected", "discarded")
    text = _text(token.text).replace("\n", "<i>⏎</i>" if outside else "<i>⏎</i>\n")
    return (
        f'<span class="t {token.kind}" data-k={token.kind} data-r={token.round} data-i={token.id}{data}>{text}</span>'
    )


def _depths(rows: Sequence[tuple[int, int]]) -> str:
    """Acceptance by depth, as bars."""
    if not rows:
        return ""
    cells = "".join(
        f"<tr><th>{depth}</th><td class=bar><span style='width:{accepted / drafted:.1%}'></span></td>"
        f"<td>{accepted / drafted:.0%}</td><td>{accepted} of {drafted}</td></tr>"
        for depth, (drafted, accepted) in enumerate(rows, 1)
    )
    return (
        "<h3>Acceptance by place in the draft</h3>\n"
        f"<table><tr><th>place</th><th></th><th></th><th>accepted</th></tr>{cells}</table>"
    )


def _timeline(trace: Trace) -> str:
    """Rounds from left to right, as wide as they took: tokens gained above the line, drafts rejected below it, and
    drafting and verifying under both."""
    rounds = trace.rounds
    if not rounds:
        return ""
    total = max(each.start_s + each.draft_s + each.verify_s for each in rounds) or 1.0
    across = _WIDTH / total
    up = _UP / max(1, *(each.new_tokens for each in rounds))
    down = _DOWN / max(1, *(each.drafted - each.accepted for each in rounds))
    line, lane, bottom = _UP + 4, _UP + _DOWN + 12, _UP + _DOWN + 28
    parts = []
    for number, each in enumerate(rounds, 1):
        x, draft, verify = each.start_s * across, each.draft_s * across, each.verify_s * across
        width = max(0.8, draft + verify - 0.6)
        gained = min(each.accepted, each.new_tokens)
        own, lost = each.new_tokens - gained, each.drafted - each.accepted
        parts.append(
            f"<g data-k=round data-r={number} data-a='{each.accepted} of {each.drafted}' data-n={each.new_tokens} "
            f"data-q='{_seconds(each.draft_s)}' data-p='{_seconds(each.verify_s)}'>"
            + _box("accepted", x, line - gained * up, width, gained * up)
            + _box("own", x, line - (gained + own) * up, width, own * up)
            + _box("rejected", x, line, width, lost * down)
            + _box("draft", x, lane, draft, 14)
            + _box("verify", x + draft, lane, max(0.5, verify - 0.4), 14)
            + "</g>"
        )
    ticks = "".join(
        f"<line x1={share * _WIDTH} x2={share * _WIDTH} y1=0 y2={bottom} /><text x={share * _WIDTH} y={bottom + 14} "
        f"text-anchor={anchor}>{_seconds(share * total)}</text>"
        for share, anchor in ((0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1, "end"))
    )
    sums = sum(each.draft_s for each in rounds), sum(each.verify_s for each in rounds)
    return (
        "<h3>Rounds</h3>\n<p class=legend><span class='key accepted'></span>drafts accepted"
        "<span class='key own'></span>the target's own token<span class='key rejected'></span>drafts rejected"
        f"<span class='key draft'></span>drafting, {_seconds(sums[0])}"
        f"<span class='key verify'></span>verifying, {_seconds(sums[1])}</p>\n"
        f"<svg viewBox='0 0 {_WIDTH} {bottom + 18}' role=img aria-label='timeline of {len(rounds)} rounds'>{ticks}"
        f"<line class=axis x1=0 x2={_WIDTH} y1={line} y2={line} />{''.join(parts)}</svg>"
    )


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    if height <= 0 or width <= 0:
        return ""
    return f"<rect class={kind} x={x:.1f} y={y:.1f} width={width:.1f} height={height:.1f} />"


def _text(text: str) -> str:
    """Text in HTML, control characters as the symbols that stand for them."""
    return escape(text.translate(_CONTROLS))


def _share(probability: float | None) -> str | None:
    return None if probability is None else f"{probability:.4f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else "0" if not seconds else f"{seconds * 1000:.1f} ms"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Self-speculation trace</title>
<style>@STYLE</style>
</head>
<body>
<h1>Self-speculation trace</h1>
<p class=note>Point at a token or a round: round, place in the draft, and the probability that draft and target gave the
token. Tracing takes some time of its own, so take speeds from a run without it.</p>
@BODY
<div id=tip hidden></div>
<script>@SCRIPT</script>
</body>
</html>
"""

_STYLE = """
:root { --page:#fff; --ink:#1c2330; --dim:#5d6778; --edge:#dfe3ea; --panel:#f6f7f9; --accepted:#cdeed7;
  --rejected:#b3261e; --correction:#ffddb0; --bonus:#cfe1ff; --prefill:#e5dcfa; --target:#e9ecf1; --green:#2f9e57;
  --red:#d9534f; --blue:#3b7ddd; --draft:#8c6bd8; --verify:#e0992f; }
@media (prefers-color-scheme: dark) { :root { --page:#14171c; --ink:#e4e8ee; --dim:#97a1b1; --edge:#2c323c;
  --panel:#1c2027; --accepted:#1d4a2e; --rejected:#ff8f86; --correction:#664313; --bonus:#1f3f6e; --prefill:#43356b;
  --target:#2b313b; --green:#4dbb75; --red:#e0635d; --blue:#5b9bf5; --draft:#a58be8; --verify:#e9ae52; } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1100px; padding:24px 20px 60px; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif }
h1 { font-size:22px; margin:0 } h2 { font-size:17px; margin:0 0 12px } h3 { font-size:14px; margin:22px 0 6px }
.note { color:var(--dim); margin:4px 0 20px; max-width:75ch }
section { border-top:1px solid var(--edge); padding-top:18px; margin-top:26px }
.tiles { display:flex; flex-wrap:wrap; gap:8px; margin:0 0 12px }
.tiles div { background:var(--panel); border:1px solid var(--edge); border-radius:8px; padding:6px 12px }
dt { color:var(--dim); font-size:12px } dd { margin:0; font-weight:600; font-variant-numeric:tabular-nums }
details { margin-bottom:10px } summary { cursor:pointer; color:var(--dim) }
pre { font:14px/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space:pre-wrap;
  overflow-wrap:anywhere; background:var(--panel); border:1px solid var(--edge); border-radius:8px; padding:12px 14px;
  margin:6px 0; tab-size:4 }
.legend { display:flex; flex-wrap:wrap; align-items:center; gap:8px; margin:6px 0; font-size:13px }
.legend label { margin-left:auto; cursor:pointer }
.legend .t { padding:1px 7px }
.t { border-radius:3px; padding:1px 0; box-shadow:inset -1px 0 0 var(--panel) }
.t i { font-style:normal; opacity:.45 } :is(.rejected, .discarded) i { opacity:1 }
.accepted { background:var(--accepted) } .correction { background:var(--correction); font-weight:700 }
.bonus { background:var(--bonus) } .prefill { background:var(--prefill) } .target { background:var(--target) }
.rejected, .discarded { color:var(--rejected); text-decoration:line-through; text-decoration-thickness:1.5px }
.discarded { opacity:.6 }
section:has(.show:not(:checked)) .text :is(.rejected, .discarded) { display:none }
.same { outline:1px solid var(--dim) } .text .t:hover { outline:2px solid var(--ink) }
table { border-collapse:collapse; font-size:13px; font-variant-numeric:tabular-nums }
th { font-weight:400; color:var(--dim); text-align:left; padding-right:12px } td { padding:1px 12px 1px 0 }
.bar { width:220px; padding-right:12px }
.bar span { display:block; height:12px; background:var(--green); border-radius:2px }
.key { width:12px; height:12px; border-radius:2px; margin-left:10px } .key:first-child { margin-left:0 }
.key.accepted, rect.accepted { background:var(--green); fill:var(--green) }
.key.own, rect.own { background:var(--blue); fill:var(--blue) }
.key.rejected, rect.rejected { background:var(--red); fill:var(--red); opacity:1 }
.key.draft, rect.draft { background:var(--draft); fill:var(--draft) }
.key.verify, rect.verify { background:var(--verify); fill:var(--verify) }
svg { width:100%; height:auto; display:block } svg line { stroke:var(--edge) } svg .axis { stroke:var(--dim) }
svg text { fill:var(--dim); font:11px system-ui, sans-serif } g.same { outline:none } g.same rect { stroke:var(--ink) }
#tip { position:fixed; z-index:1; pointer-events:none; background:var(--ink); color:var(--page); border-radius:6px;
  padding:7px 10px; font-size:13px; line-height:1.45; white-space:pre; font-variant-numeric:tabular-nums }
"""

_SCRIPT = """
'use strict';
const tip = document.getElementById('tip');
const meaning = {prefill: 'from the prompt', accepted: 'accepted draft', rejected: 'rejected draft',
  discarded: 'draft after a rejected one', correction: 'correction by the target', bonus: 'bonus of the target',
  target: 'the target, nothing drafted'};
let lit = [];
function lines(d) {
  if (d.k === 'round') return [`round ${d.r}`, `drafts accepted   ${d.a}`, `tokens gained     ${d.n}`,
    `drafting          ${d.q}`, `verifying         ${d.p}`];
  const found = [meaning[d.k], `round ${d.r}` + (d.d ? `, place ${d.d}` : '') + `, token ${d.i}`];
  if (d.q) found.push(`draft   ${d.q}`);
  if (d.p) found.push(`target  ${d.p}`);
  return found;
}
function show(event) {
  for (const each of lit) each.classList.remove('same');
  lit = [];
  const at = event.target.closest('[data-k]');
  tip.hidden = !at;
  if (!at) return;
  tip.textContent = lines(at.dataset).join('\\n');
  const box = at.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = Math.max(4, Math.min(event.clientX - 20, innerWidth - size.width - 8)) + 'px';
  tip.style.top = (below ? box.bottom + 6 : box.top - size.height - 6) + 'px';
  lit = [...at.closest('section').querySelectorAll(`[data-r="${at.dataset.r}"]`)];
  for (const each of lit) each.classList.add('same');
}
document.addEventListener('pointerover', show);
document.addEventListener('click', show);
addEventListener('scroll', () => { tip.hidden = true; });
"""
