"""Measures the demo pair: acceptance, losslessness, overhead and memory, the baseline in the same run.

    python examples/measure_smollm2.py --prompts gsm8k.jsonl --output results/smollm2-gsm8k.json

Exits with 1 if a promise does not hold: identical greedy output in float32, simulated acceptance within 5 % of the
real, an overhead below 5 % of the target's forward, a mean acceptance length above 2.8.
"""

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM

from transformers_d3d.benchmark import BenchmarkConfig, load_drafter, run_benchmark
from transformers_d3d.demo import demo_target_folder
from transformers_d3d.records import write_json


@torch.no_grad()
def cache_bytes_per_token(drafter, lengths=(256, 512, 1024, 2048)) -> dict[int, float]:
    """Bytes of the drafter's cache for each token, at several context lengths that fill its buffers."""
    sizes = {}
    for length in lengths:
        cache = drafter.new_cache(128)
        ids = torch.arange(length, device=drafter.device) % 1000 + 100
        for part in ids.split(64):
            drafter(part.unsqueeze(0), cache=cache)
        sizes[length] = cache.nbytes() / length
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="drafters/d3d-smollm2-135m")
    parser.add_argument("--prompts", required=True, help="JSON-lines file of prompts")
    parser.add_argument("--num_prompts", type=int, default=20)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--bfloat16_prompts", type=int, default=5, help="prompts for the share of identical outputs")
    parser.add_argument("--bfloat16_tokens", type=int, default=64)
    parser.add_argument("--output", help="JSON file for the record")
    args = parser.parse_args()

    target_folder = str(demo_target_folder())
    common = {"target": target_folder, "drafter": args.drafter, "prompts": args.prompts}
    record = run_benchmark(BenchmarkConfig(**common, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens))
    print(record)
    if args.bfloat16_prompts:
        half = run_benchmark(
            BenchmarkConfig(
                **common, num_prompts=args.bfloat16_prompts, max_new_tokens=args.bfloat16_tokens, dtype="bfloat16"
            )
        )
        print(half)
        record["bfloat16"] = half["summary"]
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    sizes = cache_bytes_per_token(load_drafter(args.drafter, target))
    record["cache_bytes_per_token"] = sizes
    print("  cache, bytes for each token ", {length: round(size) for length, size in sizes.items()})
    if args.output:
        write_json(args.output, record)

    summary = record["summary"]
    real, simulated = summary["mean_acceptance_length"], summary["simulated_acceptance_length"]
    promises = {
        "identical greedy output in float32": all(row["identical"] for row in record["prompts"]),
        "mean acceptance length above 2.8": real > 2.8,
        "simulated within 5 % of real": abs(simulated - real) <= 0.05 * real,
        "overhead below 5 % of the target's forward": summary["overhead_share"] < 0.05,
        "the cache grows linearly": max(sizes.values()) <= 1.01 * min(sizes.values()),
    }
    for promise, holds in promises.items():
        print(f"  {'holds' if holds else 'BROKEN':6}  {promise}")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
