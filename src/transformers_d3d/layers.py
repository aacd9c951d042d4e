"""Leaving out layers of a drafter, for a while or for good."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .modeling_d3d import D3DDrafterModel, layer_settings


@contextmanager
def skipped_layers(drafter: D3DDrafterModel, layers: list[int]) -> Iterator[None]:
    """Inside, the drafter has no such layers: nothing is copied, and everything is as before at the end.

    Args:
        drafter (`D3DDrafterModel`): The drafter.
        layers (`list[int]`): Indices of its own layers.
    """
    whole, count = drafter.model.layers, len(drafter.model.layers)
    kept = [i for i in range(count) if i not in set(layers)]
    configs = _configs(drafter)
    before = [layer_settings(config, list(range(count))) for config in configs]
    try:
        _use_layers(drafter, kept)
        yield
    finally:
        drafter.model.layers = _numbered(whole)
        for config, settings in zip(configs, before, strict=True):
            _set(config, settings)


def remove_layers(drafter: D3DDrafterModel, layers: list[int]) -> None:
    """Takes layers out of a drafter for good, in place.

    Args:
        drafter (`D3DDrafterModel`): The drafter.
        layers (`list[int]`): Indices of its own layers.
    """
    own = original_layers(drafter)
    kept = [i for i in range(len(own)) if i not in set(layers)]
    _use_layers(drafter, kept)
    drafter.config.kept_layers = [own[i] for i in kept]


def original_layers(drafter: D3DDrafterModel) -> list[int]:
    """For each layer of a drafter, its index in the model that the drafter was built from."""
    return drafter.config.kept_layers or list(range(len(drafter.model.layers)))


def _use_layers(drafter: D3DDrafterModel, kept: list[int]) -> None:
    for config in _configs(drafter):
        _set(config, layer_settings(config, kept))
    drafter.model.layers = _numbered(nn.ModuleList(drafter.model.layers[i] for i in kept))


def _configs(drafter: D3DDrafterModel) -> list:
    """The backbone's configuration, once, whether or not the drafter's and the backbone's own are one object."""
    return list({id(config): config for config in (drafter.config.text_config, drafter.model.config)}.values())


def _set(config, settings: dict) -> None:
    for name, value in settings.items():
        setattr(config, name, value)


def _numbered(layers: nn.ModuleList) -> nn.ModuleList:
    """Gives each layer its index, which tells its place in the cache."""
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    return layers


@torch.no_grad()
def layer_similarities(drafter: D3DDrafterModel, examples: list[dict]) -> list[float]:
    """How little each layer changes what passes through it: the mean cosine of its input and output over clean rows.

    The layers of the highest similarity are ShortGPT's candidates for removal (arXiv 2403.03853, there 1 minus this is the
    Block Influence).
    """
    totals, count = [0.0] * len(drafter.model.layers), 0

    def hook(index):
        def add(module, args, kwargs, output):
            before = (args[0] if args else kwargs["hidden_states"]).float()
            after = (output[0] if isinstance(output, tuple) else output).float()
            totals[index] += nn.functional.cosine_similarity(before, after, dim=-1).sum().item()

        return add

    hooks = [
        layer.register_forward_hook(hook(index), with_kwargs=True) for index, layer in enumerate(drafter.model.layers)
    ]
    try:
        for example in examples:
            ids = [*example["prompt_ids"], *example["response_ids"]]
            drafter(torch.tensor([ids], device=drafter.device))
            count += len(ids)
    finally:
        for handle in hooks:
            handle.remove()
    return [total / count for total in totals]
