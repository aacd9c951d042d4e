"""The rollback cache: rows in place, and a length that moves back and forth."""

import pytest
import torch

from transformers_d3d import RollbackCache

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def states(num_rows, seed=0, dtype=torch.float32):
    return torch.randn(2, 1, HEADS, num_rows, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def append(cache, new):
    return [cache.update(*(new + layer), layer) for layer in range(LAYERS)]


def filled(num_rows, initial_capacity=4):
    cache = RollbackCache(LAYERS, initial_capacity)
    for row in range(num_rows):
        append(cache, states(1, seed=row))
    return cache


def content(cache):
    return [
        (layer.keys[:, :, : layer.length].clone(), layer.values[:, :, : layer.length].clone())
        for layer in cache.layers
    ]


def assert_same(left, right):
    assert all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_update_returns_all_rows_in_order():
    cache, parts = RollbackCache(LAYERS, 4), [states(n, seed=n) for n in (3, 1, 5, 2)]
    for end in range(1, 5):
        returned = append(cache, parts[end - 1])
        expected = torch.cat(parts[:end], dim=-2)
        assert_same(returned, [expected + layer for layer in range(LAYERS)])
        assert cache.length == cache.get_seq_length() == expected.shape[-2]


@pytest.mark.parametrize("first", [1, 4, 5, 100], ids=lambda rows: f"first-{rows}")
def test_growth_doubles_and_keeps_the_content(first):
    cache = RollbackCache(LAYERS, 4)
    parts = [states(first), states(9, seed=1), states(30, seed=2)]
    for part in parts:
        append(cache, part)
    assert_same(content(cache), [torch.cat(parts, dim=-2) + layer for layer in range(LAYERS)])
    assert cache.layers[0].capacity in (max(first, 4) * 2**k for k in range(8))
    assert cache.layers[0].capacity < 2 * cache.length or cache.layers[0].capacity == max(first, 4)


def test_no_allocation_while_the_capacity_suffices():
    cache = filled(1, initial_capacity=64)
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for round_ in range(200):
        keys, _ = append(cache, states(5, seed=round_))[0]
        assert keys.data_ptr() == before[0][0]
        cache.rollback(cache.length - 5 + round_ % 2 if cache.length < 55 else 1)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == before


@pytest.mark.parametrize("num_removed", range(8))
@pytest.mark.parametrize("length", range(6))
def test_rollback_is_exact(length, num_removed):
    cache = filled(length)
    if num_removed > length:
        with pytest.raises(ValueError, match=f"holds {length}"):
            cache.rollback(length - num_removed)
        assert cache.length == length
        return
    cache.rollback(length - num_removed)
    assert cache.length == length - num_removed
    if length:
        kept = [[x[:, :, : cache.length] for x in layer] for layer in content(filled(length))]
        assert_same(content(cache), kept)
    append(cache, states(2, seed=50))
    twin = filled(length - num_removed)
    append(twin, states(2, seed=50))
    assert_same(content(cache), content(twin))


@pytest.mark.parametrize("num_removed", range(8))
@pytest.mark.parametrize("length", range(6))
def test_crop_takes_minus_the_number_of_rows(length, num_removed):
    cache = filled(length)
    cache.crop(-num_removed)
    assert cache.length == max(length - num_removed, 0)
    if cache.length:
        assert_same(content(cache), content(filled(cache.length)))


def test_crop_refuses_a_positive_number():
    cache = filled(5)
    with pytest.raises(ValueError, match="crop"):
        cache.crop(3)
    assert cache.length == 5


def test_rollback_cannot_move_forward():
    cache = filled(5)
    cache.rollback(2)
    with pytest.raises(ValueError, match="3 rows: the cache holds 2"):
        cache.rollback(3)


def test_copy_row_copies_in_every_layer():
    cache, before = filled(6), content(filled(6))
    cache.copy_row(5, 2)
    for (keys, values), (old_keys, old_values) in zip(content(cache), before, strict=True):
        for new, old in ((keys, old_keys), (values, old_values)):
            assert torch.equal(new[:, :, 2], old[:, :, 5])
            others = [0, 1, 3, 4, 5]
            assert torch.equal(new[:, :, others], old[:, :, others])


def test_reset_keeps_the_buffers():
    cache = filled(6)
    before = cache.nbytes(), cache.layers[0].keys.data_ptr()
    cache.reset()
    assert cache.length == 0
    append(cache, states(3, seed=9))
    assert_same(content(cache), [states(3, seed=9) + layer for layer in range(LAYERS)])
    assert (cache.nbytes(), cache.layers[0].keys.data_ptr()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_linear_in_the_rows(dtype):
    cache = RollbackCache(LAYERS, 4)
    assert cache.nbytes() == 0
    for row in range(300):
        append(cache, states(1, dtype=dtype))
        capacity = max(4, 1 << row.bit_length())
        assert cache.nbytes() == 2 * LAYERS * HEADS * HEAD_DIM * capacity * dtype.itemsize
    assert cache.layers[0].keys.dtype == dtype


def test_mask_sizes_count_the_rows_to_come():
    cache = filled(5)
    assert cache.get_mask_sizes(3, 0) == (8, 0)
