"""LoRA on all rows of a drafter, through `peft`: adding it, keeping it in checkpoints, merging it.

Loading such a checkpoint needs no `peft`: that is `D3DDrafterModel.from_pretrained`.
"""

import copy
import os
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import TrainableTokensWrapper
from safetensors.torch import load_file, save_file
from torch import nn

from .modeling_d3d import ADAPTER_FILE, LORA_FILE, LORA_FOLDER, D3DDrafterModel

PREFIX = "base_model.model."  # of the weight names in a checkpoint of `peft`


def has_lora(drafter: D3DDrafterModel) -> bool:
    """Whether the drafter holds a LoRA that is not merged."""
    return any(isinstance(module, LoraLayer) for module in drafter.modules())


def has_adapters(drafter: D3DDrafterModel) -> bool:
    """Whether the drafter holds adapters of either kind over its base's own weights, so that its checkpoints go over that."""
    return has_lora(drafter) or (drafter.config.mask_adapter_rank > 0 and not drafter.lora_is_merged)


def add_lora(drafter: D3DDrafterModel, rank: int, alpha: float | None = None) -> None:
    """Adds trainable low-rank adapters to the backbone's linear layers, in place; everything else is frozen.

    The mask token's embedding is trained with them, and where head and embedding are one, its row in the head. Mask adapters
    stay, and stay trainable: the LoRA acts on all rows beneath them.

    Args:
        drafter (`D3DDrafterModel`): A drafter without a LoRA.
        rank (`int`): Rank of the adapters.
        alpha (`float`, *optional*): The adapters' output is scaled by `alpha / rank`. Defaults to `rank`.

    Raises:
        `ValueError`: If the rank or the drafter cannot serve.
    """
    if rank < 1:
        raise ValueError(f"`lora_rank` is {rank}; it must be at least 1, or 0 to train without a LoRA.")
    names = {
        name.rpartition(".")[2] for name, module in drafter.model.named_modules() if isinstance(module, nn.Linear)
    }
    settings = LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        target_modules=sorted(names),
        trainable_token_indices={"embed_tokens": [drafter.config.mask_token_id]},
    )
    inject_adapter_in_model(settings, drafter)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(is_adapter_weight(name))


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter belongs to a LoRA or to mask adapters."""
    return ".lora_" in name or name == "mask_embedding" or "trainable_tokens" in name


def save_lora(drafter: D3DDrafterModel, save_directory: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
    """Saves an adapter checkpoint: the LoRA as `peft` does, in a folder of its own, mask adapters, and the configuration.

    Args:
        drafter (`D3DDrafterModel`): A drafter after [`add_lora`].
        save_directory (`str` or `os.PathLike`): Folder, made if it does not exist.
        dtype (`torch.dtype`, *optional*): Data type of the saved LoRA. Its own by default.
    """
    folder = Path(save_directory)
    (folder / LORA_FOLDER).mkdir(parents=True, exist_ok=True)
    settings = copy.deepcopy(drafter.peft_config["default"])
    settings.inference_mode = True
    settings.base_model_name_or_path = drafter.config.base_model_name_or_path or drafter.config.target_name_or_path
    settings.save_pretrained(folder / LORA_FOLDER)
    tensors = {f"{PREFIX}{n}": t.to(dtype or t.dtype).contiguous().cpu() for n, t in _state_dict(drafter).items()}
    partial = folder / f"{LORA_FILE}.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / LORA_FILE)
    if drafter.config.mask_adapter_rank > 0:
        drafter.save_adapter(folder, dtype)
    else:
        drafter.save_settings(folder, dtype)


def save_adapters(
    drafter: D3DDrafterModel, save_directory: str | os.PathLike, dtype: torch.dtype | None = None
) -> None:
    """Saves whichever adapters the drafter has; see [`save_lora`] and [`~D3DDrafterModel.save_adapter`]."""
    if has_lora(drafter):
        save_lora(drafter, save_directory, dtype)
    else:
        drafter.save_adapter(save_directory, dtype)


@torch.no_grad()
def load_lora(drafter: D3DDrafterModel, save_directory: str | os.PathLike) -> None:
    """Sets the LoRA of a drafter, and its mask adapters, to what [`save_lora`] wrote.

    Raises:
        `ValueError`: If weights are missing, left over or of another shape.
    """
    own = _state_dict(drafter)
    saved = {n.removeprefix(PREFIX): t for n, t in load_file(Path(save_directory) / LORA_FILE).items()}
    faults = sorted(set(own) ^ set(saved)) or [name for name in own if own[name].shape != saved[name].shape]
    if faults:
        raise ValueError(
            f"`{LORA_FILE}` does not hold this drafter's LoRA: {len(faults)} weights are missing, left over or of another "
            f"shape ({', '.join(faults[:5])}). Go on with the same `--lora_rank` and start, or in a new `--output_dir`."
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
    if drafter.config.mask_adapter_rank > 0:
        drafter.load_adapter_file(Path(save_directory) / ADAPTER_FILE)


def merge_lora(drafter: D3DDrafterModel) -> None:
    """Merges the LoRA into the drafter's weights and takes the layers of `peft` out, in place."""
    settings = drafter.peft_config.pop("default").to_dict()
    tensors = {PREFIX + name: tensor for name, tensor in _state_dict(drafter).items()}
    for name, module in list(drafter.named_modules()):
        if isinstance(module, LoraLayer):
            drafter.set_submodule(name, module.get_base_layer())
        elif isinstance(module, TrainableTokensWrapper):
            drafter.set_submodule(name, module.token_adapter.get_base_layer())
    drafter.requires_grad_(True)
    drafter.merge_lora(settings, tensors)


def _state_dict(drafter: D3DDrafterModel) -> dict[str, torch.Tensor]:
    """The LoRA's weights, under their names in a checkpoint of `peft` but for its prefix."""
    return {n.replace(".default", ""): p.detach() for n, p in drafter.named_parameters() if ".default" in n}
