"""The settings of a training run that `TrainingArguments` does not have."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class D3DTrainingArguments(TrainingArguments):
    """`TrainingArguments` for a drafter: only what is new, and these changed defaults.

    - `learning_rate`: 2e-4 instead of 5e-5 (`facts`: 1e-5 to 2e-4 from a pretrained model; adapters take 1e-3).
    - `lr_scheduler_type`: `"cosine"` instead of `"linear"`; `warmup_steps`: 0.04 (a share) instead of 0.
    - `per_device_train_batch_size`: 2 instead of 8, in sequences, which are packed into one row.
    - `logging_steps`: 10 instead of 500; `report_to`: `"none"`; `remove_unused_columns`: `False` (the collator needs all).
    """

    learning_rate: float = field(default=2e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up: a share below 1, or a number of steps."})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "Sequences in a step of a process."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two log lines."})
    report_to: str = field(default="none", metadata={"help": "Where to report, as in `TrainingArguments`."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay false."})

    num_anchors: int = field(default=64, metadata={"help": "Blocks for each sequence and step, drawn anew each time."})
    loss_weighting: str = field(
        default="exponential",
        metadata={"help": "Weights of the offsets in a block: uniform, exponential or dpace."},
    )
    loss_gamma: float = field(default=4.0, metadata={"help": "Decay of the exponential weights, in offsets."})
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of the dpace weights, in [0, 1]."})
    autoregressive_weight: float = field(
        default=0.2,
        metadata={"help": "Weight (lambda) of the autoregressive loss. Adapters on mask rows don't need it: 0 then."},
    )
    divergence_weight: float = field(
        default=0.0,
        metadata={"help": "Share of the divergence from the target's likeliest tokens in the loss of mask rows."},
    )
    num_top_logits: int = field(
        default=32,
        metadata={"help": "Likeliest tokens of the target for the divergence, where the data store none."},
    )
    offset_keep_rate: float = field(
        default=1.0,
        metadata={"help": "Below 1, keep mask rows up to offset j with probability rate**(j-1): cheaper steps."},
    )
    reveal_rate: float = field(
        default=0.0,
        metadata={"help": "Share of the blocks that are trained for a later denoising step, with a part revealed."},
    )

    packed_attention: str = field(
        default="auto",
        metadata={
            "help": "Attention in training steps: flex_attention, which skips what no row sees, sdpa with a dense mask, or "
            "auto: the first on CUDA where the backbone can, else the drafter's own."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.packed_attention not in ("auto", "flex_attention", "sdpa"):
            raise ValueError(
                f"`packed_attention` is {self.packed_attention!r}; allowed are 'auto', 'flex_attention' and 'sdpa'."
            )
        if self.num_anchors < 1:
            raise ValueError(f"`num_anchors` is {self.num_anchors}; it must be at least 1.")
        if self.loss_weighting not in ("uniform", "exponential", "dpace"):
            raise ValueError(
                f"`loss_weighting` is {self.loss_weighting!r}; allowed are 'uniform', 'exponential' and 'dpace'."
            )
        if not 0 < self.offset_keep_rate <= 1:
            raise ValueError(f"`offset_keep_rate` is {self.offset_keep_rate}; it must be above 0 and at most 1.")
        if not 0 <= self.reveal_rate < 1:
            raise ValueError(
                f"`reveal_rate` is {self.reveal_rate}; it must be at least 0 and below 1, since the first denoising step "
                "needs blocks of mask tokens only."
            )
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"`dpace_alpha` is {self.dpace_alpha}; it must be between 0 and 1.")
        if not 0 <= self.divergence_weight <= 1:
            raise ValueError(f"`divergence_weight` is {self.divergence_weight}; it must be between 0 and 1.")
        if self.num_top_logits < 1:
            raise ValueError(f"`num_top_logits` is {self.num_top_logits}; it must be at least 1.")
        if self.loss_gamma <= 0 or self.autoregressive_weight < 0:
            raise ValueError(
                f"`loss_gamma` is {self.loss_gamma} (it must be positive) and `autoregressive_weight` is "
                f"{self.autoregressive_weight} (it must not be negative)."
            )
