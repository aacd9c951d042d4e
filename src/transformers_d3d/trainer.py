"""Training a drafter: the objective on packed blocks, through `transformers.Trainer`."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer, Trainer, set_seed
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from .acceptance import simulate_acceptance
from .answer_files import short_name
from .configuration_d3d import denoising_parts
from .data import BlockCollator, ResponseDataset
from .lora import has_adapters, has_lora, is_adapter_weight, load_lora, merge_lora, save_adapters
from .masking_d3d import mask_rows, trunk_rows
from .modeling_d3d import ADAPTER_FILE, D3DDrafterModel
from .objective import IGNORE, block_loss, row_losses, top_log_probs, weighted_mean
from .plotting import plot_training
from .records import command, cpu_has_bfloat16, hardware, versions, write_json
from .start_points import START_SETTINGS, build_drafter
from .training_args import D3DTrainingArguments

logger = logging.get_logger(__name__)


def training_loss(model, drafter: D3DDrafterModel, batch: dict, args: D3DTrainingArguments) -> torch.Tensor:
    """Blockwise denoising plus auxiliary autoregressive loss of one batch of [`BlockCollator`].

    With mask adapters alone the clean rows depend on no trained weight: they run once, without gradients, into a cache, and
    only the mask rows are trained.

    Args:
        model (`torch.nn.Module`): What to call: the drafter, or a distributed wrapper of it.
        drafter (`D3DDrafterModel`): The drafter itself.
        batch (`dict`): As [`BlockCollator`] makes it, on the drafter's device.
        args (`D3DTrainingArguments`): The objective's settings.

    Returns:
        `torch.Tensor`: A scalar, 0 with zero gradients when nothing is supervised.
    """
    config = drafter.config
    labels, anchors, sequences = batch["block_labels"], batch["anchors"], batch["anchor_sequences"]
    revealed, twins, kept = batch["revealed"], batch["clean_twins"], labels != IGNORE
    # In drafting every block is whole, and in a bidirectional one each row sees those behind it.
    present = kept | (revealed != IGNORE) if config.block_attention == "causal" else torch.ones_like(kept)
    clean = trunk_rows(batch["positions"], batch["sequences"])
    if not present.any():
        # The backbone takes no call without rows, and of processes that train together each must run one.
        anchors, sequences = clean.position[:1], clean.sequence[:1]
        present = torch.ones(1, config.block_size - 1, dtype=torch.bool, device=kept.device)
        labels = revealed = torch.full_like(present, IGNORE, dtype=torch.long)
        kept = ~present
        twins = torch.zeros_like(labels)
    masked = mask_rows(anchors, config.block_size, sequences, present)
    mask_ids = torch.where(revealed == IGNORE, config.mask_token_id, revealed)[present].unsqueeze(0)
    offsets = masked.position - masked.start
    separate = config.mask_adapter_rank > 0 and not has_lora(drafter)
    if separate:
        cache = DynamicCache()
        with torch.no_grad():
            clean_hidden = drafter(batch["input_ids"], clean, cache=cache).last_hidden_state[0]
        hidden = model(mask_ids, masked, keys=clean, cache=cache, mask_offsets=offsets).last_hidden_state[0]
    else:
        ids = torch.cat([batch["input_ids"], mask_ids], dim=1)
        both = model(ids, clean + masked, mask_offsets=offsets).last_hidden_state[0]
        clean_hidden, hidden = both.split([len(clean), len(masked)])
    teacher = None
    if args.divergence_weight > 0:
        teacher = _teacher(drafter, batch, clean_hidden, twins[kept], args.num_top_logits)
    cross_entropy, divergence = row_losses(drafter.logits, hidden[kept[present]], labels[kept], teacher)
    loss = block_loss(
        cross_entropy,
        kept,
        args.loss_weighting,
        args.loss_gamma,
        args.dpace_alpha,
        divergence,
        args.divergence_weight,
    )
    if not separate and args.autoregressive_weight > 0:
        supervised = batch["labels"] != IGNORE
        cross_entropy, _ = row_losses(drafter.logits, clean_hidden[supervised], batch["labels"][supervised])
        loss = loss + args.autoregressive_weight * weighted_mean(cross_entropy, torch.ones_like(cross_entropy))
    return loss


@torch.no_grad()
def _teacher(
    drafter: D3DDrafterModel, batch: dict, clean_hidden: torch.Tensor, twins: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's likeliest tokens and their log-probabilities, each `(num_rows, num_top)`, for mask rows."""
    if "top_ids" in batch:
        return batch["top_ids"][twins], batch["top_log_probs"][twins]
    if drafter.config.mask_adapter_rank == 0 or has_lora(drafter):
        raise ValueError(
            "`divergence_weight` is above 0, but the data hold no `top_ids` and `top_log_probs`, and a drafter that trains "
            "more than mask adapters changes its own clean rows; store the target's likeliest tokens with the data, or set it to 0."
        )
    # With mask adapters the clean rows stay the base model's, which is the target.
    needed, index = twins.unique(return_inverse=True)
    return tuple(part[index] for part in top_log_probs(drafter.logits, clean_hidden[needed], num_top))


def trained_seconds(history: list[dict]) -> float:
    """How long a training has taken, evaluations included, by its log."""
    return next((entry["seconds"] for entry in reversed(history) if "seconds" in entry), 0.0)


def _packed_attention(drafter: D3DDrafterModel, args: D3DTrainingArguments) -> str:
    """The attention of training steps: the one that was asked for, or the best."""
    backbone = drafter.model
    can_flex = backbone._supports_flex_attn and not getattr(backbone.config, "attention_dropout", 0)
    if args.packed_attention == "flex_attention" and not can_flex:
        raise ValueError(
            f"`packed_attention` is 'flex_attention', but the backbone `{backbone.config.model_type}` doesn't support it, or "
            "has attention dropout, which it cannot do; use 'sdpa'."
        )
    if args.packed_attention != "auto":
        return args.packed_attention
    own = backbone.config._attn_implementation
    return "flex_attention" if own == "sdpa" and can_flex and args.device.type == "cuda" else own


class D3DTrainer(Trainer):
    """Trains a [`D3DDrafterModel`] on a target's responses ([`ResponseDataset`]).

    Only the mask adapters or the LoRA are trained when the drafter has them, else all weights. What is trained becomes
    float32, since small updates vanish in narrower types; what is not keeps its type. Evaluation measures the simulated
    acceptance length (`eval_acceptance_length`) on the evaluation responses.
    """

    def __init__(self, model: D3DDrafterModel, args: D3DTrainingArguments, **kwargs):
        config = model.config
        if args.offset_keep_rate < 1 and config.block_attention != "causal":
            raise ValueError(
                f"`offset_keep_rate` is {args.offset_keep_rate}, but the drafter's `block_attention` is "
                f"{config.block_attention!r}: its rows would not see in training what they see in drafting. "
                "Use 1.0, or a drafter with `block_attention='causal'`."
            )
        if config.mask_adapter_rank > 0 and not has_lora(model):
            if args.activation_checkpointing or model.is_activation_checkpointing:
                raise ValueError(
                    "`activation_checkpointing` is on, but the drafter has mask adapters, which see the clean rows through "
                    "a cache that recomputed layers cannot use. Turn it off (clean rows keep no activations anyway; fewer "
                    "`num_anchors` save memory), or train all weights with `mask_adapter_rank=0`."
                )
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(is_adapter_weight(name))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if args.ddp_find_unused_parameters is None:
            # Each step uses all, and a search from the forward's output misses the head, which is called beside it.
            args.ddp_find_unused_parameters = False
        self.collator = BlockCollator(
            config.block_size, args.num_anchors, args.offset_keep_rate, reveal_rate=args.reveal_rate
        )
        kwargs.setdefault("data_collator", self.collator.pack)
        super().__init__(model=model, args=args, **kwargs)
        if self.is_fsdp_enabled and has_adapters(model):
            raise ValueError(
                "FSDP is on, but the drafter has adapters or a LoRA, whose frozen base needs no sharding and whose checkpoints "
                "would hold a share only. Train them in plain data-parallel processes (`torchrun`), or all weights with "
                "`mask_adapter_rank=0`."
            )
        self.model_accepts_loss_kwargs = False
        self._attention = _packed_attention(model, args)
        self._last_log = None  # when, in this process

    def log(self, logs, start_time=None):
        """Logs as ever, with `seconds`: the time of the whole training, those of the runs before a resume included."""
        if self._last_log is not None:
            now = time.perf_counter()
            logs["seconds"] = round(trained_seconds(self.state.log_history) + now - self._last_log, 1)
            self._last_log = now
        super().log(logs, start_time)

    def train(self, *args, **kwargs):
        """Trains as `Trainer` does."""
        self._last_log = time.perf_counter()
        return super().train(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """A step as ever, with `packed_attention` in its forward and backward pass, where layers may be recomputed."""
        config = self.accelerator.unwrap_model(model).model.config
        own = config._attn_implementation
        config._attn_implementation = self._attention
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            config._attn_implementation = own

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The objective of one batch, whose blocks are drawn now.

        Drawn here and not in the data loader, which works a batch ahead: a resumed run then draws the same blocks.
        """
        if "anchors" not in inputs:
            inputs = inputs | self.collator.draw(inputs)
        with self.accelerator.autocast():  # the head is outside of the model's own forward
            return training_loss(model, self.accelerator.unwrap_model(model), inputs, self.args)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Simulated acceptance on the evaluation responses.

        Returns:
            `dict`: `eval_acceptance_length` (bonus token counted) and `eval_correct_j`, the share of draft tokens at
            offset j that equal the target's.
        """
        examples = eval_dataset if eval_dataset is not None else self.eval_dataset
        if examples is None:
            raise ValueError("There are no evaluation responses; pass `eval_dataset` here or to the trainer.")
        drafter = self.accelerator.unwrap_model(self.model)
        was_training = drafter.training
        drafter.eval()
        try:
            with self.accelerator.autocast():
                acceptance = simulate_acceptance(drafter, examples)
        finally:
            drafter.train(was_training)
        metrics = {f"{metric_key_prefix}_acceptance_length": acceptance.mean_length}
        metrics |= {f"{metric_key_prefix}_correct_{j}": share for j, share in enumerate(acceptance.correct, start=1)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir=None, state_dict=None):
        drafter = self.accelerator.unwrap_model(self.model)
        if not has_adapters(drafter):
            return super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = output_dir or self.args.output_dir
            save_adapters(drafter, folder)
            torch.save(self.args, Path(folder) / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        drafter = self.accelerator.unwrap_model(model or self.model)
        if has_lora(drafter):
            load_lora(drafter, resume_from_checkpoint)
        elif drafter.config.mask_adapter_rank > 0:
            drafter.load_adapter_file(Path(resume_from_checkpoint) / ADAPTER_FILE)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        drafter = self.accelerator.unwrap_model(self.model)
        if not has_adapters(drafter):
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint)


@dataclass
class DrafterArguments:
    """What `d3d train` trains: the drafter to build, and the data."""

    target: str = field(metadata={"help": "The target: an id on the Hub or a folder."})
    train_data: str = field(
        metadata={"help": "JSON-lines file (.gz too) of prompt_ids and the target's response_ids."}
    )
    eval_data: str | None = field(default=None, metadata={"help": "Such a file for the simulated acceptance length."})
    num_eval_examples: int | None = field(default=None, metadata={"help": "Use only its first examples."})
    max_length: int = field(default=512, metadata={"help": "Cut training sequences to this many tokens."})
    sources: list[str] | None = field(default=None, metadata={"help": "Train only on lines with these `source`s."})
    target_name: str | None = field(
        default=None, metadata={"help": "Id of the target on the Hub, kept in the checkpoint. Default: --target."}
    )
    start_from: str | None = field(
        default=None,
        metadata={
            "help": "What the drafter starts from, an id or a folder: a causal language model with the target's "
            "tokenizer, a PARD checkpoint, or a D3D drafter, whose settings below it keeps. Default: the target."
        },
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Rows of a block, its anchor included. Default: 8."}
    )
    block_attention: str | None = field(default=None, metadata={"help": "causal (the default) or bidirectional."})
    num_denoising_steps: int | None = field(
        default=None,
        metadata={"help": "Passes that draft a block, kept in the checkpoint. Default: the start's own, or 1."},
    )
    layers: list[int] | None = field(default=None, metadata={"help": "Layers of the start to keep. Default: all."})
    mask_adapter_rank: int | None = field(
        default=None,
        metadata={
            "help": "Train adapters of this rank on mask rows only; 0 trains all weights. Default: 64; 0 with LoRA."
        },
    )
    mask_adapter_scale: float | None = field(
        default=None, metadata={"help": "Factor on the adapters' output. Default: 1."}
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "Mask token. Default: chosen automatically."})
    lora_rank: int = field(default=0, metadata={"help": "Train a LoRA of this rank on all rows; 0 for none."})
    lora_alpha: float | None = field(
        default=None, metadata={"help": "The LoRA's output is scaled by lora_alpha / lora_rank. Default: lora_rank."}
    )
    save_adapter: bool = field(
        default=False, metadata={"help": "Save the LoRA as an adapter over its start instead of merging it."}
    )


def make_trainer(drafter_args: DrafterArguments, args: D3DTrainingArguments) -> D3DTrainer:
    """The trainer of a new drafter, with its data.

    Args:
        drafter_args (`DrafterArguments`): The drafter and the data.
        args (`D3DTrainingArguments`): The training settings.
    """
    if args.bf16 and args.use_cpu and not cpu_has_bfloat16():
        logger.warning("This CPU has no bfloat16 instructions: training with --bf16 is slower than without.")
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(drafter_args.target)
    drafter = build_drafter(
        drafter_args.target,
        tokenizer,
        drafter_args.start_from,
        target_name=drafter_args.target_name,
        layers=drafter_args.layers,
        lora_rank=drafter_args.lora_rank,
        lora_alpha=drafter_args.lora_alpha,
        save_adapter=drafter_args.save_adapter,
        **{name: getattr(drafter_args, name) for name in START_SETTINGS},
    )
    if drafter_args.num_denoising_steps is not None:
        denoising_parts(drafter.config.block_size, drafter_args.num_denoising_steps)  # refuses what cannot be
        drafter.config.num_denoising_steps = drafter_args.num_denoising_steps
    if args.bf16 and drafter.config.mask_adapter_rank > 0:
        # The frozen base is cast once, here, and not at every use.
        for name, parameter in drafter.named_parameters():
            if not is_adapter_weight(name):
                parameter.data = parameter.data.bfloat16()
    vocab_size = drafter.config.vocab_size
    # What the header of a data file, if it has one, must agree with.
    made_by = {"tokenizer": tokenizer, "target": drafter_args.target_name or short_name(drafter_args.target)}
    train_data = ResponseDataset(
        drafter_args.train_data, vocab_size, drafter_args.max_length, sources=drafter_args.sources, **made_by
    )
    eval_data = None
    if drafter_args.eval_data is not None:
        eval_data = ResponseDataset(drafter_args.eval_data, vocab_size, **made_by)
        eval_data = torch.utils.data.Subset(eval_data, range(len(eval_data))[: drafter_args.num_eval_examples])
    return D3DTrainer(drafter, args, train_dataset=train_data, eval_dataset=eval_data, processing_class=tokenizer)


def train(drafter_args: DrafterArguments, args: D3DTrainingArguments) -> str | None:
    """Builds a drafter from its start, trains it, and saves it with a record of the training.

    A run that was stopped goes on from its last checkpoint in `args.output_dir` when started again with
    `--resume_from_checkpoint true`.

    Args:
        drafter_args (`DrafterArguments`): The drafter and the data.
        args (`D3DTrainingArguments`): The training settings.

    Returns:
        `str`: A summary for people, in the main process only.
    """
    trainer = make_trainer(drafter_args, args)
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if has_lora(drafter) and not drafter_args.save_adapter:
        merge_lora(drafter)
    if not has_adapters(drafter):
        trainer.save_model(args.output_dir)  # by all processes, which may hold a share of the weights each
    elif trainer.is_world_process_zero():
        save_adapters(drafter, args.output_dir, torch.bfloat16)
    settings = {k: v for k, v in asdict(drafter_args).items() if k not in ("target", "train_data", "eval_data")}
    settings |= {name: getattr(drafter.config, name) for name in START_SETTINGS}
    settings["start_from"] = settings["start_from"] and short_name(settings["start_from"])
    record = {
        "schema": 1,
        "command": command(),
        "versions": versions(),
        "hardware": hardware(),
        "drafter": settings,
        "data": {
            "train": Path(drafter_args.train_data).name,
            "train_examples": len(trainer.train_dataset),
            "train_header": trainer.train_dataset.header,
        },
        "steps": trainer.state.global_step,
        "seconds": trained_seconds(trainer.state.log_history),
        "final": metrics,
        "history": trainer.state.log_history,
    }
    if not trainer.is_world_process_zero():
        return None
    write_json(Path(args.output_dir) / "training.json", record)
    try:
        plot_training(record["history"], Path(args.output_dir) / "training.png", Path(args.output_dir).name)
    except ImportError as error:
        logger.info(str(error))
    length = metrics.get("eval_acceptance_length")
    return (
        f"Drafter saved in {args.output_dir} after {record['steps']} steps"
        + (f"; simulated acceptance length {length:.2f}" if length is not None else "")
        + "."
    )
