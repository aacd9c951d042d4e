"""Acceptance: how many draft tokens a target keeps, counted and simulated on its recorded responses.

The trainer's evaluation, the pruner and the benchmark share these functions, so that their numbers are one number.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .configuration_d3d import denoising_parts
from .masking_d3d import mask_rows


def count_accepted(draft: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Counts the draft tokens before the first that differs from the target's.

    Args:
        draft (`torch.LongTensor` of shape `(..., num_draft_tokens)`): Drafted tokens.
        truth (`torch.LongTensor` of the same shape): The target's tokens.

    Returns:
        `torch.LongTensor` of shape `(...)`: Accepted tokens, the bonus token not counted.
    """
    return (draft == truth).long().cumprod(dim=-1).sum(dim=-1)


def walk_rounds(accepted: list[int], num_after_anchor: int) -> list[int]:
    """The rounds that `generate` would run over a response, given what each possible anchor would have accepted.

    Args:
        accepted (`list[int]`): For each anchor in order, the draft tokens that equal the response.
        num_after_anchor (`int`): Tokens of the response behind the first anchor.

    Returns:
        `list[int]`: Accepted tokens of each round. The last token of a response is always the target's own.
    """
    rounds, anchor = [], 0
    while anchor < num_after_anchor:
        kept = min(accepted[anchor], num_after_anchor - anchor - 1)
        rounds.append(kept)
        anchor += kept + 1
    return rounds


@dataclass(frozen=True)
class Acceptance:
    """Accepted counts of rounds, and what follows from them.

    Args:
        rounds (`tuple[int, ...]`): Accepted tokens (bonus not counted) of each round.
        correct (`tuple[float, ...]`): Share in [0, 1] of draft tokens that equal the target's, by offset in the block,
            whether or not earlier ones were right. Empty when not simulated.
        every_anchor (`float`): As `mean_length`, over the blocks of all anchors instead of those that rounds start from:
            less noise, but another mean. NaN when not simulated.
    """

    rounds: tuple[int, ...]
    correct: tuple[float, ...] = ()
    every_anchor: float = float("nan")

    @property
    def mean_length(self) -> float:
        """Mean acceptance length (tau): tokens for each target forward, the bonus token counted."""
        return 1 + sum(self.rounds) / len(self.rounds) if self.rounds else float("nan")

    def histogram(self, num_draft_tokens: int) -> list[int]:
        """Number of rounds that accepted 0, 1, ... `num_draft_tokens` tokens."""
        return [self.rounds.count(n) for n in range(num_draft_tokens + 1)]


@torch.no_grad()
def draft_all_anchors(drafter, input_ids: torch.Tensor, first_anchor: int, rows_per_pass: int = 512) -> torch.Tensor:
    """Drafts greedily from every anchor of a sequence, many blocks in a pass, in the drafter's denoising steps.

    Args:
        drafter (`D3DDrafterModel`): The drafter.
        input_ids (`torch.LongTensor` of shape `(sequence_length,)`): Prompt and response.
        first_anchor (`int`): Position of the first anchor. The last is the last but one position.
        rows_per_pass (`int`, *optional*, defaults to 512): Mask rows in one pass: bounds the memory.

    Returns:
        `torch.LongTensor` of shape `(num_anchors, block_size - 1)`: The draft tokens of each anchor.
    """
    config = drafter.config
    device = drafter.device
    input_ids = input_ids.to(device)
    num_drafts = config.block_size - 1
    cache = drafter.new_cache(len(input_ids) + rows_per_pass)
    clean = drafter(input_ids.unsqueeze(0), cache=cache).last_hidden_state[0]
    anchors = torch.arange(first_anchor, len(input_ids) - 1, device=device)
    drafts = []
    for part in anchors.split(max(rows_per_pass // num_drafts, 1)):
        draft = drafter.logits(clean[part]).argmax(-1, keepdim=True)
        rows = mask_rows(part, config.block_size)
        offsets = rows.position - rows.start
        block_ids = torch.full((len(part), num_drafts), config.mask_token_id, device=device)
        for num_settled in denoising_parts(config.block_size, config.num_denoising_steps):
            hidden = drafter(block_ids.view(1, -1), rows, cache=cache, mask_offsets=offsets).last_hidden_state[0]
            cache.rollback(len(input_ids))
            # Token i of the draft comes from the mask row at offset i - 1. The last row is the look-ahead.
            drafting = hidden.view(len(part), num_drafts, -1)[:, draft.shape[1] - 1 : num_settled - 1]
            draft = torch.cat([draft, drafter.logits(drafting).argmax(-1)], dim=1)
            block_ids[:, :num_settled] = draft
        drafts.append(draft)
    return torch.cat(drafts)


def simulate_acceptance(drafter, examples: Iterable[dict]) -> Acceptance:
    """Acceptance on a target's recorded greedy responses: what `generate` gets where the target answers the same.

    Args:
        drafter (`D3DDrafterModel`): The drafter, in evaluation mode.
        examples (iterable of `dict`): Each with `prompt_ids` and `response_ids`, lists of token ids.

    Returns:
        [`Acceptance`]: All rounds of all responses. The first response token is not a round's: it comes with the
        target's prefill.
    """
    num_drafts = drafter.config.block_size - 1
    rounds, accepted, correct, seen = [], [], torch.zeros(num_drafts), torch.zeros(num_drafts)
    for example in examples:
        ids = torch.tensor([*example["prompt_ids"], *example["response_ids"]])
        first_anchor = len(example["prompt_ids"])
        num_after = len(ids) - 1 - first_anchor
        if num_after < 1:
            continue
        drafts = draft_all_anchors(drafter, ids, first_anchor).cpu()
        padded = torch.cat([ids[first_anchor + 1 :], torch.full((num_drafts,), -1)])
        truth = padded.unfold(0, num_drafts, 1)[:num_after]
        counts = count_accepted(drafts, truth).tolist()
        rounds += walk_rounds(counts, num_after)
        accepted += counts
        correct += (drafts == truth).sum(0)
        seen += (truth >= 0).sum(0)
    every_anchor = 1 + sum(accepted) / len(accepted) if accepted else float("nan")
    return Acceptance(tuple(rounds), tuple((correct / seen.clamp(min=1)).tolist()), every_anchor)
