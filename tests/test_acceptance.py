"""Acceptance arithmetic against naive loops, and drafting from all anchors against drafting from each alone."""

import math
import random

import pytest
import torch
from torch.utils.data import Subset

from transformers_d3d.acceptance import Acceptance, count_accepted, draft_all_anchors, simulate_acceptance, walk_rounds
from transformers_d3d.masking_d3d import mask_rows, trunk_rows

IDS = torch.randint(3, 60, (16,), generator=torch.Generator().manual_seed(3))


def naive_count(draft, truth):
    count = 0
    for own, theirs in zip(draft, truth, strict=True):
        if own != theirs:
            break
        count += 1
    return count


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
def test_count_accepted_equals_the_naive_twin(num_drafts):
    generator = torch.Generator().manual_seed(num_drafts)
    draft, truth = (torch.randint(0, 2, (5, 40, num_drafts), generator=generator) for _ in range(2))
    counted = count_accepted(draft, truth)
    expected = [
        [naive_count(*pair) for pair in zip(*rows, strict=True)]
        for rows in zip(draft.tolist(), truth.tolist(), strict=True)
    ]
    assert counted.tolist() == expected
    assert {0, 1} <= set(counted.flatten().tolist())


@pytest.mark.parametrize(
    ("draft", "accepted"),
    [([1, 2, 3], 3), ([9, 2, 3], 0), ([1, 9, 3], 1), ([1, 2, 9], 2)],
    ids=["all", "wrong-first", "wrong-middle", "wrong-last"],
)
def test_count_accepted_by_hand(draft, accepted):
    assert count_accepted(torch.tensor(draft), torch.tensor([1, 2, 3])).item() == accepted


def test_a_draft_of_no_tokens_has_none_accepted():
    empty = torch.zeros(3, 0, dtype=torch.long)
    assert count_accepted(empty, empty).tolist() == [0, 0, 0]


def naive_rounds(accepted, response):
    """Plays `generate`: a round emits its accepted tokens and the bonus token, never more than remain."""
    rounds, anchor, remaining = [], 0, response
    while remaining > 0:
        kept = accepted[anchor]
        while kept + 1 > remaining:
            kept -= 1
        rounds.append(kept)
        for _ in range(kept + 1):
            anchor, remaining = anchor + 1, remaining - 1
    return rounds


@pytest.mark.parametrize("seed", range(10))
def test_walk_rounds_equals_the_naive_twin(seed):
    rng = random.Random(seed)
    length = rng.randint(1, 30)
    accepted = [rng.randint(0, 4) for _ in range(length)]
    rounds = walk_rounds(accepted, length)
    assert rounds == naive_rounds(accepted, length)
    assert sum(rounds) + len(rounds) == length


@pytest.mark.parametrize(
    ("accepted", "num_after_anchor", "rounds"),
    [([], 0, []), ([4], 1, [0]), ([4, 4], 2, [1]), ([0, 0, 0], 3, [0, 0, 0]), ([1, 4, 0, 9, 9], 5, [1, 0, 1])],
    ids=["nothing", "one", "two", "never", "mixed"],
)
def test_walk_rounds_by_hand(accepted, num_after_anchor, rounds):
    assert walk_rounds(accepted, num_after_anchor) == rounds


def test_means_and_histograms_come_from_the_rounds():
    acceptance = Acceptance((0, 3, 3, 1))
    assert acceptance.mean_length == 1 + 7 / 4
    assert acceptance.histogram(4) == [1, 1, 0, 2, 0]
    assert math.isnan(Acceptance(()).mean_length)


@torch.no_grad()
def draft_alone(drafter, ids, anchor, parts=None):
    """The draft without a cache, a pass for each part of it over only the tokens before the block and its earlier parts."""
    num_drafts = drafter.config.block_size - 1
    masked = mask_rows(torch.tensor([anchor]), drafter.config.block_size)
    draft = ids[:0]
    for size in parts or [num_drafts]:
        masks = torch.full((num_drafts - len(draft),), drafter.config.mask_token_id)
        hidden = drafter(
            torch.cat([ids[: anchor + 1], draft, masks]).unsqueeze(0),
            trunk_rows(torch.arange(anchor + 1)) + masked,
            mask_offsets=torch.arange(num_drafts),
        ).last_hidden_state[0, anchor:]
        draft = torch.cat([draft, drafter.logits(hidden[len(draft) :][:size]).argmax(-1)])
    return draft


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("rank", [0, 2], ids=["plain", "adapters"])
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_all_anchors_equal_each_alone(targets, make_perturbed, name, rank, block_attention):
    drafter = make_perturbed(targets[name], rank, block_size=6, block_attention=block_attention)
    seen = set()
    for num_steps, parts in {1: [5], 2: [2, 3], 3: [1, 2, 2], 5: [1, 1, 1, 1, 1]}.items():
        drafter.config.num_denoising_steps = num_steps
        together = draft_all_anchors(drafter, IDS, first_anchor=4)
        alone = torch.stack([draft_alone(drafter, IDS, anchor, parts) for anchor in range(4, len(IDS) - 1)])
        assert torch.equal(together, alone)
        seen.add(str(together))
    assert len(seen) > 2


@pytest.mark.parametrize("rows_per_pass", [1, 3, 4, 7, 1000])
@pytest.mark.parametrize("block_size", [2, 4])
def test_the_size_of_a_pass_does_not_matter(targets, make_perturbed, rows_per_pass, block_size):
    drafter = make_perturbed(targets["llama"], 2, block_size=block_size)
    drafts = draft_all_anchors(drafter, IDS, 0, rows_per_pass)
    assert drafts.shape == (len(IDS) - 1, block_size - 1)
    assert torch.equal(drafts, draft_all_anchors(drafter, IDS, 0))


@pytest.mark.parametrize(
    ("response", "rounds"), [([5], ()), ([5, 6], (0,)), ([5, 40], (0,))], ids=["one-token", "two-right", "two-wrong"]
)
def test_short_responses(successor, make_perturbed, response, rounds):
    acceptance = simulate_acceptance(make_perturbed(successor), [{"prompt_ids": [3, 4], "response_ids": response}])
    assert acceptance.rounds == rounds
    assert len(acceptance.correct) == 3
    assert acceptance.correct[1:] == (0.0, 0.0)


def test_no_examples(successor, make_perturbed):
    acceptance = simulate_acceptance(make_perturbed(successor), [])
    assert acceptance.rounds == ()
    assert math.isnan(acceptance.mean_length)


def test_a_subset_is_simulated_without_gradients(targets, make_perturbed):
    drafter = make_perturbed(targets["llama"])
    examples = [{"prompt_ids": IDS[:4].tolist(), "response_ids": IDS[4 + n :].tolist()} for n in range(3)]
    assert not draft_all_anchors(drafter, IDS, 4).requires_grad
    some = simulate_acceptance(drafter, Subset(examples, [2, 0]))
    assert some == simulate_acceptance(drafter, [examples[2], examples[0]])
    assert some.rounds != simulate_acceptance(drafter, examples).rounds
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_simulation_equals_walking_the_drafts_by_hand(targets, make_perturbed):
    drafter = make_perturbed(targets["llama"], block_size=5)
    examples = [{"prompt_ids": [3, 4, 5][:n], "response_ids": []} for n in (1, 3)]
    for example in examples:  # made so that some drafts are right, some are wrong
        ids = list(example["prompt_ids"]) + [7]
        while len(ids) < 30:
            draft = draft_alone(drafter, torch.tensor(ids), len(ids) - 1).tolist()
            ids += draft[: len(ids) % 5] + [len(ids)]
        example["response_ids"] = ids[len(example["prompt_ids"]) :]
    expected, right, seen = [], [0] * 4, [0] * 4
    for example in examples:
        ids, anchor = torch.tensor(example["prompt_ids"] + example["response_ids"]), len(example["prompt_ids"])
        for each in range(anchor, len(ids) - 1):
            for offset, token in enumerate(draft_alone(drafter, ids, each)):
                if each + 1 + offset < len(ids):
                    seen[offset] += 1
                    right[offset] += int(token == ids[each + 1 + offset])
        while anchor < len(ids) - 1:
            truth = ids[anchor + 1 :].tolist()
            draft = draft_alone(drafter, ids, anchor).tolist()[: len(truth) - 1]
            expected.append(naive_count(draft, truth[: len(draft)]))
            anchor += expected[-1] + 1
    acceptance = simulate_acceptance(drafter, examples)
    assert acceptance.rounds == tuple(expected)
    assert len(set(expected)) > 2
    assert acceptance.correct == pytest.approx([r / s for r, s in zip(right, seen, strict=True)])
