"""The D3D drafter: a causal language model that also predicts blocks of mask tokens.

Knows how rows become hidden states and logits, and how a drafter is built, saved and loaded. What the rows mean for a
running generation is the candidate generator's business (`generation_d3d.py`).
"""

import copy
import json
import math
import os
import sys
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from .cache_d3d import RollbackCache
from .configuration_d3d import D3DDrafterConfig, check_backbone, check_mask_token, choose_mask_token
from .generation_d3d import D3DCandidateGenerator, check_pair
from .masking_d3d import Rows, flex_mask, mask_rows, trunk_rows, visible

logger = logging.get_logger(__name__)

ADAPTER_FILE = "mask_adapter.safetensors"
# A LoRA of `peft`, in a folder of its own: beside the drafter's `config.json`, the Auto classes of Transformers would take
# a checkpoint on the Hub for an adapter of theirs, and load its base model instead of the drafter.
LORA_FOLDER = "lora"
LORA_CONFIG, LORA_FILE = f"{LORA_FOLDER}/adapter_config.json", f"{LORA_FOLDER}/adapter_model.safetensors"
HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

# How many of a call's last rows are mask rows. A context variable, since one drafter serves many threads at once.
_num_mask_rows: ContextVar[int] = ContextVar("num_mask_rows", default=0)


class MaskRowLinear(nn.Linear):
    """A linear layer with a low-rank adapter (LoRA, https://huggingface.co/papers/2106.09685) on mask rows only."""

    def __init__(self, in_features: int, out_features: int, bias: bool, rank: int, scale: float):
        super().__init__(in_features, out_features, bias=bias)
        self.lora_A = nn.Parameter(torch.empty(rank, in_features))
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank))
        # Here and not in `_init_weights`: the backbone initialises its own modules, and doesn't know of these.
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `(..., num_rows, in_features)` to `(..., num_rows, out_features)`."""
        output = super().forward(input)
        num_mask_rows = _num_mask_rows.get()
        if num_mask_rows == 0:
            return output
        hidden = nn.functional.linear(input[..., -num_mask_rows:, :], self.lora_A) * self.scale
        delta = nn.functional.linear(hidden, self.lora_B)
        if num_mask_rows == input.shape[-2]:
            return output + delta
        return torch.cat([output[..., :-num_mask_rows, :], output[..., -num_mask_rows:, :] + delta], dim=-2)


class D3DDrafterModel(PreTrainedModel):
    """A standalone block-diffusion drafter.

    Holds a backbone (`model`) and a head (`lm_head`) under the weight names of the plain causal language model. Clean
    rows give that model's own next-token distributions; the mask rows of a block give those of the following tokens,
    all in one pass. Row i predicts the token at i + 1.

    Build one with [`~D3DDrafterModel.from_causal_lm`], load one with `from_pretrained`, and pass it to a target as
    `target.generate(**inputs, assistant_model=drafter)`.
    """

    config_class = D3DDrafterConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    lora_is_merged = False  # so that the weights are not those of the base any more

    def __init__(self, config: D3DDrafterConfig):
        if config.text_config is None:
            raise ValueError(
                "`D3DDrafterConfig.text_config` is missing: a drafter needs a backbone; use "
                "`D3DDrafterModel.from_causal_lm(...)` or give the configuration of one."
            )
        super().__init__(config)
        text_config = config.text_config
        self.model = AutoModel.from_config(text_config)
        if not hasattr(self.model, "embed_tokens") or not hasattr(self.model, "layers"):
            raise ValueError(
                f"The backbone `{text_config.model_type}` doesn't name its parts as Llama does (`embed_tokens`, "
                "`layers`), so its weights can't be copied; build the drafter from a dense decoder-only model with the "
                "target's tokenizer (Llama, Qwen3, Mistral ...)."
            )
        self.lm_head = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=config.head_bias)
        if config.mask_adapter_rank > 0:
            self._add_mask_adapter()
        self.generation_config = GenerationConfig()
        self.report = None  # of the last `generate` call that this drafter served
        self.post_init()

    def _add_mask_adapter(self) -> None:
        config = self.config
        self.mask_embedding = nn.Parameter(torch.zeros(config.block_size - 1, config.text_config.hidden_size))
        for name, linear in [(n, m) for n, m in self.model.named_modules() if type(m) is nn.Linear]:
            adapted = MaskRowLinear(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                config.mask_adapter_rank,
                config.mask_adapter_scale,
            )
            adapted.weight, adapted.bias = linear.weight, linear.bias
            self.model.set_submodule(name, adapted)

    def get_input_embeddings(self):
        """The backbone's token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value):
        """Replaces the backbone's token embedding."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self):
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, value):
        """Replaces the head."""
        self.lm_head = value

    @property
    def max_context(self) -> int:
        """Tokens that the drafter can read, so that a block still has positions behind them."""
        positions = getattr(self.config.text_config, "max_position_embeddings", None) or sys.maxsize
        return min(self.config.context_window or sys.maxsize, positions - self.config.block_size)

    def new_cache(self, initial_capacity: int = 256) -> RollbackCache:
        """An empty cache for [`~D3DDrafterModel.forward`]."""
        return RollbackCache(self.config.text_config.num_hidden_layers, initial_capacity)

    def attention_mask(self, query: Rows, key: Rows):
        """The mask of a call in the form that the backbone takes.

        Args:
            query (`Rows` of shape `(num_queries,)`): The rows of the call.
            key (`Rows` of shape `(num_keys,)`): The cached rows, then those of the call.

        Returns:
            `torch.Tensor`, or for `flex_attention` a `BlockMask`, of shape `(1, 1, num_queries, num_keys)`; or one such
            mask for each layer type.
        """
        text_config = self.config.text_config
        layer_types = set(getattr(text_config, "layer_types", None) or ())
        window = getattr(text_config, "sliding_window", None)
        if layer_types:
            windows = {kind: window if kind == "sliding_attention" else None for kind in layer_types}
        else:
            use_window = getattr(text_config, "use_sliding_window", True)
            windows = {"all": window if use_window else None}
        masks = {kind: self._one_mask(query, key, size) for kind, size in windows.items()}
        # Only backbones with mixed layers take a mask for each type; one for all of them is taken by every backbone.
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _one_mask(self, query: Rows, key: Rows, window: int | None):
        # The backbone's own choice: Gemma 2 never takes another than "eager", and training on CUDA takes "flex_attention".
        kind = self.model.config._attn_implementation
        if kind == "flex_attention":
            return flex_mask(query, key, self.config.block_attention, window)
        mask = visible(query, key, self.config.block_attention, window)[None, None]
        if kind == "eager":
            dtype = self.dtype
            return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return mask

    def forward(
        self,
        input_ids: torch.LongTensor,
        rows: Rows | None = None,
        keys: Rows | None = None,
        cache: Cache | None = None,
        mask_offsets: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states of clean rows and mask rows, of one block or of several.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, num_rows)`):
                Tokens of the rows, mask tokens included.
            rows (`Rows` of shape `(num_rows,)`, *optional*):
                What each row is. Without it all rows are clean and continue the cache.
            keys (`Rows` of shape `(num_cached,)`, *optional*):
                What each row in `cache` is. Without it they are clean rows at positions 0, 1, 2 ...
            cache (`Cache`, *optional*):
                Keys and values of earlier rows. Those of this call's rows are appended.
            mask_offsets (`torch.LongTensor` of shape `(num_mask_rows,)`, *optional*):
                For a drafter with mask adapters: offsets, from 0, of the mask rows in their blocks. Mask rows must then
                be the last rows of the call. Ignored by other drafters.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutputWithPast`] with `last_hidden_state` of shape
            `(batch_size, num_rows, hidden_size)`. The head is applied by [`~D3DDrafterModel.logits`], only to the
            rows that somebody reads.
        """
        num_cached = cache.get_seq_length() if cache is not None else 0
        if rows is None:
            rows = trunk_rows(torch.arange(num_cached, num_cached + input_ids.shape[1], device=input_ids.device))
        if keys is None:
            keys = trunk_rows(torch.arange(num_cached, device=input_ids.device))
        attention_mask = self.attention_mask(rows, keys + rows)
        inputs = {"input_ids": input_ids}
        num_mask_rows = 0
        if self.config.mask_adapter_rank > 0 and mask_offsets is not None:
            num_mask_rows = mask_offsets.shape[-1]
            embeds = self.get_input_embeddings()(input_ids)
            offsets = self.mask_embedding[mask_offsets].to(embeds.dtype).expand(embeds.shape[0], -1, -1)
            clean, masked = embeds.split([embeds.shape[1] - num_mask_rows, num_mask_rows], dim=1)
            inputs = {"inputs_embeds": torch.cat([clean, masked + offsets], dim=1)}
        with _mask_rows_last(num_mask_rows):
            return self.model(
                **inputs,
                attention_mask=attention_mask,
                position_ids=rows.position.unsqueeze(0),
                cache=cache,
                use_cache=cache is not None,
                **kwargs,
            )

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Next-token logits of rows, with the backbone's own scale and soft cap.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Hidden states of the rows.

        Returns:
            `torch.Tensor` of shape `(..., vocab_size)`.
        """
        config = self.config.text_config
        logits = self.lm_head(hidden_states)
        if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def get_candidate_generator(
        self,
        *,
        generation_config,
        input_ids,
        logits_processor=None,
        stopping_criteria=None,
        model_kwargs=None,
        target=None,
    ) -> D3DCandidateGenerator:
        """What `generate` asks an assistant for: an object that proposes tokens, for one call.

        Args:
            generation_config (`GenerationConfig`): The target's, for this call.
            input_ids (`torch.LongTensor` of shape `(1, prompt_length)`): The prompt.
            logits_processor (`LogitsProcessorList`, *optional*): The target's.
            stopping_criteria (`StoppingCriteriaList`, *optional*): The target's.
            model_kwargs (`dict`, *optional*): The target's; its `attention_mask` tells padding in the prompt.
            target (`PreTrainedModel`, *optional*): The target, to check that it fits.
        """
        if target is not None:
            check_pair(target, self)
        mask = (model_kwargs or {}).get("attention_mask")
        prompt_mask = mask if mask is not None and mask.ndim == 2 and mask.shape[1] >= input_ids.shape[1] else None
        return D3DCandidateGenerator(
            self, generation_config, logits_processor, stopping_criteria, prompt_mask, input_ids.device
        )

    # Building, saving and loading

    @classmethod
    def from_causal_lm(
        cls,
        source: PreTrainedModel | str | os.PathLike,
        *,
        tokenizer=None,
        mask_token_id: int | None = None,
        layers: list[int] | None = None,
        target_name_or_path: str | None = None,
        block_size: int | None = None,
        block_attention: str | None = None,
        mask_adapter_rank: int = 0,
        mask_adapter_scale: float = 1.0,
        **kwargs,
    ) -> "D3DDrafterModel":
        """Builds a drafter from a causal language model; train it before use.

        Args:
            source (`PreTrainedModel`, `str` or `os.PathLike`):
                A causal language model in memory (its weights are copied), an id on the Hub, or a folder.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                The target's tokenizer, from which the mask token is chosen or by which the given one is checked. For an
                id or a folder it is loaded from there.
            mask_token_id (`int`, *optional*): The mask token. Required when there is no tokenizer.
            layers (`list[int]`, *optional*): Indices of the layers to keep, in rising order. All by default.
            target_name_or_path (`str`, *optional*):
                The target drafted for. Defaults to the name of `source`. If they differ, the latter is kept as
                `base_model_name_or_path`.
            block_size, block_attention, mask_adapter_rank, mask_adapter_scale:
                See [`D3DDrafterConfig`].
            kwargs: Passed to `AutoModelForCausalLM.from_pretrained` when `source` is a name.

        Raises:
            `ValueError`: If the backbone, the layers or the mask token cannot serve.
        """
        if not isinstance(source, PreTrainedModel):
            check_backbone(AutoConfig.from_pretrained(source, **_only(HUB_KWARGS, kwargs)).get_text_config())
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(source, **_only(HUB_KWARGS, kwargs))
            source = AutoModelForCausalLM.from_pretrained(source, **kwargs)
        text_config = copy.deepcopy(source.config.get_text_config())
        text_config._name_or_path = ""  # a folder's path means nothing elsewhere
        if source.config.is_encoder_decoder or source.get_output_embeddings() is None:
            raise ValueError(
                f"`{type(source).__name__}` is not a decoder-only causal language model; build the drafter from one "
                "(Llama, Qwen3, Mistral ...) that has the target's tokenizer."
            )
        check_backbone(text_config)
        if getattr(source, "_is_stateful", False):
            raise ValueError(
                f"`{type(source).__name__}` keeps a recurrent state, which cannot take a drafter's masks or be rolled "
                "back; build the drafter from a dense decoder-only model with the target's tokenizer."
            )
        if tokenizer is not None:
            mask_token_id, why = choose_mask_token(tokenizer, text_config.vocab_size, mask_token_id)
            logger.info(f"Mask token of the drafter: id {mask_token_id}, {why}.")
        source_settings = getattr(source, "generation_config", None)
        if source_settings is not None and source_settings.eos_token_id is not None:
            # Chat models often end with tokens that only their generation settings name.
            check_mask_token(mask_token_id, text_config, source_settings.eos_token_id)
        if layers is not None:
            text_config = keep_layers(text_config, layers)
        settings = {"block_size": block_size, "block_attention": block_attention}
        base_name = public_name(source.config._name_or_path)
        target_name = target_name_or_path or base_name
        config = cls.config_class(
            text_config=text_config,
            mask_token_id=mask_token_id,
            target_name_or_path=target_name,
            base_model_name_or_path=base_name if base_name != target_name else None,
            kept_layers=layers,
            mask_adapter_rank=mask_adapter_rank,
            mask_adapter_scale=mask_adapter_scale,
            head_bias=source.get_output_embeddings().bias is not None,
            attn_implementation="eager" if source.config._attn_implementation == "eager" else "sdpa",
            **{name: value for name, value in settings.items() if value is not None},
        )
        # Not `.to(dtype)`, which would round the rotary frequencies too.
        drafter = cls._from_config(config, dtype=source.dtype).to(source.device)
        drafter._copy_base_weights(source)
        drafter._check_block()
        if layers is None:
            drafter._check_head(source)
        return drafter.eval()

    @torch.no_grad()
    def _copy_base_weights(self, source: PreTrainedModel) -> None:
        """Copies the weights of a causal language model, of the kept layers only."""
        kept = self.config.kept_layers
        renamed = {}
        for name, tensor in source.state_dict().items():
            head, found, tail = name.partition("model.layers.")
            if kept is not None and found and not head:
                index, _, rest = tail.partition(".")
                if int(index) not in kept:
                    continue
                name = f"model.layers.{kept.index(int(index))}.{rest}"
            renamed[name] = tensor
        own = self.state_dict()
        wrong = [
            f"{name} {tuple(own[name].shape)} against {tuple(renamed[name].shape)}"
            for name in own
            if name in renamed and own[name].shape != renamed[name].shape
        ]
        adapter = set(self.adapter_state_dict())
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        missing = sorted(set(own) - set(renamed) - adapter - tied)
        if missing or wrong:
            raise ValueError(
                f"`{type(source).__name__}` does not hold the drafter's weights: missing {missing[:5] or 'none'}, of "
                f"another shape {wrong[:5] or 'none'}; use the model that the drafter was built from "
                f"({self.config.base_model_name_or_path or self.config.target_name_or_path})."
            )
        self.load_state_dict({name: renamed[name] for name in own if name in renamed}, strict=False)

    @torch.no_grad()
    def _check_block(self) -> None:
        """Raises unless the backbone runs clean rows, then a block's mask rows, over our cache and masks."""
        cache = self.new_cache(initial_capacity=self.config.block_size + 1)
        anchor = torch.zeros(1, dtype=torch.long, device=self.device)
        rows = mask_rows(anchor, self.config.block_size)
        masks = torch.full((1, len(rows)), self.config.mask_token_id, device=self.device)
        try:
            self(anchor.unsqueeze(0), cache=cache)
            self(masks, rows, cache=cache, mask_offsets=rows.position - rows.start)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"The backbone `{self.config.text_config.model_type}` cannot run a drafter's block ({error}); build the "
                "drafter from a dense decoder-only model with the target's tokenizer (Llama, Qwen3, Mistral ...)."
            ) from error

    @torch.no_grad()
    def _check_head(self, source: PreTrainedModel) -> None:
        """Raises unless clean rows give the source's own logits: some heads do more than we know of."""
        ids = torch.arange(4, device=source.device).unsqueeze(0) % self.config.vocab_size
        was_training = source.training
        source.eval(), self.eval()
        own = self.logits(self(ids).last_hidden_state).float()
        theirs = source(input_ids=ids, use_cache=False).logits.float()
        source.train(was_training)
        if not torch.allclose(own, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item()):
            raise ValueError(
                f"The logits of `{type(source).__name__}` are not its head's output (largest difference "
                f"{(own - theirs).abs().max():.3g}): this kind of backbone is not supported. Build the drafter from a "
                "plain decoder-only model with the target's tokenizer."
            )

    def adapter_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights of the mask adapters, which together with the base model make the drafter."""
        # Inside a LoRA of `peft`, whose own weights end otherwise, the layers sit one level deeper.
        ends = (".lora_A", ".lora_B", "mask_embedding")
        return {n.replace(".base_layer", ""): p.detach() for n, p in self.named_parameters() if n.endswith(ends)}

    def save_adapter(self, save_directory: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
        """Saves the mask adapters and the configuration, without the base weights.

        Args:
            save_directory (`str` or `os.PathLike`): Folder, made if it does not exist.
            dtype (`torch.dtype`, *optional*): Data type of the saved adapters. Their own by default.

        Raises:
            `ValueError`: If this drafter has no mask adapters, or not the base's weights.
        """
        if self.lora_is_merged and not getattr(self, "peft_config", None):
            raise ValueError(
                "A LoRA is merged into this drafter's weights, so the mask adapters alone don't make it; use "
                "`save_pretrained`, which saves all of them."
            )
        if self.config.mask_adapter_rank == 0:
            raise ValueError(
                "This drafter has no mask adapters (`mask_adapter_rank` is 0), so all of its weights are its own; "
                "use `save_pretrained`."
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {n: t.to(dtype or t.dtype).contiguous().cpu() for n, t in self.adapter_state_dict().items()}
        partial = folder / f".{ADAPTER_FILE}.part"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(folder / ADAPTER_FILE)
        self.save_settings(folder, dtype)

    def save_settings(self, save_directory: str | os.PathLike, dtype: torch.dtype | None = None) -> None:
        """Saves what an adapter checkpoint holds beside its weights: configuration, generation settings and code.

        Args:
            save_directory (`str` or `os.PathLike`): The checkpoint's folder.
            dtype (`torch.dtype`, *optional*): Data type of the saved adapters. Their own by default.
        """
        config = copy.deepcopy(self.config)
        config.architectures = [type(self).__name__]
        config.dtype = dtype or self.dtype
        if self._auto_class is not None:
            custom_object_save(self, save_directory, config=config)  # the remote code, as `save_pretrained` does
        config.save_pretrained(save_directory)
        self.generation_config.save_pretrained(save_directory)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs):
        """Saves all weights, the configuration and the generation settings; see `PreTrainedModel.save_pretrained`."""
        super().save_pretrained(save_directory, **kwargs)
        self.generation_config.save_pretrained(save_directory)

    def load_adapter_file(self, path: str | os.PathLike) -> None:
        """Loads the mask adapters that [`~D3DDrafterModel.save_adapter`] wrote.

        Raises:
            `ValueError`: If adapters are missing, left over or of another shape.
        """
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        own = self.adapter_state_dict()
        faults = sorted(set(own) ^ set(tensors)) or [key for key in own if own[key].shape != tensors[key].shape]
        if faults:
            raise ValueError(
                f"`{Path(path).name}` does not hold this drafter's adapters: {len(faults)} weights are missing, left "
                f"over or of another shape ({', '.join(faults[:5])}). Save it again with `save_adapter`."
            )
        with torch.no_grad():
            for key, tensor in own.items():
                tensor.copy_(tensors[key])

    @torch.no_grad()
    def merge_lora(self, settings: dict, tensors: dict[str, torch.Tensor]) -> None:
        """Adds a LoRA of `peft` to the weights: `W += alpha / rank * B @ A`, and the rows of trained tokens.

        Mask adapters act on top of the weights, as before.

        Args:
            settings (`dict`): What `adapter_config.json` holds.
            tensors (`dict[str, torch.Tensor]`): What `adapter_model.safetensors` holds, by the names of `peft`.

        Raises:
            `ValueError`: If the adapter is of another kind, or if weights are left over or of another shape.
        """
        kinds = (
            "use_dora",
            "use_rslora",
            "use_qalora",
            "use_bdlora",
            "fan_in_fan_out",
            "rank_pattern",
            "alpha_pattern",
        )
        kinds += (
            "alora_invocation_tokens",
            "layer_replication",
            "modules_to_save",
            "target_parameters",
            "arrow_config",
        )
        wrong = [name for name in kinds if settings.get(name)]
        if settings.get("peft_type") != "LORA" or wrong:
            raise ValueError(
                f"The adapter is of the type {settings.get('peft_type')!r} with {wrong or 'no special settings'}, but a "
                "plain `LORA` is all that can be merged here; merge it with `peft` and save the whole model."
            )
        scale = settings["lora_alpha"] / settings["r"]
        tokens = settings.get("trainable_token_indices") or []
        own, left = dict(self.named_parameters()), dict(tensors)
        for name in tensors:
            module, _, kind = name.removeprefix("base_model.model.").partition(".lora_A.")
            factor = name.replace(".lora_A.", ".lora_B.")
            weight = own.get(f"{module}.weight")
            if kind != "weight" or weight is None or factor not in left:
                continue
            low, high = left[name].to(weight.device), left[factor].to(weight.device)
            if (high.shape[0], low.shape[1]) == tuple(weight.shape) and len(low) == high.shape[1]:
                weight += (high.float() @ low.float() * scale).to(weight.dtype)
                del left[name], left[factor]
        rows = left.get(name := "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta")
        tokens = tokens.get("embed_tokens", []) if isinstance(tokens, dict) else tokens
        embedding = self.get_input_embeddings().weight
        if rows is not None and rows.shape == (len(tokens), embedding.shape[1]):
            embedding[tokens] = left.pop(name).to(embedding)
        self.lora_is_merged = True
        if left:
            raise ValueError(
                f"`{LORA_FILE}` does not fit the drafter: {len(left)} weights are left over or of another shape "
                f"({', '.join(sorted(left)[:5])}). Use the base model that it was trained on, and train it again if it "
                "holds more than a plain LoRA."
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, base_model=None, **kwargs):
        """Loads a drafter: a checkpoint with all weights, or an adapter over its base model.

        A LoRA is merged into the base's weights.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): An id on the Hub, or a folder.
            base_model (`PreTrainedModel`, `str` or `os.PathLike`, *optional*):
                For an adapter: the base, in memory (its weights are copied), as an id or as a folder. Defaults to the
                checkpoint's `base_model_name_or_path`, or if there is none its `target_name_or_path`.
            kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            `ValueError`: If weights are missing, left over or of another shape, or if the base does not fit.
        """
        if is_adapter(pretrained_model_name_or_path, **kwargs):
            return cls._from_adapter(pretrained_model_name_or_path, base_model, kwargs)
        if base_model is not None:
            raise ValueError(
                f"`base_model` was given, but `{pretrained_model_name_or_path}` has no `{ADAPTER_FILE}` and no "
                f"`{LORA_FILE}`: it is a checkpoint with all weights. Leave `base_model` out."
            )
        allow_mismatch = kwargs.get("ignore_mismatched_sizes", False)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # so that ours is the one report, naming every fault
        drafter, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        faults = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "of another shape": [] if allow_mismatch else sorted(str(key) for key in info["mismatched_keys"]),
        }
        if any(faults.values()):
            found = "; ".join(f"{len(keys)} {kind} ({', '.join(keys[:5])})" for kind, keys in faults.items() if keys)
            raise ValueError(
                f"The weights of `{pretrained_model_name_or_path}` are not those of the drafter in its `config.json`: "
                f"{found}. A drafter with random weights would draft nothing that is accepted, so nothing was loaded. "
                "Save it again with `save_pretrained`, or build one with `D3DDrafterModel.from_causal_lm`."
            )
        drafter._load_generation_config(pretrained_model_name_or_path, kwargs)
        return (drafter, info) if wants_info else drafter

    def _load_generation_config(self, name, kwargs) -> None:
        # A checkpoint without the file has no settings of its own.
        with suppress(OSError):
            self.generation_config = GenerationConfig.from_pretrained(name, **_only(HUB_KWARGS, kwargs))

    @classmethod
    def _from_adapter(cls, name, base_model, kwargs):
        adapter_file = _find_file(name, ADAPTER_FILE, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        config = kwargs.pop("config", None)
        if not isinstance(config, cls.config_class):
            config = cls.config_class.from_pretrained(name, **_only(HUB_KWARGS, kwargs))
        if base_model is None:
            base_model = config.base_model_name_or_path or config.target_name_or_path
        if base_model is None:
            raise ValueError(
                f"`{name}` holds adapters only and names no base model; pass `base_model=` (the target in memory, its "
                "id, or a folder)."
            )
        dtype, device_map = kwargs.pop("dtype", kwargs.pop("torch_dtype", None)), kwargs.pop("device_map", None)
        if not isinstance(base_model, PreTrainedModel):
            try:
                base_model = AutoModelForCausalLM.from_pretrained(
                    base_model, dtype=dtype or "auto", device_map=device_map, token=kwargs.get("token")
                )
            except OSError as error:
                raise ValueError(
                    f"`{name}` holds adapters over the base model `{base_model}`, which could not be loaded; pass "
                    "`base_model=` (the target in memory, its id, or a folder)."
                ) from error
        if dtype in (None, "auto"):
            dtype = base_model.dtype
        drafter = cls._from_config(config, dtype=dtype).to(base_model.device)
        drafter._copy_base_weights(base_model)
        if (lora_file := _find_file(name, LORA_FILE, kwargs)) is not None:
            settings = json.loads(Path(_find_file(name, LORA_CONFIG, kwargs)).read_text())
            drafter.merge_lora(settings, load_file(lora_file))
        if config.mask_adapter_rank > 0 and adapter_file is None:
            raise ValueError(
                f"`{name}` has a `{LORA_FILE}` and no `{ADAPTER_FILE}`, but its `mask_adapter_rank` is "
                f"{config.mask_adapter_rank}; save it again with both."
            )
        if adapter_file is not None:
            drafter.load_adapter_file(adapter_file)
        drafter._load_generation_config(name, kwargs)
        drafter.eval()
        return (drafter, {}) if wants_info else drafter

    def __getstate__(self):
        """What `pickle` and `deepcopy` take: the weights, not the last run's report."""
        return {**self.__dict__, "report": None}


@contextmanager
def _mask_rows_last(num_mask_rows: int):
    token = _num_mask_rows.set(num_mask_rows)
    try:
        yield
    finally:
        _num_mask_rows.reset(token)


def keep_layers(text_config, layers: list[int]):
    """A copy of a backbone's configuration with only the given layers.

    Raises:
        `ValueError`: If the list is empty, not in rising order, or names a layer that is not there.
    """
    count = text_config.num_hidden_layers
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= count:
        raise ValueError(
            f"`layers` is {layers}; give indices in rising order, each once, from 0 to {count - 1}, at least one."
        )
    config = copy.deepcopy(text_config)
    for name, value in layer_settings(config, layers).items():
        setattr(config, name, value)
    return config


def layer_settings(text_config, layers: list[int]) -> dict:
    """What a backbone's configuration says about its layers, for some of them: their number, and lists with one entry each."""
    count = text_config.num_hidden_layers
    lists = {
        name: [value[i] for i in layers]
        for name, value in text_config.to_dict().items()
        if isinstance(value, list)
        and len(value) == count
        and not name.endswith("token_id")  # ids of tokens, by chance
    }
    return lists | {"num_hidden_layers": len(layers)}


def public_name(name: str | None) -> str | None:
    """A model's name, if it is one on the Hub. A folder's path means nothing elsewhere, so it is not kept."""
    return name if name and name.count("/") == 1 and not Path(name).exists() and not name.startswith("/") else None


def _only(names: tuple[str, ...], kwargs: dict) -> dict:
    return {name: kwargs[name] for name in names if name in kwargs}


def is_adapter(name: str | os.PathLike, **kwargs) -> bool:
    """Whether a checkpoint (an id on the Hub, or a folder) holds adapters only, and needs a base model."""
    return any(_find_file(name, file, kwargs) is not None for file in (ADAPTER_FILE, LORA_FILE))


def _find_file(name: str | os.PathLike, file: str, kwargs: dict) -> str | None:
    """Path of a file of a checkpoint, fetched when it is on the Hub; `None` when it has none."""
    if Path(name).is_dir():
        path = Path(name) / (kwargs.get("subfolder") or "") / file
        return str(path) if path.is_file() else None
    try:
        return hf_hub_download(str(name), file, **_only(HUB_KWARGS, kwargs))
    except (EntryNotFoundError, HFValidationError, OSError):
        return None  # not an adapter, or not there at all: the ordinary path then says which
