"""The training objective, as functions of tensors: blockwise denoising and auxiliary autoregressive supervision."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100


def exponential_weights(num_offsets: int, gamma: float) -> torch.Tensor:
    """`exp(-(j - 1) / gamma)` for the offsets j = 1 ... `num_offsets` of a block (DFlash, arXiv 2602.06036).

    Returns:
        `torch.Tensor` of shape `(num_offsets,)`.
    """
    return torch.exp(-torch.arange(num_offsets, dtype=torch.float32) / gamma)


def dpace_weights(confidence: torch.Tensor, supervised: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weights by what each offset adds to the expected accepted length (D-PACE, arXiv 2605.18810, equations 7 and 8).

    With smoothed confidences `q_i' = (1 - alpha) q_i + alpha`, the weight is `w_j = sum_{m >= j} prod_{i <= m} q_i'`.

    Args:
        confidence (`torch.Tensor` of shape `(..., num_offsets)`): The drafter's probabilities of the right tokens.
        supervised (`torch.BoolTensor` of the same shape): Which offsets count.
        alpha (`float`): Smoothing in [0, 1].

    Returns:
        `torch.Tensor` of the same shape, detached, 0 where not supervised.
    """
    smoothed = (1 - alpha) * confidence.detach() + alpha
    reached = smoothed.masked_fill(~supervised, 1.0).cumprod(dim=-1) * supervised
    return reached.flip(-1).cumsum(-1).flip(-1) * supervised


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of losses, 0 (with zero gradients) when no weight is positive.

    Args:
        losses (`torch.Tensor` of shape `(...)`): In nats, 0 where not supervised.
        weights (`torch.Tensor` of the same shape): Non-negative.
    """
    # The floor keeps 0 / 0 from becoming NaN and ruining the weights when nothing is supervised.
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


def block_loss(
    cross_entropy: torch.Tensor,
    kept: torch.Tensor,
    weighting: str = "exponential",
    gamma: float = 4.0,
    alpha: float = 0.5,
    divergence: torch.Tensor | None = None,
    divergence_weight: float = 0.0,
) -> torch.Tensor:
    """Loss of the mask rows of blocks: `(1 - divergence_weight)` cross-entropy and `divergence_weight` divergence.

    Args:
        cross_entropy (`torch.Tensor` of shape `(num_rows,)`): Of the kept mask rows, block after block, in nats.
        kept (`torch.BoolTensor` of shape `(num_blocks, num_offsets)`): Which mask rows there are; `num_rows` of them.
        weighting (`str`, *optional*, defaults to `"exponential"`): `"uniform"`, `"exponential"` or `"dpace"`.
        gamma (`float`, *optional*, defaults to 4.0): Decay of `"exponential"`, in offsets.
        alpha (`float`, *optional*, defaults to 0.5): Smoothing of `"dpace"`.
        divergence (`torch.Tensor` of shape `(num_rows,)`, *optional*): From the target, by [`teacher_divergence`].
        divergence_weight (`float`, *optional*, defaults to 0.0): Its share, in [0, 1].

    Returns:
        `torch.Tensor`: A scalar, 0 with zero gradients when nothing is kept.
    """

    def by_block(rows):
        return torch.zeros(kept.shape, device=kept.device).masked_scatter(kept, rows)

    weights = position_weights(by_block(cross_entropy), kept, weighting, gamma, alpha)
    loss = cross_entropy
    if divergence is not None:
        loss = torch.lerp(cross_entropy, divergence, divergence_weight)
    return weighted_mean(by_block(loss), weights)


def position_weights(
    cross_entropy: torch.Tensor, supervised: torch.Tensor, weighting: str, gamma: float, alpha: float
) -> torch.Tensor:
    """Weights of the offsets of blocks, of the shape `(num_blocks, num_offsets)` of both tensors.

    Raises:
        `ValueError`: If the weighting is not one of the three.
    """
    if weighting == "uniform":
        return supervised.float()
    if weighting == "exponential":
        return exponential_weights(supervised.shape[-1], gamma).to(supervised.device) * supervised
    if weighting == "dpace":
        return dpace_weights(torch.exp(-cross_entropy), supervised, alpha)
    raise ValueError(f"`weighting` is {weighting!r}; allowed are 'uniform', 'exponential' and 'dpace'.")


def teacher_divergence(
    log_probs: torch.Tensor, teacher_ids: torch.Tensor, teacher_log_probs: torch.Tensor
) -> torch.Tensor:
    """Kullback-Leibler divergence of a drafter's predictions from the target's likeliest tokens.

    The target's probabilities of its likeliest tokens are scaled to a sum of 1, as if there were no others.

    Args:
        log_probs (`torch.Tensor` of shape `(num_rows, vocab_size)`): The drafter's.
        teacher_ids (`torch.LongTensor` of shape `(num_rows, num_top)`): The target's likeliest tokens.
        teacher_log_probs (`torch.Tensor` of the same shape): The target's log-probabilities of them.

    Returns:
        `torch.Tensor` of shape `(num_rows,)`, in nats.
    """
    teacher = torch.log_softmax(teacher_log_probs.float(), dim=-1)
    return (teacher.exp() * (teacher - log_probs.gather(-1, teacher_ids))).sum(-1)


def row_losses(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor] | None = None,
    rows_per_chunk: int = 256,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cross-entropy of rows and, with a teacher, their divergence from it.

    The head runs on some rows at a time and again in the backward pass: memory never holds all rows times the vocabulary.

    Args:
        head (`Callable`): From hidden states `(num_rows, hidden_size)` to logits `(num_rows, vocab_size)`.
        hidden_states (`torch.Tensor` of shape `(num_rows, hidden_size)`): Of the rows.
        labels (`torch.LongTensor` of shape `(num_rows,)`): The tokens that they predict.
        teacher (`tuple`, *optional*): Token ids and log-probabilities as [`teacher_divergence`] takes them.
        rows_per_chunk (`int`, *optional*, defaults to 256): Rows at a time.

    Returns:
        `tuple` of `torch.Tensor` of shape `(num_rows,)`, float32, in nats; the second is `None` without a teacher.
    """

    def losses(hidden, labels, *teacher):
        log_probs = torch.log_softmax(head(hidden).float(), dim=-1)
        cross_entropy = nn.functional.nll_loss(log_probs, labels, reduction="none")
        return torch.stack([cross_entropy, *([teacher_divergence(log_probs, *teacher)] if teacher else [])])

    columns = [hidden_states, labels, *(teacher or ())]
    chunks = zip(*(column.split(rows_per_chunk) for column in columns), strict=True)
    parts = [checkpoint(losses, *chunk, use_reentrant=False) for chunk in chunks]
    cross_entropy, *divergence = torch.cat(parts, dim=1)
    return cross_entropy, divergence[0] if divergence else None


def top_log_probs(
    head: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, num_top: int, rows_per_chunk: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of rows, some rows at a time.

    Args:
        head (`Callable`): From hidden states to logits.
        hidden_states (`torch.Tensor` of shape `(num_rows, hidden_size)`): Of the rows.
        num_top (`int`): How many tokens, at most the vocabulary.
        rows_per_chunk (`int`, *optional*, defaults to 256): Rows at a time.

    Returns:
        `tuple`: Token ids and log-probabilities, both `(num_rows, num_top)`, the likeliest first.
    """
    ids, values = [], []
    for part in hidden_states.split(rows_per_chunk):
        logits = head(part).float()
        top = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
        ids.append(top.indices)
        values.append(top.values - logits.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(values)
