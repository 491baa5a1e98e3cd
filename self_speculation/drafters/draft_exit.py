"""When to stop drafting: a threshold on the draft's own confidence, fixed or adapted to how drafts fare.

The confidence is the raw probability at temperature 1 of the token just drafted. The token that falls below the
threshold is kept and verified: dropping a token after it was sampled would bias what is sampled.
"""

from __future__ import annotations

from ..config import GenerationConfig


class DraftExit:
    """Stops a draft below a fixed threshold."""

    def __init__(self, threshold: float):
        self.threshold = threshold

    def start(self) -> None:
        """A new prompt begins."""

    def stops(self, confidence: float) -> bool:
        """Whether the draft ends with a token of this probability."""
        return confidence < self.threshold

    def observe(self, drafted: int, accepted: int, limit: int) -> None:
        """A round that the budget did not cut had this outcome; `limit` tokens might have been drafted."""


class AdaptiveDraftExit(DraftExit):
    """Moves the threshold g so that acceptance stays near a target (Draft & Verify, arXiv 2309.08168, section 3.3).

    m <- b1 m + (1 - b1) accepted / drafted;
    g~ = g + eps if m < alpha, else g if drafted == K, else g - eps;
    g <- b2 g + (1 - b2) g~.

    The rule `blog`, of a published rebuild, looks at drafted == K first and raises g where m <= alpha.
    """

    def __init__(self, *, alpha: float, eps: float, b1: float, b2: float, threshold: float, rule: str, carry: bool):
        super().__init__(threshold)
        self.alpha, self.eps, self.b1, self.b2 = alpha, eps, b1, b2
        self.first, self.rule, self.carry = threshold, rule, carry
        self.acceptance = 0.0

    def start(self) -> None:
        if not self.carry:
            self.threshold, self.acceptance = self.first, 0.0

    def observe(self, drafted: int, accepted: int, limit: int) -> None:
        self.acceptance = self.b1 * self.acceptance + (1 - self.b1) * accepted / drafted
        full = drafted == limit
        if self.rule == "blog":
            step = 0.0 if full else self.eps if self.acceptance <= self.alpha else -self.eps
        else:
            step = self.eps if self.acceptance < self.alpha else 0.0 if full else -self.eps
        self.threshold = self.b2 * self.threshold + (1 - self.b2) * (self.threshold + step)


def make_draft_exit(config: GenerationConfig) -> DraftExit | None:
    """The rule that `config` asks for, None when drafts always run to their full length."""
    if config.adaptive_draft_exit:
        return AdaptiveDraftExit(
            alpha=config.draft_exit_alpha,
            eps=config.draft_exit_eps,
            b1=config.draft_exit_b1,
            b2=config.draft_exit_b2,
            threshold=config.first_draft_exit_threshold(),
            rule=config.draft_exit_rule,
            carry=config.carry_draft_exit,
        )
    return DraftExit(config.draft_exit_threshold) if config.draft_exit_threshold is not None else None
