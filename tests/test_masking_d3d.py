"""Who sees whom, against a twin that decides element by element."""

import random
from dataclasses import dataclass

import pytest
import torch

from transformers_d3d.masking_d3d import TRUNK, Rows, flex_mask, mask_rows, successor_rows, trunk_rows, visible

LENGTHS = (12, 7)


@dataclass(frozen=True)
class Token:
    """A row in the words of the docstring: a clean token, an anchor that a block brings along, or a mask token."""

    kind: str
    position: int
    sequence: int
    block: int | None = None
    anchor: int | None = None


def sees(query, key, block_attention, window):
    if query.sequence != key.sequence or (window is not None and query.position - key.position >= window):
        return False
    if query.kind == "clean":
        return key.kind == "clean" and key.position <= query.position
    brings_anchor = query.block >= 100
    if key.kind == "clean":
        return key.position < query.anchor if brings_anchor else key.position <= query.anchor
    if key.block != query.block:
        return False
    if query.kind == "anchor":
        return key.kind == "anchor"
    return key.kind == "anchor" or block_attention == "bidirectional" or key.position <= query.position


def packed(block_size, anchors, kept, successors):
    """Rows and tokens: two packed sequences, blocks anchored on them, and successors with anchors of their own."""
    tokens = [Token("clean", p, s) for s, length in enumerate(LENGTHS) for p in range(length)]
    for block, (anchor, sequence) in enumerate(anchors):
        for offset in range(block_size - 1):
            if kept[block][offset]:
                tokens.append(Token("mask", anchor + 1 + offset, sequence, block, anchor))
    for index, (anchor, sequence) in enumerate(successors):
        tokens.append(Token("anchor", anchor, sequence, 100 + index, anchor))
        tokens += [
            Token("mask", anchor + 1 + offset, sequence, 100 + index, anchor) for offset in range(block_size - 1)
        ]
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    at, of = torch.tensor(anchors).T
    rows = trunk_rows(position, sequence) + mask_rows(at, block_size, of, torch.tensor(kept))
    for index, (anchor, of) in enumerate(successors):
        rows += Rows(
            anchor + torch.arange(block_size),
            torch.full((block_size,), 100 + index),
            torch.full((block_size,), anchor),
            torch.arange(block_size) > 0,
            torch.full((block_size,), of),
        )
    return rows, tokens


@pytest.fixture(params=range(3), ids=lambda seed: f"seed-{seed}")
def layout(request):
    """Overlapping blocks closer than the block size, some of them truncated."""
    rng = random.Random(request.param)
    block_size = rng.choice([2, 3, 5])
    anchors = [(2, 0), (3, 0), (3, 0), (4, 0), (9, 0), (11, 0), (0, 1), (1, 1), (rng.randrange(7), 1)]
    kept = [[offset < rng.randint(0, block_size) for offset in range(block_size - 1)] for _ in anchors]
    successors = [(5, 0), (5, 0), (6, 0), (12, 0), (7, 1)]
    return packed(block_size, anchors, kept, successors)


@pytest.mark.parametrize("window", [None, 1, 4], ids=lambda window: f"window-{window}")
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_visible_equals_the_naive_twin(layout, block_attention, window):
    rows, tokens = layout
    expected = [[sees(query, key, block_attention, window) for key in tokens] for query in tokens]
    assert visible(rows, rows, block_attention, window).tolist() == expected


@pytest.mark.parametrize("window", [None, 1, 4], ids=lambda window: f"window-{window}")
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_flex_attention_has_the_same_rule(layout, block_attention, window):
    rows, _ = layout
    mask = flex_mask(rows[3:], rows, block_attention, window)
    indices = torch.arange(len(rows) - 3)[:, None], torch.arange(len(rows))[None, :]
    zero = torch.tensor(0)
    assert mask.seq_lengths == (len(rows) - 3, len(rows))
    assert torch.equal(mask.mask_mod(zero, zero, *indices), visible(rows[3:], rows, block_attention, window))


def test_flex_attention_skips_what_no_row_sees():
    clean, blocks = trunk_rows(torch.arange(512)), mask_rows(torch.arange(0, 512, 4), 8)
    mask = flex_mask(blocks, clean + blocks)
    seen = visible(blocks, clean + blocks).unflatten(0, (-1, 128)).unflatten(-1, (-1, 128)).any(dim=(1, 3))
    assert torch.equal(mask.to_dense()[0, 0].bool(), seen)
    assert 0 < seen.sum() < seen.numel() / 2


@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_every_row_sees_itself(layout, block_attention):
    rows, _ = layout
    assert visible(rows, rows, block_attention, window=1).diagonal().all()


@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_clean_rows_see_no_block(layout, block_attention):
    rows, _ = layout
    clean = rows.block == TRUNK
    assert not visible(rows, rows, block_attention)[clean][:, ~clean].any()


def test_queries_and_keys_may_be_slices(layout):
    rows, _ = layout
    whole = visible(rows, rows)
    assert torch.equal(visible(rows[3:10], rows[:20]), whole[3:10, :20])
    assert len(rows[3:10] + rows[:20]) == 27


def test_a_block_by_hand():
    rows = trunk_rows(torch.arange(4)) + mask_rows(torch.tensor([1]), 3)
    causal = [[1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]
    assert visible(rows[4:], rows).int().tolist() == causal
    assert visible(rows[4:], rows, "bidirectional").int().tolist() == [[1, 1, 0, 0, 1, 1]] * 2


def test_mask_rows_stand_behind_their_anchors():
    rows = mask_rows(torch.tensor([4, 2]), 4, torch.tensor([0, 1]))
    assert rows.position.tolist() == [5, 6, 7, 3, 4, 5]
    assert rows.start.tolist() == [5, 5, 5, 3, 3, 3]
    assert rows.block.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.is_mask.all()


def test_rows_that_are_not_kept_are_left_out():
    kept = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])
    rows = mask_rows(torch.tensor([4, 2, 7]), 4, kept=kept)
    assert rows.position.tolist() == [5, 8, 9]
    assert rows.block.tolist() == [0, 2, 2]
    assert len(mask_rows(torch.tensor([], dtype=torch.long), 4)) == 0


def test_successors_bring_their_own_anchors():
    """Against rows built one block after the other, in the order that a packed pass has them: anchors, then masks."""
    block_size, anchors = 4, [5, 5, 9]
    own, masked = successor_rows(torch.tensor(anchors), block_size)
    assert own.position.tolist() == own.start.tolist() == anchors
    assert own.block.tolist() == [0, 1, 2] and not own.is_mask.any()
    assert masked.position.tolist() == [anchor + offset for anchor in anchors for offset in (1, 2, 3)]
    assert masked.start.tolist() == [anchor for anchor in anchors for _ in range(3)]
    assert masked.block.tolist() == [block for block in range(3) for _ in range(3)] and masked.is_mask.all()
    trunk = trunk_rows(torch.arange(12))
    kinds = [Token("anchor", anchor, 0, 100 + i, anchor) for i, anchor in enumerate(anchors)]
    kinds += [Token("mask", a + offset, 0, 100 + i, a) for i, a in enumerate(anchors) for offset in (1, 2, 3)]
    keys = [Token("clean", position, 0) for position in range(12)] + kinds
    for block_attention in ("causal", "bidirectional"):
        expected = [[sees(query, key, block_attention, None) for key in keys] for query in kinds]
        assert visible(own + masked, trunk + own + masked, block_attention).tolist() == expected
