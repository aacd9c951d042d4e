"""Measures what drafting beside the target is worth on a pair: hit rates, overlap efficiency, and the choice of `auto`.

    python examples/measure_overlap.py --prompts gsm8k.jsonl --output results/overlap.json

Without `--target` and `--drafter` it takes the demo pair. Exits with 1 if a promise does not hold: identical outputs in
every mode, the likeliest outcomes hit more often than SSD's fan-out, an overlap efficiency of 0.85 where target and
drafter hold one core each, and `auto` at most 3 % slower than `inline`.
"""

import argparse
import statistics
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_d3d.benchmark import (
    BenchmarkConfig,
    load_drafter,
    run_benchmark,
    timed_generate,
)
from transformers_d3d.demo import demo_target_folder
from transformers_d3d.prompts import encode_prompt, read_prompts
from transformers_d3d.records import write_json


def hit_rates(common: dict, num_successors: int) -> dict:
    """Each way of choosing outcomes over the same prompts. Inline, since timing has no part in a hit."""
    rates = {}
    for selection in ("likeliest", "fan_out"):
        settings = {"overlap": "inline", "num_successors": num_successors, "outcome_selection": selection}
        record = run_benchmark(BenchmarkConfig(**common, **settings))
        print(f"{selection}\n{record}")
        names = ("hit_rate", "hit_rate_by_accepted", "outcomes", "mean_acceptance_length", "identical_outputs")
        rates[selection] = {name: record["summary"][name] for name in names}
    return rates


def one_core_each(common: dict, num_successors: int) -> dict:
    """The thread back end with one intra-op thread for the target and one for the drafter."""
    settings = {"overlap": "thread", "num_successors": num_successors, "num_threads": 1, "overlap_threads": 1}
    record = run_benchmark(BenchmarkConfig(**common, **settings))
    print(f"one core each, {num_successors} successors\n{record}")
    return dict(record)


def interleaved(common: dict, modes: dict[str, dict]) -> dict:
    """Median over the prompts of each mode's time as a share of `inline`'s, prompt by prompt, in changing order."""
    tokenizer = AutoTokenizer.from_pretrained(common["target"])
    target = AutoModelForCausalLM.from_pretrained(common["target"], dtype=torch.float32)
    drafters = {mode: load_drafter(common["drafter"], target, **settings) for mode, settings in modes.items()}
    settings = {"do_sample": False, "max_new_tokens": common["max_new_tokens"]}
    shares = {mode: [] for mode in modes if mode != "inline"}
    prompts = read_prompts(common["prompts"], common["num_prompts"])
    for i, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        inputs = encode_prompt(tokenizer, prompt["messages"])
        order = list(drafters)[i % len(drafters) :] + list(drafters)[: i % len(drafters)]
        seconds = {
            mode: timed_generate(target, inputs, settings | {"assistant_model": drafters[mode]})[1] for mode in order
        }
        for mode in shares if i > 0 else ():
            shares[mode].append(seconds[mode] / seconds["inline"])
    reports = {mode: drafter.report for mode, drafter in drafters.items()}
    return {
        mode: {
            "time_against_inline": statistics.median(values),
            "mode": reports[mode].mode,
            "reason": reports[mode].reason,
        }
        for mode, values in shares.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a folder or an id; default: the demo target")
    parser.add_argument("--drafter", default="drafters/d3d-smollm2-135m")
    parser.add_argument("--prompts", required=True, help="JSON-lines file of prompts")
    parser.add_argument("--num_prompts", type=int, default=20)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_successors", type=int, default=16)
    parser.add_argument("--output", help="JSON file for the record")
    args = parser.parse_args()

    common = {
        "target": args.target or str(demo_target_folder()),
        "drafter": args.drafter,
        "prompts": args.prompts,
        "num_prompts": args.num_prompts,
        "max_new_tokens": args.max_new_tokens,
    }
    record = one_core_each(common, args.num_successors)
    record["selection"] = hit_rates(common, args.num_successors)
    modes = {"inline": {"overlap": "inline"}, "auto": {"overlap": "auto"}, "thread": {"overlap": "thread"}}
    record["interleaved"] = interleaved(common, modes)
    for mode, row in record["interleaved"].items():
        print(f"  {mode:8} takes {row['time_against_inline']:.3f} of inline's time: {row['mode']} ({row['reason']})")
    if args.output:
        write_json(args.output, record)

    likeliest, fan_out = (record["selection"][name] for name in ("likeliest", "fan_out"))
    outputs = [record["summary"]["identical_outputs"], likeliest["identical_outputs"], fan_out["identical_outputs"]]
    promises = {
        "identical outputs in every mode": all(share == f"{args.num_prompts}/{args.num_prompts}" for share in outputs),
        f"the likeliest outcomes hit more often ({likeliest['hit_rate']:.3f}) than SSD's fan-out "
        f"({fan_out['hit_rate']:.3f})": likeliest["hit_rate"] > fan_out["hit_rate"],
        "an overlap efficiency of 0.85": record["summary"]["overlap_efficiency"] >= 0.85,
        "auto at most 3 % slower than inline": record["interleaved"]["auto"]["time_against_inline"] <= 1.03,
    }
    for promise, holds in promises.items():
        print(f"  {'holds' if holds else 'BROKEN':6}  {promise}")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
