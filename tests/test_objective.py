"""The objective against naive twins, and what happens when nothing is supervised."""

import math

import pytest
import torch

from transformers_d3d.objective import (
    IGNORE,
    autoregressive_loss,
    block_loss,
    dpace_weights,
    exponential_weights,
    weighted_cross_entropy,
)

NUM_BLOCKS, NUM_OFFSETS, VOCAB = 6, 4, 11
WEIGHTINGS = ["uniform", "exponential", "dpace"]


@pytest.fixture
def batch():
    """Logits of the kept rows, labels, and which rows are kept: all, beginnings, and none at all."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCAB, (NUM_BLOCKS, NUM_OFFSETS), generator=generator)
    kept = torch.arange(NUM_OFFSETS) < torch.tensor([4, 0, 2, 3, 1, 4])[:, None]
    labels = labels.masked_fill(~kept, IGNORE)
    logits = torch.randn(int(kept.sum()), VOCAB, generator=generator) * 3
    return logits.requires_grad_(), labels, kept


def naive_dpace(confidence, supervised, alpha):
    weights = []
    for j in range(len(confidence)):
        total = 0.0
        for m in range(j, len(confidence)):
            if supervised[m]:
                total += math.prod((1 - alpha) * confidence[i] + alpha for i in range(m + 1) if supervised[i])
        weights.append(total if supervised[j] else 0.0)
    return weights


def naive_block_loss(logits, labels, kept, weighting, gamma, alpha):
    total, norm, row = 0.0, 0.0, 0
    for block in range(len(labels)):
        losses = []
        for offset in range(labels.shape[1]):
            if kept[block, offset]:
                losses.append(-torch.log_softmax(logits[row], -1)[labels[block, offset]].item())
                row += 1
            else:
                losses.append(0.0)
        if weighting == "uniform":
            weights = [1.0] * len(losses)
        elif weighting == "exponential":
            weights = [math.exp(-j / gamma) for j in range(len(losses))]
        else:
            weights = naive_dpace([math.exp(-loss) for loss in losses], kept[block].tolist(), alpha)
        for offset, (loss, weight) in enumerate(zip(losses, weights, strict=True)):
            if kept[block, offset]:
                total, norm = total + weight * loss, norm + weight
    return total / norm


@pytest.mark.parametrize("gamma", [1.0, 4.0, 100.0])
def test_exponential_weights(gamma):
    assert exponential_weights(5, gamma).tolist() == pytest.approx([math.exp(-j / gamma) for j in range(5)])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_the_naive_twin(alpha):
    confidence = torch.rand(20, 6, generator=torch.Generator().manual_seed(1))
    supervised = torch.rand(20, 6, generator=torch.Generator().manual_seed(2)) < 0.7
    weights = dpace_weights(confidence.requires_grad_(), supervised, alpha)
    assert not weights.requires_grad
    expected = [naive_dpace(c, s, alpha) for c, s in zip(confidence.tolist(), supervised.tolist(), strict=True)]
    assert torch.allclose(weights, torch.tensor(expected), atol=1e-6)


def test_dpace_weights_by_hand():
    weights = dpace_weights(torch.tensor([0.5, 0.5, 0.2]), torch.tensor([True, True, False]), alpha=0.0)
    assert weights.tolist() == pytest.approx([0.75, 0.25, 0.0])


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_block_loss_equals_the_naive_twin(batch, weighting):
    logits, labels, kept = batch
    loss = block_loss(logits, labels, kept, weighting, gamma=2.0, alpha=0.3)
    assert loss.item() == pytest.approx(naive_block_loss(logits, labels, kept, weighting, 2.0, 0.3), rel=1e-5)
    loss.backward()
    assert (logits.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_block_loss_is_that_of_float32_for_bfloat16_logits(batch, weighting):
    logits, labels, kept = batch
    half = logits.detach().bfloat16()
    loss = block_loss(half, labels, kept, weighting)
    assert loss.dtype == torch.float32
    assert loss.item() == block_loss(half.float(), labels, kept, weighting).item()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("num_blocks", [0, 3], ids=["no-blocks", "no-rows"])
def test_nothing_supervised_is_zero_with_zero_gradients(weighting, num_blocks):
    weight = torch.ones(5, VOCAB, requires_grad=True)
    logits = torch.zeros(0, 5) @ weight
    labels = torch.full((num_blocks, NUM_OFFSETS), IGNORE)
    loss = block_loss(logits, labels, labels != IGNORE, weighting)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_autoregressive_loss_equals_the_naive_twin():
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(9)
    naive = -sum(torch.log_softmax(row, -1)[label].item() for row, label in zip(logits, labels, strict=True)) / 9
    assert autoregressive_loss(logits, labels).item() == pytest.approx(naive, rel=1e-5)


def test_autoregressive_loss_of_nothing_is_zero_with_zero_gradients():
    weight = torch.ones(5, VOCAB, requires_grad=True)
    loss = autoregressive_loss(torch.zeros(0, 5) @ weight, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_weighted_cross_entropy_is_a_weighted_mean():
    loss = weighted_cross_entropy(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 3.0]))
    assert loss.item() == pytest.approx((1 + 12) / 4)
    assert weighted_cross_entropy(torch.zeros(3), torch.zeros(3)).item() == 0.0


def test_an_unknown_weighting_is_refused(batch):
    with pytest.raises(ValueError, match="`weighting` is 'linear'; allowed are 'uniform', 'exponential' and 'dpace'"):
        block_loss(*batch, weighting="linear")
