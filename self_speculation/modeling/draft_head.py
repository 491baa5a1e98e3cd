"""The model's head over part of its vocabulary, so that a draft step need not read all of a large matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..config import UsageError
from .backbone import Backbone
from .views import view_of

OUTSIDE = -3e4  # logit of tokens that the head does not score: drawn only where processors forbid all that it does


class DraftVocabulary:
    """Which tokens a draft's head scores: the most frequent ones and those of the text.

    Of the places 0 to N-1 the first half is kept. In the other, which holds the rarest at first, tokens of the text
    that have no place yet take one in turn, from the last on.

    Attributes:
        ids: the tokens, by place.
    """

    def __init__(self, ranked: Sequence[int]):
        self.ranked = self.ids = list(ranked)
        self.start()

    def start(self) -> set[int]:
        """A new text begins. Returns the places whose tokens change."""
        changed = {place for place, (old, new) in enumerate(zip(self.ids, self.ranked, strict=True)) if old != new}
        self.ids, self.known = list(self.ranked), set(self.ranked)
        self.next, self.seen = len(self.ids) - 1, 0
        return changed

    def follow(self, tokens: Sequence[int]) -> set[int]:
        """Let the tokens of a text in, which goes on from what it was at the last call; as `start`."""
        changed = set()
        for token in tokens[self.seen :]:
            if token not in self.known:
                self.known.remove(self.ids[self.next])
                self.known.add(token)
                self.ids[self.next] = token
                changed.add(self.next)
                self.next = self.next - 1 if self.next > len(self.ids) // 2 else len(self.ids) - 1
        self.seen = len(tokens)
        return changed


class DraftHead:
    """The model's final norm and head over part of the vocabulary (FR-Spec, arXiv 2502.14856), or over all of it.

    FR-Spec's part is fixed; this one may `follow` a text.

    Args:
        token_ids: the part, most frequent first; None for all.

    Raises:
        UsageError: the head is no matrix of floating-point numbers that lies in memory as a whole.
    """

    def __init__(self, backbone: Backbone, token_ids: torch.Tensor | None):
        self.backbone, self.vocab_size = backbone, backbone.config.vocab_size
        self.view: Any = backbone.head_view
        self.vocabulary: DraftVocabulary | None = None
        self.token_ids = token_ids
        self.rows: dict[str, nn.Parameter] = {}  # of the model's head: weight [N, H] and, where there is one, bias [N]
        if token_ids is not None:
            head = _matrix(backbone, len(token_ids))
            self.vocabulary = DraftVocabulary(token_ids.tolist())
            self.token_ids = token_ids.to(head.weight.device, torch.long, copy=True)
            self.part, self.view = _view(backbone, head, len(token_ids))
            for name, values in head.named_parameters():
                self.rows[name] = nn.Parameter(values.detach()[self.token_ids], requires_grad=False)

    @property
    def size(self) -> int | None:
        """How many tokens it scores, None for all."""
        return None if self.token_ids is None else len(self.token_ids)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, n, H] -> logits [B, n, part of the vocabulary]."""
        if self.rows:
            self.part._parameters.update(self.rows)
        return self.backbone.head(hidden, self.view)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, n, H] -> logits [n, vocabulary], `OUTSIDE` for tokens outside the part."""
        logits = self(hidden)[0]
        if self.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), OUTSIDE)
        return whole.index_copy_(1, self.token_ids.to(logits.device), logits)

    def start(self) -> None:
        """Forget the text that was followed."""
        if self.vocabulary is not None:
            self._fill(self.vocabulary.start())

    def follow(self, tokens: Sequence[int]) -> None:
        """Let the tokens of a text in, as `DraftVocabulary.follow`."""
        if self.vocabulary is not None:
            self._fill(self.vocabulary.follow(tokens))

    def _fill(self, changed: set[int]) -> None:
        """Copy what stands in these places now from the model's head."""
        if not changed:
            return
        assert self.vocabulary is not None and self.token_ids is not None
        head, device = self.backbone.model.get_output_embeddings(), self.token_ids.device
        places = sorted(changed)
        at = torch.tensor(places, device=device)
        ids = torch.tensor([self.vocabulary.ids[place] for place in places], device=device)
        self.token_ids[at] = ids
        for name, values in self.rows.items():
            values[at] = getattr(head, name).detach()[ids]


class _Part(nn.Linear):
    """Some rows of the model's head. Like the head, it may be asked from another device."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(self.weight.device))


def _view(backbone: Backbone, head: nn.Linear, size: int) -> tuple[_Part, Any]:
    """A matrix of `size` rows and a view of the model with it for a head, shared by all heads of that size, so that it
    is compiled once; each puts in rows of its own."""
    if size not in backbone.draft_views:
        part = _Part(head.in_features, size, bias=head.bias is not None, device="meta")
        name = next(name for name, child in backbone.model.named_children() if child is head)
        backbone.draft_views[size] = part, view_of(backbone.head_view, **{name: part})
    return backbone.draft_views[size]


def _matrix(backbone: Backbone, size: int) -> nn.Linear:
    """The model's head, if rows can be taken from it."""
    head = backbone.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(head, nn.Linear) or weight is None or not weight.is_floating_point():
        raise UsageError(f"--draft_vocabulary {size}: the head of this model is not a plain matrix (quantised?)")
    if weight.is_meta or len(weight) != backbone.config.vocab_size:
        raise UsageError(f"--draft_vocabulary {size}: --device_map or --tp has put the head out of memory or apart")
    return head
