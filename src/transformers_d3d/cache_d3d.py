"""The drafter's key/value cache: preallocated, written in place, with a length that moves back and forth.

Knows rows and their order in the buffers; knows nothing about tokens, masks or acceptance.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RollbackLayer(CacheLayerMixin):
    """Keys and values of one layer in one buffer of shape `(batch_size, num_heads, capacity, head_dim)`."""

    is_croppable = True
    is_sliding = False
    is_compileable = False

    def __init__(self, initial_capacity: int = 256, **kwargs):
        super().__init__()
        self.capacity = initial_capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the buffers, of the shape, dtype and device of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], self.capacity, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], self.capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes states of shape `(batch_size, num_heads, num_rows, head_dim)` behind the rows that are kept.

        Returns:
            Views on the keys and values of all rows, the new ones last. No row is copied, unless the buffers grow.
        """
        if not self.is_initialized:
            self.capacity = max(self.capacity, key_states.shape[2])
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            while self.capacity < end:
                self.capacity *= 2
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, buffer: torch.Tensor) -> torch.Tensor:
        grown = buffer.new_empty((*buffer.shape[:2], self.capacity, buffer.shape[3]))
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def copy_row(self, source: int, destination: int) -> None:
        """Copies the keys and values of one row over another's."""
        self.keys[:, :, destination] = self.keys[:, :, source]
        self.values[:, :, destination] = self.values[:, :, source]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest `abs(tokens_to_remove)` rows (Transformers passes it as a negative number)."""
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` got {tokens_to_remove}; pass minus the number of rows to remove.")
        self.length = max(self.length + tokens_to_remove, 0)

    def reset(self) -> None:
        """Forgets all rows and keeps the buffers."""
        self.length = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys of the next call with `query_length` rows, and the offset of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of rows kept."""
        return self.length

    def get_max_length(self) -> int:
        """-1: grows by doubling."""
        return -1


class RollbackCache(Cache):
    """One [`RollbackLayer`] per layer, which roll back together.

    Args:
        num_layers (`int`): Layers of the backbone.
        initial_capacity (`int`, *optional*, defaults to 256): Rows allocated at first.
    """

    def __init__(self, num_layers: int, initial_capacity: int = 256):
        super().__init__(layers=[RollbackLayer(initial_capacity) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Number of rows kept."""
        return self.layers[0].length

    def rollback(self, length: int) -> None:
        """Keeps the first `length` rows. Costs an assignment per layer.

        Raises:
            `ValueError`: If fewer rows are there.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"Cannot roll back to {length} rows: the cache holds {self.length}.")
        for layer in self.layers:
            layer.length = length

    def copy_row(self, source: int, destination: int) -> None:
        """Copies one row over another's in every layer: how a successor's anchor is committed."""
        for layer in self.layers:
            layer.copy_row(source, destination)

    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(x.nbytes for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values))
