"""Outcome selection against brute force, the fan-out's budget, and a calibration that converges."""

import itertools

import pytest
import torch

from transformers_d3d.outcomes_d3d import Calibration, fan_out_outcomes, find_outcome, likeliest_outcomes


def brute_force(log_probs, draft):
    """Every outcome with its log-probability, the likeliest first."""
    found = {}
    for n, b in itertools.product(range(len(draft) + 1), range(log_probs.shape[1])):
        if n < len(draft) and b == draft[n]:
            continue
        found[n, b] = sum(float(log_probs[i, draft[i]]) for i in range(n)) + float(log_probs[n, b])
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 16, 1000])
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_the_likeliest_outcomes(num_drafts, count, sharpness):
    generator = torch.Generator().manual_seed(num_drafts)
    log_probs = (torch.randn(num_drafts + 1, 7, generator=generator) * sharpness).log_softmax(-1)
    draft = torch.randint(0, 7, (num_drafts,), generator=generator)
    outcomes, scores = likeliest_outcomes(log_probs, draft, count)
    expected = brute_force(log_probs, draft.tolist())[:count]
    assert [tuple(row) for row in outcomes.tolist()] == [outcome for outcome, _ in expected]
    torch.testing.assert_close(scores, torch.tensor([score for _, score in expected]))


def test_all_outcomes_together_are_certain():
    log_probs = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    _, scores = likeliest_outcomes(log_probs, torch.tensor([3, 1, 8]), 1000)
    assert scores.exp().sum() == pytest.approx(1.0, abs=1e-5)


def test_tokens_that_a_processor_ruled_out_are_no_outcomes():
    logits = torch.full((2, 8), float("-inf"))
    logits[0, [1, 2]], logits[1, [4, 5]] = torch.tensor([2.0, 1.0]), torch.tensor([0.0, 3.0])
    outcomes, _ = likeliest_outcomes(logits.log_softmax(-1), torch.tensor([1]), 16)
    assert sorted(map(tuple, outcomes.tolist())) == [(0, 2), (1, 4), (1, 5)]
    assert sorted(map(tuple, fan_out_outcomes(logits.log_softmax(-1), torch.tensor([1]), 16).tolist())) == [
        (0, 2),
        (1, 4),
        (1, 5),
    ]


@pytest.mark.parametrize("count", [1, 5, 16, 24])
def test_fan_out_spends_its_budget_geometrically(count):
    log_probs = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    draft = log_probs[:7].argmax(-1)
    outcomes = fan_out_outcomes(log_probs, draft, count)
    assert len(outcomes) == count == len(set(map(tuple, outcomes.tolist())))
    fan_out = torch.bincount(outcomes[:, 0], minlength=8).tolist()
    assert fan_out == sorted(fan_out, reverse=True)
    assert not any(n < 7 and b == draft[n] for n, b in outcomes.tolist())


@pytest.mark.parametrize(("num_kept", "bonus", "index"), [(0, 5, 0), (2, 5, 2), (1, 7, 1), (1, 5, None), (3, 3, None)])
def test_tokens_decide_a_hit(num_kept, bonus, index):
    assert find_outcome(torch.tensor([[0, 5], [1, 7], [2, 5]]), num_kept, bonus) == index


def test_nothing_prepared_is_a_miss():
    assert find_outcome(torch.empty(0, 2, dtype=torch.long), 0, 1) is None


@pytest.mark.parametrize("true_inverse_temperature", [0.4, 1.0, 2.0])
def test_calibration_finds_the_temperature(true_inverse_temperature):
    generator = torch.Generator().manual_seed(0)
    calibration = Calibration()
    for _ in range(400):
        logits = torch.randn(3, 30, generator=generator) * 2
        logits[:, 0] = float("-inf")
        probs = (logits * true_inverse_temperature).softmax(-1)
        calibration.update(logits, torch.multinomial(probs, 1, generator=generator)[:, 0])
    assert calibration.inverse_temperature == pytest.approx(true_inverse_temperature, rel=0.2)
    assert torch.isfinite(calibration.log_probs(logits)[:, 1:]).all()
