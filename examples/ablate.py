"""Trains small drafters that differ in one choice, with equal budgets, and tabulates what each choice is worth.

    python examples/ablate.py --target HuggingFaceTB/SmolLM2-135M-Instruct --train_data train.jsonl.gz \\
      --eval_data eval.jsonl.gz --output_dir ablations --max_steps 150

Every run is a `d3d train` of its own, two at a time with half of the cores each (`--jobs`). The evaluation answers are
taken by their `source`, as many of each. A run that was finished is not run again, so that a stopped table goes on. Writes
`ablations.md` and `ablations.json` in the output folder.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from transformers_d3d.acceptance import simulate_acceptance
from transformers_d3d.benchmark import load_drafter
from transformers_d3d.json_lines import read_json_lines
from transformers_d3d.records import command, hardware, versions, write_json

ADAPTERS = {"mask_adapter_rank": 64, "mask_adapter_scale": 2.0, "learning_rate": 1e-3}
LORA = {"lora_rank": 64, "lora_alpha": 128, "learning_rate": 2e-4}
BASE = {"block_size": 8, "block_attention": "causal", "loss_weighting": "exponential", **ADAPTERS}
ALL_ROWS = {key: BASE[key] for key in ("block_size", "block_attention", "loss_weighting")}
MEASURED_BLOCK = "measured_block"  # not a setting of the training: the block size that drafts afterwards
WIDE = BASE | {"block_size": 16, "loss_gamma": 7.0, "num_anchors": 24}
# What is compared with what: the first of each group is the choice that the others are measured against.
GROUPS = {
    "Attention inside a block": {
        "causal": BASE,
        "bidirectional": BASE | {"block_attention": "bidirectional"},
    },
    "Position weights": {
        "exponential": BASE,
        "dpace": BASE | {"loss_weighting": "dpace"},
        "uniform": BASE | {"loss_weighting": "uniform"},
        "uniform, later offsets drawn less often": BASE | {"loss_weighting": "uniform", "offset_keep_rate": 0.75},
    },
    "Block size": {
        "8": BASE,
        "16, as many mask rows": WIDE,
        "16, as many mask rows, drafting 8": WIDE | {MEASURED_BLOCK: 8},
    },
    "What is trained": {
        "adapters on mask rows, rank 64": BASE,
        "adapters on mask rows, rank 16": BASE | {"mask_adapter_rank": 16},
        "LoRA on all rows, rank 64": ALL_ROWS | LORA,
        "LoRA on all rows, rank 64, rate 1e-3": ALL_ROWS | LORA | {"learning_rate": 1e-3},
        "LoRA on all rows, rank 16": ALL_ROWS | LORA | {"lora_rank": 16, "lora_alpha": 32},
        "all weights": ALL_ROWS | {"mask_adapter_rank": 0, "learning_rate": 1e-4},
    },
    "Autoregressive loss (LoRA on all rows, rank 64)": {
        "0.2": ALL_ROWS | LORA,
        "0": ALL_ROWS | LORA | {"autoregressive_weight": 0.0},
        "0.5": ALL_ROWS | LORA | {"autoregressive_weight": 0.5},
        "1": ALL_ROWS | LORA | {"autoregressive_weight": 1.0},
    },
    "Divergence from the target in the loss": {
        "0": BASE,
        "0.5": BASE | {"divergence_weight": 0.5},
    },
}


def name_of(settings: dict) -> str:
    """A folder's name: what differs from the base, or `base`."""
    different = {key: value for key, value in settings.items() if BASE.get(key) != value}
    return "-".join(f"{key}={value}" for key, value in sorted(different.items())) or "base"


def trained(settings: dict) -> dict:
    """The settings of the training alone."""
    return {key: value for key, value in settings.items() if key != MEASURED_BLOCK}


def options(args: argparse.Namespace, settings: dict) -> list[str]:
    """The options of `d3d train` for a run."""
    common = {
        "target": args.target,
        "train_data": args.train_data,
        "output_dir": Path(args.output_dir) / name_of(settings),
        "max_steps": args.max_steps,
        "num_anchors": args.num_anchors,
        "bf16": args.bf16,
        "use_cpu": args.use_cpu,
        "save_strategy": "no",
    }
    return [word for key, value in (common | settings).items() for word in (f"--{key}", str(value))]


def train(args: argparse.Namespace, settings: dict) -> Path:
    """Trains a drafter unless it is there; returns its folder."""
    folder = Path(args.output_dir) / name_of(settings)
    if not (folder / "training.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        threads = str(max((os.cpu_count() or 1) // args.jobs, 1))
        with (folder / "log").open("w") as log:
            run = subprocess.run(
                [sys.executable, "-m", "d3d_cli", "train", *options(args, settings)],
                env=os.environ | {"OMP_NUM_THREADS": threads},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if run.returncode:
            raise RuntimeError(f"`{name_of(settings)}` failed with status {run.returncode}; see {folder / 'log'}.")
    return folder


def measure(folder: Path, target, answers: dict[str, list[dict]], block_size: int | None) -> dict:
    """Acceptance length on the evaluation answers: the mean of each source, and of each answer for comparisons."""
    measured = folder / f"measured{block_size or ''}.json"
    if measured.is_file():
        return json.loads(measured.read_text())
    drafter = load_drafter(str(folder), target).eval()
    drafter.config.block_size = block_size or drafter.config.block_size
    lengths = {}
    for source, examples in answers.items():
        whole = [simulate_acceptance(drafter, [example]) for example in examples]
        rounds = [length for acceptance in whole for length in acceptance.rounds]
        lengths[source] = {
            "acceptance_length": 1 + statistics.mean(rounds),
            "by_answer": [acceptance.mean_length for acceptance in whole],
        }
    training = json.loads((folder / "training.json").read_text())
    result = {"lengths": lengths, "seconds": training["seconds"], "command": training["command"]}
    write_json(measured, result)
    return result


def mean_length(result: dict) -> float:
    """The mean of the sources' acceptance lengths."""
    return statistics.mean(source["acceptance_length"] for source in result["lengths"].values())


def difference(result: dict, first: dict) -> tuple[float, float]:
    """The mean difference of the answers' acceptance lengths, and its standard error."""
    pairs = [
        own - other
        for source, lengths in result["lengths"].items()
        for own, other in zip(lengths["by_answer"], first["lengths"][source]["by_answer"], strict=True)
    ]
    return statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")


def table(results: dict[str, dict], sources: list[str]) -> str:
    """The table, in Markdown."""
    lines = []
    for group, runs in GROUPS.items():
        first = results[name_of(next(iter(runs.values())))]
        lines += [f"| {group} | mean | {' | '.join(sources)} | against the first | training, first = 1 |"]
        lines += ["| --- |" + " ---: |" * (len(sources) + 3)]
        for label, settings in runs.items():
            result = results[name_of(settings)]
            by_source = " | ".join(f"{result['lengths'][source]['acceptance_length']:.2f}" for source in sources)
            gain, error = difference(result, first)
            against = "" if result is first else f"{gain:+.2f} ± {error:.2f}"
            time = result["seconds"] / first["seconds"]
            lines.append(f"| {label} | {mean_length(result):.2f} | {by_source} | {against} | {time:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "train_data", "eval_data", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--max_steps", type=int, default=150)
    parser.add_argument("--num_anchors", type=int, default=48)
    parser.add_argument("--num_eval_examples", type=int, default=8, help="evaluation answers of each source")
    parser.add_argument("--bf16", default="true")
    parser.add_argument("--use_cpu", default="true")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    args = parser.parse_args()

    answers = {}
    for _, line in read_json_lines(Path(args.eval_data)):
        if "response_ids" in line:
            answers.setdefault(line.get("source", "all"), []).append(line)
    answers = {source: examples[: args.num_eval_examples] for source, examples in answers.items()}
    runs = {name_of(settings): settings for group in GROUPS.values() for settings in group.values()}
    trainings = {name_of(trained(settings)): trained(settings) for settings in runs.values()}
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    results = {}
    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(trainings), desc="trainings") as bar:
        for folder in pool.map(lambda settings: train(args, settings), trainings.values()):
            bar.update()
            bar.write(f"{folder.name} is trained")
    for name, settings in tqdm(runs.items(), desc="measured"):
        folder = Path(args.output_dir) / name_of(trained(settings))
        results[name] = measure(folder, target, answers, settings.get(MEASURED_BLOCK))
    text = table(results, list(answers))
    record = {"schema": 1, "command": command(), "versions": versions(), "hardware": hardware(), "runs": results}
    write_json(Path(args.output_dir) / "ablations.json", record)
    commands = "\n".join(f"d3d train {shlex.join(options(args, settings))}" for settings in trainings.values())
    (Path(args.output_dir) / "ablations.md").write_text(f"{text}\n```bash\n{commands}\n```\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
