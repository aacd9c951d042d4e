"""Where the training of a drafter starts: from the target, from a smaller sibling, from a parallel-draft model in the
style of PARD (arXiv 2504.18583), or from a D3D drafter.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .configuration_d3d import D3DDrafterConfig
from .lora import add_lora
from .modeling_d3d import D3DDrafterModel, is_adapter, public_name

FRESH_MASK_ADAPTER_RANK = 64
# Fields of the configuration that a D3D drafter brings along.
START_SETTINGS = ("block_size", "block_attention", "mask_token_id", "mask_adapter_rank", "mask_adapter_scale")


def build_drafter(
    target: str,
    tokenizer,
    start_from: str | None = None,
    *,
    target_name: str | None = None,
    layers: list[int] | None = None,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    save_adapter: bool = False,
    mask_adapter_rank: int | None = None,
    **settings,
) -> D3DDrafterModel:
    """Builds the drafter to train, in float32: small updates vanish in bfloat16.

    Args:
        target (`str`): The target: an id on the Hub or a folder.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        start_from (`str`, *optional*):
            A causal language model with the target's tokenizer, plain or parallel-draft (`pard_token` in its
            configuration), or a D3D drafter. The target by default.
        target_name (`str`, *optional*): Id of the target on the Hub. Defaults to `target`, if it is one.
        layers (`list[int]`, *optional*): Layers to keep. All by default.
        lora_rank, lora_alpha: See [`add_lora`]; rank 0 adds none.
        save_adapter (`bool`, *optional*): Whether the LoRA is to be saved over its start, which must then be able to.
        mask_adapter_rank (`int`, *optional*):
            See [`D3DDrafterConfig`]. Defaults to a D3D drafter's own, to 0 with a LoRA, else to 64.
        settings: The other `START_SETTINGS`. `None` stands for a D3D drafter's own value, or the default.

    Raises:
        `ValueError`: If the start does not fit the target, or contradicts the settings.
    """
    if save_adapter and lora_rank == 0:
        raise ValueError("`save_adapter` is on and `lora_rank` is 0, so there is no LoRA to save; give a `lora_rank`.")
    start = start_from or target
    settings = {name: value for name, value in settings.items() if value is not None}
    target_name = target_name or public_name(target)
    config, target_config = AutoConfig.from_pretrained(start), AutoConfig.from_pretrained(target)
    own, theirs = config.get_text_config().vocab_size, target_config.get_text_config().vocab_size
    if own != theirs:
        raise ValueError(
            f"The start `{start}` has a vocabulary of {own} and the target one of {theirs}, but a drafter needs the "
            "target's own. Start from another model of its family; if they differ in padding rows only, from a copy saved "
            f"after `model.resize_token_embeddings({theirs})`."
        )
    if isinstance(config, D3DDrafterConfig):
        if save_adapter:
            raise ValueError(
                f"`save_adapter` is on, but the start `{start}` is a D3D drafter, and an adapter is loaded over a plain "
                "causal language model. Leave `save_adapter` out, and the LoRA is merged."
            )
        given = {"layers": layers, "mask_adapter_rank": mask_adapter_rank}
        settings |= {name: value for name, value in given.items() if value is not None}
        _check_settings(start, config.to_dict() | {"layers": config.kept_layers}, settings)
        drafter = _load_drafter(start, config, target, target_name)
    else:
        if start != target:
            _check_tokenizer(start, tokenizer)
        if (pard_token := getattr(config, "pard_token", None)) is not None:
            _check_settings(start, {"mask_token_id": pard_token, "block_attention": "causal"}, settings)
            settings["mask_token_id"] = pard_token
        if mask_adapter_rank is None:
            mask_adapter_rank = 0 if lora_rank else FRESH_MASK_ADAPTER_RANK
        drafter = D3DDrafterModel.from_causal_lm(
            AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
            tokenizer=tokenizer,
            layers=layers,
            mask_adapter_rank=mask_adapter_rank,
            **settings,
        )
        if start != target:
            drafter.config.base_model_name_or_path = public_name(start) or Path(start).name
    drafter.config.target_name_or_path = target_name or getattr(config, "target_name_or_path", None)
    if lora_rank:
        add_lora(drafter, lora_rank, lora_alpha)
    return drafter


def _load_drafter(start: str, config: D3DDrafterConfig, target: str, target_name: str | None) -> D3DDrafterModel:
    base = None
    if is_adapter(start) and config.base_model_name_or_path is None:
        theirs = config.target_name_or_path
        if None not in (theirs, target_name) and theirs != target_name:
            raise ValueError(
                f"The start `{start}` holds adapters over its target `{theirs}`, which is not the target `{target_name}`. "
                "Train it for the former, or start from a drafter with all weights."
            )
        base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return D3DDrafterModel.from_pretrained(start, base_model=base, dtype=torch.float32)


def _check_settings(start: str, fixed: dict, settings: dict) -> None:
    """Raises unless the settings are those that the start fixes."""
    wrong = [
        f"`{name}` is {value!r}, there {fixed[name]!r}"
        for name, value in settings.items()
        if name in fixed and value != fixed[name]
    ]
    if wrong:
        raise ValueError(
            f"The start `{start}` was trained with other settings: {'; '.join(wrong)}. Leave these out to take the start's "
            "own, or start from a model that is not a drafter yet."
        )


def _check_tokenizer(start: str, tokenizer) -> None:
    """Raises unless each token of the target has the same id in the start's tokenizer."""
    try:
        own = AutoTokenizer.from_pretrained(start).get_vocab()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The start `{start}` has no tokenizer to compare with the target's; save the one it was trained with beside it."
        ) from error
    wrong = sorted(token for token, i in tokenizer.get_vocab().items() if own.get(token) != i)
    if wrong:
        raise ValueError(
            f"The start `{start}` has another tokenizer than the target: {len(wrong)} tokens have another id or are "
            f"missing there ({', '.join(map(repr, wrong[:5]))}). Start from a model of the target's family."
        )
