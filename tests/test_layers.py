"""Leaving out layers: as if the drafter had been built without them, and as before afterwards."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel

from transformers_d3d import D3DDrafterModel
from transformers_d3d.layers import layer_similarities, original_layers, remove_layers, skipped_layers
from transformers_d3d.masking_d3d import mask_rows

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@torch.no_grad()
def outputs(drafter):
    """Logits of clean rows, and of a block behind them over the cache."""
    cache = drafter.new_cache()
    clean = drafter(IDS, cache=cache).last_hidden_state
    rows = mask_rows(torch.tensor([4]), drafter.config.block_size)
    masks = torch.full((1, len(rows)), 63)
    block = drafter(masks, rows, cache=cache, mask_offsets=rows.position - rows.start).last_hidden_state
    return drafter.logits(torch.cat([clean, block], dim=1))


def settings(drafter):
    return copy.deepcopy(drafter.config.to_dict())


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("skipped", [[0], [1], [2], [2, 0], []], ids=str)
def test_skipped_layers(targets, make_perturbed, name, rank, skipped):
    drafter = make_perturbed(targets[name], rank)
    before, config, weights = outputs(drafter), settings(drafter), list(drafter.state_dict())
    kept = [i for i in range(3) if i not in skipped]
    expected = D3DDrafterModel.from_causal_lm(
        targets[name], mask_token_id=63, block_size=4, layers=kept, mask_adapter_rank=rank
    )
    names = [f"model.layers.{i}." for i in kept]
    own = {n: t for n, t in drafter.adapter_state_dict().items() if "layers" not in n or n.startswith(tuple(names))}
    for place, i in enumerate(kept):
        own = {n.replace(f"model.layers.{i}.", f"model.layers.{place}.x."): t for n, t in own.items()}
    expected.load_state_dict({n.replace(".x.", "."): t for n, t in own.items()}, strict=False)
    with skipped_layers(drafter, skipped):
        assert torch.equal(outputs(drafter), outputs(expected))
        assert drafter.config.text_config.to_dict() == expected.config.text_config.to_dict()
    assert torch.equal(outputs(drafter), before)
    assert settings(drafter) == config and list(drafter.state_dict()) == weights


def test_layers_come_back_after_an_error(targets, make_perturbed):
    drafter = make_perturbed(targets["gemma3"])
    before, config = outputs(drafter), settings(drafter)
    with pytest.raises(KeyboardInterrupt), skipped_layers(drafter, [1]):
        raise KeyboardInterrupt
    assert torch.equal(outputs(drafter), before) and settings(drafter) == config


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "adapters"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_removed_layers_stay_away(targets, make_perturbed, tmp_path, name, rank):
    drafter = make_perturbed(targets[name], rank)
    with skipped_layers(drafter, [0, 2]):
        expected = outputs(drafter)
    remove_layers(drafter, [0])
    assert original_layers(drafter) == [1, 2]
    remove_layers(drafter, [1])
    assert original_layers(drafter) == drafter.config.kept_layers == [1]
    assert torch.equal(outputs(drafter), expected)
    if rank:
        drafter.save_adapter(tmp_path)
    else:
        drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, **{"base_model": targets[name]} if rank else {})
    assert torch.equal(outputs(loaded), expected)
    assert loaded.config.kept_layers == [1] and loaded.config.text_config.num_hidden_layers == 1


def test_ids_of_tokens_are_no_settings_of_layers(targets):
    target = copy.deepcopy(targets["llama"])
    target.config.eos_token_id = [2, 3, 4]  # as many as layers
    drafter = D3DDrafterModel.from_causal_lm(target, mask_token_id=63, block_size=4, layers=[0, 2])
    assert drafter.config.text_config.eos_token_id == [2, 3, 4]


def test_similarities(targets, make_perturbed):
    drafter = make_perturbed(targets["llama"])
    idle = drafter.model.layers[1]
    nn.init.zeros_(idle.self_attn.o_proj.weight), nn.init.zeros_(idle.mlp.down_proj.weight)
    examples = [{"prompt_ids": [3, 4], "response_ids": [5, 6, 7]}, {"prompt_ids": [8], "response_ids": [9]}]
    similarities = layer_similarities(drafter, examples)
    assert similarities[1] == pytest.approx(1, abs=1e-5) and max(similarities[0], similarities[2]) < 0.99
    states = drafter(torch.tensor([[3, 4, 5, 6, 7]]), output_hidden_states=True).hidden_states
    first = nn.functional.cosine_similarity(states[0], states[1], dim=-1).mean().item()
    assert layer_similarities(drafter, examples[:1])[0] == pytest.approx(first, rel=1e-4)
