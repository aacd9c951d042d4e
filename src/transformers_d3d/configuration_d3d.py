"""The configuration of a D3D drafter, and the choice of its mask token.

Knows what a drafter is made of; knows nothing about weights, caches or generation.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

# Layer types whose keys and values are plain attention over earlier positions. Anything else (recurrent, chunked,
# compressed, state space) keeps a state that no mask of ours can describe.
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class D3DDrafterConfig(PreTrainedConfig):
    """Configuration of a [`D3DDrafterModel`]: a causal language model that also drafts blocks from mask tokens.

    Args:
        text_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the dense decoder-only backbone (Llama, Qwen, Mistral, Gemma ...).
        block_size (`int`, *optional*, defaults to 8):
            Rows of a block, its anchor included: `block_size - 1` draft tokens and one look-ahead distribution.
        mask_token_id (`int`, *optional*):
            Id of the mask token, in `[0, vocab_size)`, which text never contains. See [`choose_mask_token`].
        block_attention (`str`, *optional*, defaults to `"causal"`):
            What a mask row sees of its own block: rows up to itself (`"causal"`) or all rows (`"bidirectional"`).
        target_name_or_path (`str`, *optional*):
            The target drafted for.
        base_model_name_or_path (`str`, *optional*):
            The causal language model that the drafter was built from, whose weights an adapter checkpoint needs. `None`
            when that is the target.
        kept_layers (`list[int]`, *optional*):
            Indices, in the model that the drafter was built from, of the layers kept. `None` when all were.
        pruning (`list[dict]`, *optional*):
            How layers were removed: for each removal in order its `layer`, an index as in `kept_layers`, and the share of
            the acceptance length `retained` since its pruning began.
        mask_adapter_rank (`int`, *optional*, defaults to 0):
            Rank of the low-rank adapters that act on mask rows only, 0 for none. Clean rows then stay exactly those of
            the model that the drafter was built from.
        mask_adapter_scale (`float`, *optional*, defaults to 1.0):
            Factor on the adapters' output.
        head_bias (`bool`, *optional*, defaults to `False`):
            Whether the language-model head has a bias.
        context_window (`int`, *optional*):
            The drafter reads at most this many of the newest tokens. `None` reads up to the backbone's
            `max_position_embeddings`.
        overlap (`str`, *optional*, defaults to `"auto"`):
            Whether the drafter drafts successors while the target verifies: `"inline"` (no, they take turns),
            `"thread"`, `"stream"` (CUDA), or `"auto"`, by the devices.
        num_successors (`int`, *optional*):
            Successor blocks of a packed pass, one for each outcome prepared for. `None` for 16 when overlapping and 0
            when not.
        outcome_selection (`str`, *optional*, defaults to `"likeliest"`):
            Which outcomes to prepare for: the `"likeliest"` under the drafter's calibrated beliefs, or SSD's geometric
            `"fan_out"`, for comparison.
        overlap_threads (`int`, *optional*):
            Intra-op threads of the drafter's passes with `overlap="thread"`. `None` for half of the caller's, at least
            one, when both models run on the CPU, else as many.
        num_denoising_steps (`int`, *optional*, defaults to 1):
            Passes that draft a block, at most `block_size - 1`. Each settles a part of the draft, from left to right, and
            the next predicts the rest with that part in place of its mask tokens.
    """

    model_type = "d3d_drafter"
    sub_configs = {"text_config": AutoConfig}

    text_config: dict | PreTrainedConfig | None = None
    block_size: int = 8
    mask_token_id: int | None = None
    block_attention: Literal["causal", "bidirectional"] = "causal"
    target_name_or_path: str | None = None
    base_model_name_or_path: str | None = None
    kept_layers: list[int] | None = None
    pruning: list[dict] | None = None
    mask_adapter_rank: int = 0
    mask_adapter_scale: float = 1.0
    head_bias: bool = False
    context_window: int | None = None
    overlap: Literal["auto", "inline", "thread", "stream"] = "auto"
    num_successors: int | None = None
    outcome_selection: Literal["likeliest", "fan_out"] = "likeliest"
    overlap_threads: int | None = None
    num_denoising_steps: int = 1
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if isinstance(self.text_config, dict):
            text_config = dict(self.text_config)
            model_type = text_config.pop("model_type", None)
            if model_type is None:
                raise ValueError(
                    "`text_config` has no `model_type`, so the backbone's kind is unknown; "
                    "add it (for example `llama` or `qwen3`)."
                )
            self.text_config = AutoConfig.for_model(model_type, **text_config)
        super().__post_init__(**kwargs)
        if self.text_config is not None:
            # `generate` and Transformers' own checks read these from the outer config. Not every backbone has them all.
            for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
                setattr(self, name, getattr(self.text_config, name, None))
            self.tie_word_embeddings = getattr(self.text_config, "tie_word_embeddings", False)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of the backbone."""
        return self.text_config.vocab_size

    def validate_drafter(self):
        """Relations between fields; `@strict` calls this at construction."""
        if self.block_size < 2:
            raise ValueError(
                f"`block_size` is {self.block_size}; it must be at least 2: an anchor and one mask row or more."
            )
        if self.mask_adapter_rank < 0:
            raise ValueError(f"`mask_adapter_rank` is {self.mask_adapter_rank}; it must be 0 (none) or positive.")
        if self.context_window is not None and self.context_window < 1:
            raise ValueError(f"`context_window` is {self.context_window}; it must be at least 1, or `None`.")
        if self.num_successors is not None and self.num_successors < 0:
            raise ValueError(f"`num_successors` is {self.num_successors}; it must be 0 (none) or positive, or `None`.")
        if self.overlap_threads is not None and self.overlap_threads < 1:
            raise ValueError(f"`overlap_threads` is {self.overlap_threads}; it must be at least 1, or `None`.")
        denoising_parts(self.block_size, self.num_denoising_steps)
        if self.text_config is not None:
            check_backbone(self.text_config)
            check_mask_token(self.mask_token_id, self.text_config)


def denoising_parts(block_size: int, num_denoising_steps: int) -> list[int]:
    """How many draft tokens of a block are settled after each denoising step.

    The parts are as equal as can be, the smaller ones first: what is settled early improves more of the other tokens.

    Args:
        block_size (`int`): Rows of a block, its anchor included: one more than its draft tokens.
        num_denoising_steps (`int`): Number of steps.

    Returns:
        `list[int]`: A rising count for each step, the last one `block_size - 1`.

    Raises:
        `ValueError`: If there are not between 1 and `block_size - 1` steps.
    """
    num_drafts = block_size - 1
    if not 1 <= num_denoising_steps <= num_drafts:
        raise ValueError(
            f"`num_denoising_steps` is {num_denoising_steps}; it must be between 1 and `block_size - 1`, here "
            f"{num_drafts}, since each step settles one draft token or more."
        )
    return [num_drafts * step // num_denoising_steps for step in range(1, num_denoising_steps + 1)]


def check_backbone(text_config: PreTrainedConfig) -> None:
    """Raises `ValueError` unless `text_config` describes a dense decoder-only attention model."""
    name = text_config.model_type
    remedy = (
        "build the drafter from a dense decoder-only model with the target's tokenizer (Llama, Qwen3, Mistral ...)"
    )
    if text_config.is_encoder_decoder:
        raise ValueError(f"The backbone `{name}` is an encoder-decoder model; {remedy}.")
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None and not hasattr(text_config, "num_attention_heads"):  # RWKV, xLSTM
        layer_types = ["recurrent"]
    unsupported = sorted(set(layer_types or ()) - set(SUPPORTED_LAYER_TYPES))
    if unsupported:
        raise ValueError(
            f"The backbone `{name}` has layers of type {', '.join(unsupported)}, whose state cannot take a drafter's "
            f"masks or be rolled back; allowed are {' and '.join(SUPPORTED_LAYER_TYPES)}: {remedy}."
        )


def check_mask_token(
    mask_token_id: int | None, text_config: PreTrainedConfig, eos_token_id: int | list[int] | None = None
) -> None:
    """Raises `ValueError` unless `mask_token_id` is inside the vocabulary and ends no sequence.

    Args:
        mask_token_id (`int`, *optional*): The mask token.
        text_config (`PreTrainedConfig`): The backbone's configuration.
        eos_token_id (`int` or `list[int]`, *optional*): Ends of sequence, by default the backbone's.
    """
    if mask_token_id is None:
        raise ValueError(
            f"`mask_token_id` is missing; give an id in [0, {text_config.vocab_size}) that text never contains, or "
            "build the drafter with a `tokenizer`, from which one is chosen."
        )
    if not 0 <= mask_token_id < text_config.vocab_size:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}, outside the vocabulary [0, {text_config.vocab_size}); choose an id "
            "inside it that text never contains, such as a padding row or a reserved token."
        )
    if eos_token_id is None:
        eos_token_id = getattr(text_config, "eos_token_id", None)
    eos_token_ids = eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id]
    if mask_token_id in eos_token_ids:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}, an end-of-sequence id (`eos_token_id` is {eos_token_id}); choose an "
            "id that text never contains, such as a padding row or a reserved token."
        )


def choose_mask_token(tokenizer, vocab_size: int, mask_token_id: int | None = None) -> tuple[int, str]:
    """Chooses the mask token, or checks the one given.

    Preferred are the tokenizer's own mask token, then a padding row (an id that the model has and the tokenizer has
    not), then a special token that neither the tokenizer's roles nor its chat template use.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        vocab_size (`int`): Rows of the model's embedding.
        mask_token_id (`int`, *optional*): An id to check instead of choosing one.

    Returns:
        `tuple[int, str]`: The id, and in words what it is.

    Raises:
        `ValueError`: If the given id can occur in text, or if no id is free.
    """
    added = tokenizer.added_tokens_decoder
    specials = {token_id: str(token) for token_id, token in added.items() if token.special and token_id < vocab_size}
    known = len(tokenizer)
    roles = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk", "sep", "cls")}
    template = getattr(tokenizer, "chat_template", None) or ""
    template = template if isinstance(template, str) else str(template)
    if mask_token_id is not None:
        if mask_token_id < known and mask_token_id not in specials:
            raise ValueError(
                f"`mask_token_id` {mask_token_id} is {tokenizer.convert_ids_to_tokens(mask_token_id)!r}, which the "
                f"tokenizer can emit in text; choose a special token or a padding row "
                f"({f'[{known}, {vocab_size})' if known < vocab_size else 'this model has none'}), or pass none and "
                "let one be chosen."
            )
        if mask_token_id in roles:
            raise ValueError(
                f"`mask_token_id` {mask_token_id} is {specials[mask_token_id]!r}, which the tokenizer uses as another "
                "special token; pass none and let a free one be chosen."
            )
        return mask_token_id, "the id given"
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return tokenizer.mask_token_id, f"the tokenizer's mask token {tokenizer.mask_token!r}"
    if known < vocab_size:
        return known, f"the first of {vocab_size - known} padding rows beyond the tokenizer's {known} tokens"
    free = {i: text for i, text in specials.items() if i not in roles and text not in template}
    named = ("mask", "reserved", "unused", "empty", "pad")
    for i in sorted(
        free, key=lambda i: (next((n for n, w in enumerate(named) if w in free[i].lower()), len(named)), i)
    ):
        return i, f"the reserved token {free[i]!r}, which neither text nor the chat template contains"
    raise ValueError(
        f"No id of the vocabulary of {vocab_size} is free to be the mask token: the tokenizer has {known} tokens and no "
        "unused special one. Add one with `tokenizer.add_special_tokens({'mask_token': '<|mask|>'})` and "
        "`model.resize_token_embeddings(len(tokenizer))`, or pass `mask_token_id`."
    )
