"""Who sees whom: the rows of a drafter's forward pass and their attention, as pure functions of indices.

Knows positions and blocks; knows nothing about models, caches or devices. Every attention back end takes its mask
from [`visible`].
"""

from dataclasses import dataclass, replace

import torch

TRUNK = -1  # the block index of clean tokens outside blocks: committed, or the spine of a packed pass


@dataclass(frozen=True)
class Rows:
    """Rows of a forward pass, queries or keys, as index tensors of one shape `(num_rows,)`.

    Args:
        position (`torch.LongTensor`): Position of the row's token in its own sequence.
        block (`torch.LongTensor`): Index of the row's block, or `TRUNK`.
        start (`torch.LongTensor`): The row sees trunk rows at positions below this one.
        is_mask (`torch.BoolTensor`): Whether the row is a mask row of a block, its token revealed or not.
        sequence (`torch.LongTensor`): Index of the row's sequence, where several are packed together.
    """

    position: torch.Tensor
    block: torch.Tensor
    start: torch.Tensor
    is_mask: torch.Tensor
    sequence: torch.Tensor

    def __len__(self) -> int:
        return self.position.shape[-1]

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(*(field[..., rows] for field in self.fields()))

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(*(torch.cat(pair, dim=-1) for pair in zip(self.fields(), other.fields(), strict=True)))

    def fields(self) -> tuple[torch.Tensor, ...]:
        """The index tensors, in the order of the arguments."""
        return self.position, self.block, self.start, self.is_mask, self.sequence


def trunk_rows(position: torch.Tensor, sequence: torch.Tensor | None = None) -> Rows:
    """Clean rows at the given positions.

    Args:
        position (`torch.LongTensor` of shape `(num_rows,)`): Positions.
        sequence (`torch.LongTensor` of shape `(num_rows,)`, *optional*): Index of each row's sequence, 0 by default.
    """
    sequence = torch.zeros_like(position) if sequence is None else sequence
    is_mask = torch.zeros_like(position, dtype=torch.bool)
    return Rows(position, torch.full_like(position, TRUNK), position + 1, is_mask, sequence)


def mask_rows(
    anchors: torch.Tensor, block_size: int, sequence: torch.Tensor | None = None, kept: torch.Tensor | None = None
) -> Rows:
    """The mask rows of blocks whose anchors are trunk rows, block after block.

    The mask row at offset i (0 to `block_size - 2`) of the block anchored at position p stands at p + 1 + i and
    predicts the token at p + 2 + i. With several denoising steps a block's first mask rows are revealed: they hold the
    tokens at their own positions instead of the mask token, and see and are seen as before.

    Args:
        anchors (`torch.LongTensor` of shape `(num_blocks,)`): Positions of the anchors.
        block_size (`int`): Rows of a block, its anchor included.
        sequence (`torch.LongTensor` of shape `(num_blocks,)`, *optional*): Index of each block's sequence.
        kept (`torch.BoolTensor` of shape `(num_blocks, block_size - 1)`, *optional*): Leave out the others.

    Returns:
        `Rows` of shape `(num_blocks * (block_size - 1),)`, or as many as are kept.
    """
    device = anchors.device
    if kept is None:
        kept = torch.ones(len(anchors), block_size - 1, dtype=torch.bool, device=device)
    block, offset = kept.nonzero(as_tuple=True)
    start = anchors[block] + 1
    sequence = torch.zeros_like(block) if sequence is None else sequence[block]
    return Rows(start + offset, block, start, torch.ones_like(block, dtype=torch.bool), sequence)


def successor_rows(anchors: torch.Tensor, block_size: int) -> tuple[Rows, Rows]:
    """The rows of blocks that bring their own anchors, for the outcomes of a verification.

    Args:
        anchors (`torch.LongTensor` of shape `(num_blocks,)`):
            Positions of the anchors. The trunk may hold another token there.
        block_size (`int`): Rows of a block, its anchor included.

    Returns:
        `tuple`: The anchors, `Rows` of shape `(num_blocks,)`, and the mask rows, `(num_blocks * (block_size - 1),)`,
        block after block.
    """
    block = torch.arange(len(anchors), device=anchors.device)
    own = Rows(anchors, block, anchors, torch.zeros_like(block, dtype=torch.bool), torch.zeros_like(block))
    masked = mask_rows(anchors, block_size)
    return own, replace(masked, start=masked.start - 1)


def visible(query: Rows, key: Rows, block_attention: str = "causal", window: int | None = None) -> torch.Tensor:
    """Which keys each query sees.

    - A clean row sees clean rows up to its own position, never a mask row.
    - A mask row of the block anchored at p sees clean rows at positions up to p on its own branch, and mask rows of its
      own block: all of them (`"bidirectional"`) or those up to itself (`"causal"`).
    - A row sees nothing of another sequence packed beside its own.
    - A block that brings its own anchor (a successor) sees the trunk below that anchor, and the anchor.

    Args:
        query (`Rows` of shape `(num_queries,)`): The rows that look.
        key (`Rows` of shape `(num_keys,)`): The rows looked at.
        block_attention (`str`, *optional*, defaults to `"causal"`): `"causal"` or `"bidirectional"`.
        window (`int`, *optional*): For sliding attention, keys at a distance of `window` or more are not seen.

    Returns:
        `torch.BoolTensor` of shape `(num_queries, num_keys)`: True where the query sees the key. Every row sees
        itself, so that no softmax runs over nothing.
    """
    queries, keys = (field.unsqueeze(1) for field in query.fields()), (field.unsqueeze(0) for field in key.fields())
    return _sees(Rows(*queries), Rows(*keys), block_attention, window)


def flex_mask(query: Rows, key: Rows, block_attention: str = "causal", window: int | None = None):
    """The rule of [`visible`] as the mask of PyTorch's `flex_attention`, which skips what no row sees.

    Args:
        query, key, block_attention, window: As in [`visible`].

    Returns:
        `torch.nn.attention.flex_attention.BlockMask` for one sequence of `num_queries` by `num_keys`, for all heads.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    queries, keys = query.fields(), key.fields()

    def sees(batch, head, q_index, k_index):
        one_query, one_key = (field[q_index] for field in queries), (field[k_index] for field in keys)
        return _sees(Rows(*one_query), Rows(*one_key), block_attention, window)

    device = query.position.device
    # Compiled it never holds the whole mask; where nothing is compiled the rows are few.
    compiled = device.type == "cuda"
    return create_block_mask(sees, None, None, len(query), len(key), device=device, _compile=compiled)


def _sees(query: Rows, key: Rows, block_attention: str, window: int | None) -> torch.Tensor:
    """The rule of [`visible`] for rows whose fields broadcast."""
    on_trunk = (key.block == TRUNK) & (key.position < query.start)
    within = key.position <= query.position
    if block_attention == "bidirectional":
        within = within | query.is_mask
    in_block = (key.block == query.block) & (query.block != TRUNK) & within
    sees = (on_trunk | in_block) & (key.sequence == query.sequence)
    if window is not None:
        sees = sees & (query.position - key.position < window)
    return sees
