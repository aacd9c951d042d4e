"""The objective against naive twins, and what happens when nothing is supervised."""

import math

import pytest
import torch

from transformers_d3d.objective import (
    IGNORE,
    block_loss,
    dpace_weights,
    exponential_weights,
    row_losses,
    teacher_divergence,
    top_log_probs,
    weighted_mean,
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


def loss_of(logits, labels, kept, *settings, **more):
    """The loss of blocks from the logits of their kept rows, three rows at a time."""
    cross_entropy, _ = row_losses(torch.nn.Identity(), logits, labels[kept], rows_per_chunk=3)
    return block_loss(cross_entropy, kept, *settings, **more)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_block_loss_equals_the_naive_twin(batch, weighting):
    logits, labels, kept = batch
    loss = loss_of(logits, labels, kept, weighting, gamma=2.0, alpha=0.3)
    assert loss.item() == pytest.approx(naive_block_loss(logits, labels, kept, weighting, 2.0, 0.3), rel=1e-5)
    loss.backward()
    assert (logits.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_block_loss_is_that_of_float32_for_bfloat16_logits(batch, weighting):
    logits, labels, kept = batch
    half = logits.detach().bfloat16()
    loss = loss_of(half, labels, kept, weighting)
    assert loss.dtype == torch.float32
    assert loss.item() == loss_of(half.float(), labels, kept, weighting).item()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("num_blocks", [0, 3], ids=["no-blocks", "no-rows"])
def test_nothing_supervised_is_zero_with_zero_gradients(weighting, num_blocks):
    weight = torch.ones(5, VOCAB, requires_grad=True)
    logits = torch.zeros(0, 5) @ weight
    labels = torch.full((num_blocks, NUM_OFFSETS), IGNORE)
    loss = loss_of(logits, labels, labels != IGNORE, weighting)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.fixture
def rows():
    """Hidden states and a head, labels, and a teacher's three likeliest tokens with their log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 5, generator=generator, requires_grad=True)
    head = torch.nn.Linear(5, VOCAB)
    teacher = torch.log_softmax(torch.randn(9, VOCAB, generator=generator), -1).topk(3, dim=-1)
    return hidden, head, torch.arange(9), (teacher.indices, teacher.values)


def naive_divergence(log_probs, ids, values):
    whole = sum(math.exp(value) for value in values)
    return sum(
        math.exp(value) / whole * (math.log(math.exp(value) / whole) - log_probs[token])
        for token, value in zip(ids, values, strict=True)
    )


def test_teacher_divergence_equals_the_naive_twin(rows):
    hidden, head, _, teacher = rows
    log_probs = torch.log_softmax(head(hidden), -1)
    naive = [naive_divergence(*row) for row in zip(log_probs.tolist(), *(t.tolist() for t in teacher), strict=True)]
    assert teacher_divergence(log_probs, *teacher).tolist() == pytest.approx(naive, rel=1e-5)


def test_the_divergence_of_equal_predictions_is_zero(rows):
    hidden, head, _, _ = rows
    log_probs = torch.log_softmax(head(hidden), -1).detach()
    ids = torch.arange(VOCAB).expand_as(log_probs)
    assert teacher_divergence(log_probs, ids, log_probs).abs().max().item() < 1e-6


@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 100])
def test_row_losses_in_chunks_equal_those_of_all_rows(rows, rows_per_chunk, with_teacher):
    hidden, head, labels, teacher = rows
    losses = row_losses(head, hidden, labels, teacher if with_teacher else None, rows_per_chunk)
    log_probs = torch.log_softmax(head(hidden), -1)
    expected = [-log_probs[range(9), labels]] + [teacher_divergence(log_probs, *teacher)] * with_teacher
    assert (losses[1] is None) != with_teacher
    weights = torch.rand(9, generator=torch.Generator().manual_seed(4))
    for loss, plain in zip(losses, expected, strict=False):
        torch.testing.assert_close(loss, plain)
        ours = torch.autograd.grad((loss * weights).sum(), [hidden, head.weight], retain_graph=True)
        theirs = torch.autograd.grad((plain * weights).sum(), [hidden, head.weight], retain_graph=True)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_divergence_has_its_share_of_the_loss(batch, share):
    logits, labels, kept = batch
    cross_entropy, _ = row_losses(torch.nn.Identity(), logits, labels[kept])
    divergence = torch.arange(len(logits), dtype=torch.float32)
    parts = [block_loss(values, kept, "uniform").item() for values in (cross_entropy, divergence)]
    loss = block_loss(cross_entropy, kept, "uniform", divergence=divergence, divergence_weight=share)
    assert loss.item() == pytest.approx((1 - share) * parts[0] + share * parts[1], rel=1e-5)


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
def test_top_log_probs_are_the_likeliest_of_all_tokens(rows, rows_per_chunk):
    hidden, head, _, _ = rows
    ids, values = top_log_probs(head, hidden, 3, rows_per_chunk)
    expected = torch.log_softmax(head(hidden), -1).sort(dim=-1, descending=True)
    assert torch.equal(ids, expected.indices[:, :3])
    torch.testing.assert_close(values, expected.values[:, :3])
    assert top_log_probs(head, hidden, VOCAB + 5)[0].shape == (9, VOCAB)


def test_weighted_mean_is_a_weighted_mean():
    loss = weighted_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 3.0]))
    assert loss.item() == pytest.approx((1 + 12) / 4)
    assert weighted_mean(torch.zeros(3), torch.zeros(3)).item() == 0.0


def test_an_unknown_weighting_is_refused(batch):
    with pytest.raises(ValueError, match="`weighting` is 'linear'; allowed are 'uniform', 'exponential' and 'dpace'"):
        loss_of(*batch, weighting="linear")
