"""The training objective, as functions of tensors: blockwise denoising and auxiliary autoregressive supervision."""

import torch
from torch import nn

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


def weighted_cross_entropy(cross_entropy: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of cross-entropies, 0 (with zero gradients) when no weight is positive.

    Args:
        cross_entropy (`torch.Tensor` of shape `(...)`): In nats, 0 where not supervised.
        weights (`torch.Tensor` of the same shape): Non-negative.
    """
    # The floor keeps 0 / 0 from becoming NaN and ruining the weights when nothing is supervised.
    return (cross_entropy * weights).sum() / weights.sum().clamp(min=1e-6)


def block_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    kept: torch.Tensor,
    weighting: str = "exponential",
    gamma: float = 4.0,
    alpha: float = 0.5,
) -> torch.Tensor:
    """Loss of the mask rows of blocks.

    Args:
        logits (`torch.Tensor` of shape `(num_rows, vocab_size)`): Predictions of the kept mask rows, block after block.
        labels (`torch.LongTensor` of shape `(num_blocks, num_offsets)`): The tokens to predict.
        kept (`torch.BoolTensor` of the same shape): Which mask rows there are; `num_rows` of them.
        weighting (`str`, *optional*, defaults to `"exponential"`): `"uniform"`, `"exponential"` or `"dpace"`.
        gamma (`float`, *optional*, defaults to 4.0): Decay of `"exponential"`, in offsets.
        alpha (`float`, *optional*, defaults to 0.5): Smoothing of `"dpace"`.

    Returns:
        `torch.Tensor`: A scalar.
    """
    cross_entropy = nn.functional.cross_entropy(logits.float(), labels[kept], reduction="none")
    cross_entropy = torch.zeros(labels.shape, device=labels.device).masked_scatter(kept, cross_entropy)
    return weighted_cross_entropy(cross_entropy, position_weights(cross_entropy, kept, weighting, gamma, alpha))


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


def autoregressive_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of supervised clean rows, 0 when there are none.

    Args:
        logits (`torch.Tensor` of shape `(num_rows, vocab_size)`): Predictions of the next tokens.
        labels (`torch.LongTensor` of shape `(num_rows,)`): The next tokens.
    """
    cross_entropy = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return weighted_cross_entropy(cross_entropy, torch.ones_like(cross_entropy))
