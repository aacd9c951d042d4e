"""Measures training steps: rows per second, and the share of the matrix-product peak, measured between the steps.

    python examples/measure_training.py --target HuggingFaceTB/SmolLM2-135M-Instruct --train_data train.jsonl.gz \\
      --output_dir run --max_steps 12 --bf16 true --use_cpu true

Takes all options of `d3d train`. The work of a step is counted as PyTorch runs it: matrix products and attention, forward
and backward. The peak is a product of two matrices of 2048 x 2048 in the same type. Writes `measured.json` in the output
folder, and with `--profile` a table of what a step's time goes to.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import HfArgumentParser, TrainerCallback

from transformers_d3d.records import command, hardware, versions, write_json
from transformers_d3d.trainer import DrafterArguments, make_trainer
from transformers_d3d.training_args import D3DTrainingArguments

WARM_UP = 2


def matmul_peak(dtype, device, size=2048, repeats=5):
    """FLOP per second of the fastest of some products of two square matrices."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        (left @ right).sum().item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


class Measure(TrainerCallback):
    """Times every step, and counts the work of its forward and backward pass in a second run of the same batch."""

    def __init__(self, trainer, dtype):
        self.trainer, self.dtype, self.steps, self.rows, self.flop = trainer, dtype, [], 0, 0
        trainer.training_step, self.step = self.counted, trainer.training_step

    def counted(self, model, inputs, *args, **kwargs):
        inputs = self.trainer._prepare_inputs(inputs)
        inputs = inputs | self.trainer.collator.draw(inputs)
        loss = self.step(model, inputs, *args, **kwargs)
        self.seconds += time.perf_counter() - self.start
        gradients = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        with FlopCounterMode(display=False) as counter:
            self.step(model, inputs, *args, **kwargs)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self.rows += inputs["input_ids"].numel() + int((inputs["block_labels"] >= 0).sum())
        self.flop += counter.get_total_flops()
        self.start = time.perf_counter()
        return loss

    def on_step_begin(self, args, state, control, **kwargs):
        self.rows, self.flop, self.seconds, self.start = 0, 0, 0.0, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        seconds = self.seconds + time.perf_counter() - self.start
        peak = matmul_peak(self.dtype, self.trainer.model.device)
        rate = self.flop / seconds
        self.steps.append(
            {
                "rows": self.rows,
                "seconds": seconds,
                "rows_per_s": self.rows / seconds,
                "flop": self.flop,
                "peak_flop_per_s": peak,
                "share_of_peak": rate / peak,
            }
        )
        print({name: float(f"{value:.3g}") for name, value in self.steps[-1].items()}, flush=True)


def main() -> int:
    arguments = sys.argv[1:]
    if wants_profile := "--profile" in arguments:
        arguments.remove("--profile")
    parser = HfArgumentParser([DrafterArguments, D3DTrainingArguments], description=__doc__)
    drafter_args, args = parser.parse_args_into_dataclasses(arguments)
    trainer = make_trainer(drafter_args, args)
    if wants_profile:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with profile(activities=activities, record_shapes=True) as profiler:
            trainer.train()
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        print(profiler.key_averages(group_by_input_shape=True).table(sort_by="self_cpu_time_total", row_limit=40))
        return 0
    measure = Measure(trainer, torch.bfloat16 if args.bf16 else torch.float32)
    trainer.add_callback(measure)
    trainer.train()
    steps = measure.steps[WARM_UP:]
    summary = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    print({name: float(f"{value:.3g}") for name, value in summary.items()})
    record = {"schema": 1, "command": command(), "versions": versions(), "hardware": hardware()}
    write_json(Path(args.output_dir) / "measured.json", record | {"median": summary, "steps": steps})
    return 0


if __name__ == "__main__":
    sys.exit(main())
