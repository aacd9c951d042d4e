"""Between drafters and what other engines serve: plain causal language models, and parallel-draft (PARD) checkpoints."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .benchmark import check_dtype
from .configuration_d3d import D3DDrafterConfig
from .modeling_d3d import D3DDrafterModel

logger = logging.get_logger(__name__)

# What a parallel-draft checkpoint is made of: one mask token, rows that see the rows before them.
PARALLEL_DRAFT = {"block_attention": "causal"}


def drafter_from_model(
    source: str | os.PathLike,
    *,
    target: str | None = None,
    mask_token_id: int | None = None,
    block_size: int | None = None,
    dtype: str | torch.dtype = "auto",
    **kwargs,
) -> D3DDrafterModel:
    """A drafter from a causal language model: a parallel-draft checkpoint drafts at once, any other has to be trained.

    A parallel-draft checkpoint in the style of PARD (arXiv 2504.18583) names its mask token in its configuration, as
    `pard_token`, and its mask rows see those before them.

    Args:
        source (`str` or `os.PathLike`): An id on the Hub, or a folder.
        target (`str`, *optional*): Id of the target that it is to draft for.
        mask_token_id (`int`, *optional*): The mask token of a model that names none. Chosen automatically by default.
        block_size (`int`, *optional*): Rows of a block: one more than the draft tokens that it was trained for.
        dtype (`str` or `torch.dtype`, *optional*): Data type of the weights. The source's own by default.
        kwargs: `revision`, `token` and the like of `from_pretrained`.

    Raises:
        `ValueError`: If the source is a drafter already, names another mask token, or can't be a drafter.
    """
    config = AutoConfig.from_pretrained(source, **kwargs)
    if isinstance(config, D3DDrafterConfig):
        raise ValueError(f"`{source}` is a D3D drafter already; load it with `AutoModel.from_pretrained`.")
    own = getattr(config, "pard_token", None)
    if None not in (own, mask_token_id) and own != mask_token_id:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}, but `{source}` was trained with `pard_token` {own}; leave it out."
        )
    return D3DDrafterModel.from_causal_lm(
        source,
        target_name_or_path=target,
        mask_token_id=mask_token_id if own is None else own,
        block_size=block_size,
        dtype=dtype,
        **({} if own is None else PARALLEL_DRAFT),
        **kwargs,
    )


def parallel_draft_model(drafter: D3DDrafterModel) -> PreTrainedModel:
    """The plain causal language model that drafts as this drafter does, for engines that run parallel-draft checkpoints.

    Its configuration names the mask token as `pard_token` (vLLM) and `mask_token_id`. Fed the committed tokens and
    `block_size - 1` mask tokens behind them, the last `block_size` rows predict what the drafter drafts, and one token more.

    Args:
        drafter (`D3DDrafterModel`): The drafter, with `block_attention="causal"` and all weights of its own.

    Raises:
        `ValueError`: If a plain model can't do what the drafter does; says what.
    """
    config = drafter.config
    reasons = []
    if config.block_attention != "causal":
        reasons.append(
            f"its `block_attention` is {config.block_attention!r}, and a plain model's rows see no later rows"
        )
    if config.mask_adapter_rank > 0:
        reasons.append(
            f"its adapters of rank {config.mask_adapter_rank} act on mask rows only, and a plain model treats all rows alike"
        )
    if reasons:
        raise ValueError(
            f"This drafter can't be exported as a parallel-draft model: {', and '.join(reasons)}. Train one with "
            '`block_attention="causal"` and `mask_adapter_rank=0` (all weights, or a LoRA on all rows).'
        )
    model = AutoModelForCausalLM.from_config(config.text_config, dtype=drafter.dtype)
    model.load_state_dict(drafter.state_dict(), strict=False)
    model.tie_weights()
    model.config.pard_token = model.config.mask_token_id = config.mask_token_id
    model.generation_config.eos_token_id = (
        drafter.generation_config.eos_token_id or model.generation_config.eos_token_id
    )
    own, theirs = drafter.state_dict(), model.state_dict()
    different = [name for name in theirs if name not in own or not torch.equal(own[name].cpu(), theirs[name])]
    if different:
        raise ValueError(
            f"A plain `{type(model).__name__}` does not hold this drafter's weights ({', '.join(different[:5])} ...)."
        )
    return model.eval()


@dataclass
class ConvertConfig:
    """What `d3d convert` converts: a causal language model to a drafter, or with --to parallel_draft the other way."""

    source: str = field(metadata={"help": "What to convert: an id on the Hub or a folder."})
    output_dir: str = field(metadata={"help": "Folder for the converted checkpoint. It must not hold one."})
    to: str = field(
        default="drafter",
        metadata={
            "help": "drafter (from a causal language model or a PARD checkpoint) or parallel_draft (from a drafter)."
        },
    )
    target: str | None = field(
        default=None,
        metadata={
            "help": "Id of the target that the drafter is for; its tokenizer is saved along with a parallel-draft model."
        },
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Rows of a block: one more than the draft tokens that it was trained for."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Mask token of a model that names none. Default: chosen automatically."}
    )
    base_model: str | None = field(
        default=None,
        metadata={"help": "Base of a drafter that is an adapter: an id or a folder. Default: as it says."},
    )
    dtype: str | None = field(
        default=None, metadata={"help": "float32, bfloat16 or float16. Default: the source's own."}
    )

    def __post_init__(self):
        if self.to not in ("drafter", "parallel_draft"):
            raise ValueError(f"`to` is {self.to!r}; allowed are 'drafter' and 'parallel_draft'.")
        if self.dtype is not None:
            check_dtype(self.dtype)


def run_convert(config: ConvertConfig) -> str:
    """Converts a checkpoint and saves it.

    Returns:
        `str`: What was made, and how to use it.
    """
    output = Path(config.output_dir)
    if (output / "config.json").exists():
        raise ValueError(f"`{output}` holds a checkpoint already; choose another `--output_dir`.")
    dtype = config.dtype or "auto"
    if config.to == "drafter":
        drafter = drafter_from_model(
            config.source,
            target=config.target,
            mask_token_id=config.mask_token_id,
            block_size=config.block_size,
            dtype=dtype,
        )
        drafter.save_pretrained(output)
        _save_tokenizer(config.source, output)
        return (
            f"A drafter of {drafter.config.text_config.num_hidden_layers} layers, mask token {drafter.config.mask_token_id}, "
            f"in `{output}`: AutoModel.from_pretrained({str(output)!r})."
        )
    base = {"base_model": config.base_model} if config.base_model else {}
    drafter = D3DDrafterModel.from_pretrained(config.source, dtype=dtype, **base)
    model = parallel_draft_model(drafter)
    model.save_pretrained(output)
    _save_tokenizer(config.target or drafter.config.target_name_or_path, output)
    number = drafter.config.block_size
    return (
        f"A parallel-draft model for up to {number} draft tokens in `{output}`. vLLM: --speculative-config "
        f'\'{{"method": "draft_model", "model": "{output}", "num_speculative_tokens": {number}, "parallel_drafting": true}}\'. '
        f"TensorRT-LLM: PARDDecodingConfig(max_draft_len={number}, speculative_model={str(output)!r}, "
        f"mask_token_id={drafter.config.mask_token_id})."
    )


def _save_tokenizer(name: str | None, output: Path) -> None:
    """Saves the tokenizer along, which engines expect beside a model, if there is one."""
    try:
        if name is not None:
            AutoTokenizer.from_pretrained(name).save_pretrained(output)
            return
        reason = "no target is named"
    except (OSError, ValueError) as error:
        reason = str(error)
    logger.warning(f"No tokenizer is saved in `{output}`: {reason}. Engines expect the target's there.")
