"""`d3d trace`: one prompt answered with a drafter, as a picture of target and drafter over time."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .benchmark import check_dtype, drafting_settings, load_drafter
from .plotting import chrome_trace, plot_trace
from .prompts import encode_prompt
from .records import write_json


@dataclass
class TraceConfig:
    """What `d3d trace` runs and draws."""

    target: str = field(metadata={"help": "The target: an id on the Hub or a folder."})
    drafter: str = field(metadata={"help": "The drafter: an id on the Hub or a folder. Adapters go over --target."})
    prompt: str = field(
        default="Tom has 3 boxes of 12 eggs and breaks 5. How many are left?", metadata={"help": "The user's turn."}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "Length of the answer, in tokens."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "Device of the target."})
    drafter_device: str | None = field(
        default=None, metadata={"help": "Device of the drafter. Default: the target's."}
    )
    overlap: str = field(
        default="auto", metadata={"help": "Back end of the drafter's passes: auto, inline, thread, stream."}
    )
    num_successors: int | None = field(
        default=None, metadata={"help": "Successors of a packed pass. Default: 16, or 0."}
    )
    num_denoising_steps: int | None = field(
        default=None, metadata={"help": "Passes that draft a block. Default: the drafter's own."}
    )
    num_threads: int | None = field(default=None, metadata={"help": "Intra-op threads of the target. Default: all."})
    overlap_threads: int | None = field(default=None, metadata={"help": "Those of the drafter with --overlap thread."})
    first_round: int = field(default=0, metadata={"help": "First round to draw; 0 is the prefill."})
    num_rounds: int = field(default=10, metadata={"help": "Rounds to draw."})
    output: str = field(default="trace", metadata={"help": "Writes OUTPUT.png and OUTPUT.json (a Chrome trace)."})

    def __post_init__(self):
        check_dtype(self.dtype)
        if self.max_new_tokens < 2 or self.num_rounds < 1 or self.first_round < 0:
            raise ValueError(
                f"`max_new_tokens` is {self.max_new_tokens} (at least 2), `num_rounds` {self.num_rounds} (at least 1) and "
                f"`first_round` {self.first_round} (at least 0)."
            )


def run_trace(config: TraceConfig) -> str:
    """Answers the prompt once for warming up and once traced; draws the second.

    Returns:
        `str`: The report and a timeline, as text, and what was written.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=config.dtype).to(config.device)
    drafter = load_drafter(config.drafter, target, **drafting_settings(config))
    drafter = drafter.to(config.drafter_device or config.device)
    inputs = encode_prompt(tokenizer, config.prompt, config.device)
    for _ in range(2):
        target.generate(**inputs, do_sample=False, max_new_tokens=config.max_new_tokens, assistant_model=drafter)
    report = drafter.report
    # Not `with_suffix`: the name may have a dot of its own.
    picture, trace = (Path(f"{config.output}.{ending}") for ending in ("png", "json"))
    picture.parent.mkdir(parents=True, exist_ok=True)
    title = (
        f"{Path(config.drafter).name}: overlap {report.mode}, acceptance length {report.mean_acceptance_length:.2f}"
    )
    if report.outcomes:
        title += f", successors ready {report.hits} of {len(report.outcomes)} times"
    plot_trace(report, picture, config.first_round, config.num_rounds, title)
    write_json(trace, chrome_trace(report))
    timeline = report.timeline(config.first_round, config.num_rounds)
    return f"{report}\n\n{timeline}\n\nWritten: {picture} and {trace} (open it in https://ui.perfetto.dev)."
