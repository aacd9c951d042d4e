"""Which outcomes of a verification to prepare for, and how well the drafter's beliefs predict them.

An outcome is (n, b): n draft tokens are kept, and the token b follows. Knows probabilities; knows nothing about models.
"""

import torch


def likeliest_outcomes(log_probs: torch.Tensor, draft: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The outcomes of a verification that the drafter believes in most.

    With the drafter's distributions q, the chance that exactly the first n drafts are kept and b follows is
    `P(n, b) = q_1(d_1) ... q_n(d_n) q_{n+1}(b)`, where b is not the next draft; behind the last draft it is any token.

    Args:
        log_probs (`torch.Tensor` of shape `(num_draft_tokens + 1, vocab_size)`):
            Logarithms of the distributions at the offsets of the draft, and of the one behind it (the look-ahead).
        draft (`torch.LongTensor` of shape `(num_draft_tokens,)`): The draft.
        count (`int`): Outcomes to choose.

    Returns:
        `tuple`: `outcomes`, a `torch.LongTensor` of shape `(num_outcomes, 2)` of rows (n, b), the likeliest first, and
        their `log_probs`, `(num_outcomes,)`. Fewer than `count` only where the vocabulary is that small.
    """
    num_drafts = len(draft)
    reached = torch.cat([log_probs.new_zeros(1), log_probs[:num_drafts].gather(1, draft[:, None])[:, 0].cumsum(0)])
    # No row can fill more than all places, so the best `count` of each row are enough.
    scores, tokens = _without_drafts(log_probs, draft).topk(min(count, log_probs.shape[1]), dim=1)
    scores = scores + reached[:, None]
    best = scores.flatten().topk(min(count, scores.numel()))
    kept = torch.isfinite(best.values)
    chosen = best.indices[kept]
    outcomes = torch.stack([chosen // scores.shape[1], tokens.flatten()[chosen]], dim=1)
    return outcomes, best.values[kept]


def fan_out_outcomes(
    log_probs: torch.Tensor, draft: torch.Tensor, count: int, acceptance: float = 0.74, decay: float = 0.6
) -> torch.Tensor:
    """Outcomes by a geometric fan-out over the number of kept drafts, for comparison (SSD, arXiv 2603.03251).

    Behind n kept drafts, the `F_n` likeliest tokens other than the next draft, with `F_n` proportional to
    `acceptance ** (n / (1 + decay))`, rounded so that `count` are chosen.

    Args:
        log_probs, draft, count: As in [`likeliest_outcomes`].
        acceptance (`float`, *optional*, defaults to 0.74): Chance that a draft token is kept.
        decay (`float`, *optional*, defaults to 0.6): Exponent of how the hit rate falls with the fan-out.

    Returns:
        `torch.LongTensor` of shape `(num_outcomes, 2)`: Rows (n, b).
    """
    num_rows = len(draft) + 1
    share = acceptance ** (torch.arange(num_rows, dtype=torch.float64) / (1 + decay))
    wanted = share / share.sum() * count
    fan_out = wanted.floor().long()
    for n in (wanted - fan_out).argsort(descending=True)[: count - int(fan_out.sum())]:
        fan_out[n] += 1
    masked = _without_drafts(log_probs, draft)
    rows = []
    for n, number in enumerate(fan_out.tolist()):
        best = masked[n].topk(min(number, masked.shape[1]))
        tokens = best.indices[torch.isfinite(best.values)]
        rows.append(torch.stack([torch.full_like(tokens, n), tokens], dim=1))
    return torch.cat(rows)


def _without_drafts(log_probs: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """The log-probabilities with each draft token ruled out at its own offset: it follows only if it is kept."""
    masked = log_probs.clone()
    masked[: len(draft)].scatter_(1, draft[:, None], float("-inf"))
    return masked


def find_outcome(outcomes: torch.Tensor, num_kept: int, bonus: int) -> int | None:
    """Index of the outcome (n, b) that came true, `None` when it was not prepared.

    Args:
        outcomes (`torch.LongTensor` of shape `(num_outcomes, 2)`): Rows (n, b).
        num_kept (`int`): Draft tokens kept.
        bonus (`int`): The token that followed.
    """
    found = ((outcomes[:, 0] == num_kept) & (outcomes[:, 1] == bonus)).nonzero()
    return int(found[0]) if len(found) else None


class Calibration:
    """A temperature that fits the drafter's beliefs to what the target then says, one round at a time.

    A drafter is often surer than it is right, the more so at later offsets. Minimises the negative log-likelihood of the
    tokens observed at offsets 1 ... n + 1 of each round, by a Newton step on the inverse temperature.

    Args:
        inverse_temperature (`float`, *optional*, defaults to 1.0): Where to start.
        memory (`float`, *optional*, defaults to 0.95): Weight of the past after each round, in [0, 1).
    """

    def __init__(self, inverse_temperature: float = 1.0, memory: float = 0.95):
        self.inverse_temperature = inverse_temperature
        self.memory = memory
        # Worth some rounds at the start, so that the first outcomes move little.
        self.curvature = 20.0

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Calibrated log-probabilities of logits `(..., vocab_size)`."""
        return (logits * self.inverse_temperature).log_softmax(dim=-1)

    def update(self, logits: torch.Tensor, observed: torch.Tensor) -> None:
        """Takes in a round.

        Args:
            logits (`torch.Tensor` of shape `(num_offsets, vocab_size)`): The drafter's, at the offsets observed.
            observed (`torch.LongTensor` of shape `(num_offsets,)`): The tokens that the target settled there.
        """
        probs = self.log_probs(logits).exp()
        # Logits that a processor ruled out carry no probability and no slope.
        logits = logits.masked_fill(torch.isinf(logits), 0.0)
        mean = (probs * logits).sum(-1)
        slope = (mean - logits.gather(1, observed[:, None])[:, 0]).sum()
        curvature = ((probs * logits.square()).sum(-1) - mean.square()).sum()
        self.curvature = self.memory * self.curvature + float(curvature)
        step = float(slope) / max(self.curvature, 1e-6)
        self.inverse_temperature = min(max(self.inverse_temperature - step, 0.05), 5.0)
