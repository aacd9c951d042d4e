"""The benchmark: plain and drafted decoding of the same prompts in one run, with everything that a number travels with."""

import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from .acceptance import Acceptance, simulate_acceptance
from .configuration_d3d import D3DDrafterConfig, denoising_parts
from .modeling_d3d import is_adapter
from .prompts import encode_prompt, read_prompts
from .records import command, hardware, versions, write_json
from .report_d3d import DraftReport

# Fields of the drafter's configuration that a command can set.
DRAFTING = ("overlap", "num_successors", "outcome_selection", "overlap_threads", "num_denoising_steps")


def drafting_settings(config) -> dict:
    """Those of `DRAFTING` that a command's settings give; what is `None` stays the drafter's own."""
    return {name: value for name in DRAFTING if (value := getattr(config, name, None)) is not None}


def check_dtype(dtype: str) -> None:
    """Raises `ValueError` unless `dtype` names a type that a target can run in."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"`dtype` is {dtype!r}; allowed are 'float32', 'bfloat16' and 'float16'.")


@dataclass
class BenchmarkConfig:
    """What `d3d bench` measures."""

    target: str = field(metadata={"help": "The target: an id on the Hub or a folder."})
    drafter: str = field(metadata={"help": "The drafter: an id on the Hub or a folder. Adapters go over --target."})
    prompts: str = field(
        metadata={"help": "JSON-lines file whose lines hold `turns`, `messages` or `prompt`, or a folder of them."}
    )
    num_prompts: int = field(default=20, metadata={"help": "Use its first prompts."})
    max_new_tokens: int = field(default=128, metadata={"help": "Length of each answer, in tokens."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16."})
    temperature: float = field(default=0.0, metadata={"help": "0 for greedy decoding, else sampling."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda ..."})
    seed: int = field(default=0, metadata={"help": "Seed of each answer, when sampling."})
    overlap: str = field(
        default="auto", metadata={"help": "Back end of the drafter's passes: auto, inline, thread, stream."}
    )
    num_successors: int | None = field(
        default=None, metadata={"help": "Successors of a packed pass. Default: 16, or 0."}
    )
    outcome_selection: str = field(
        default="likeliest", metadata={"help": "Outcomes prepared for: likeliest or fan_out."}
    )
    num_denoising_steps: int | None = field(
        default=None, metadata={"help": "Passes that draft a block. Default: the drafter's own."}
    )
    num_threads: int | None = field(default=None, metadata={"help": "Intra-op threads of the target. Default: all."})
    overlap_threads: int | None = field(default=None, metadata={"help": "Those of the drafter with --overlap thread."})
    num_warmup_prompts: int = field(default=1, metadata={"help": "Prompts answered first and not counted."})
    output: str | None = field(default=None, metadata={"help": "Write the record to this JSON file."})

    def __post_init__(self):
        check_dtype(self.dtype)
        D3DDrafterConfig(
            **drafting_settings(self) | {"num_denoising_steps": 1}
        )  # refuses what is not allowed, before any model is loaded
        if self.num_prompts < 1 or self.max_new_tokens < 2:
            raise ValueError(
                f"`num_prompts` is {self.num_prompts} (it must be at least 1) and `max_new_tokens` is "
                f"{self.max_new_tokens} (it must be at least 2)."
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"`num_threads` is {self.num_threads}; it must be at least 1.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}; it must be 0 (greedy) or positive.")


class BenchmarkRecord(dict):
    """A benchmark's record, ready for JSON. As text: a table."""

    def __str__(self) -> str:
        setting, summary = self["setting"], self["summary"]
        lines = [
            f"{setting['dataset']}, {setting['num_prompts']} prompts, at most {setting['max_new_tokens']} new tokens, "
            f"temperature {setting['temperature']:g}, {setting['dtype']}, on {self['hardware']['device']}",
            f"  plain                       {summary['target_tok_per_s']:8.2f} tokens/s (median of prompts)",
            f"  drafted                     {summary['drafted_tok_per_s']:8.2f} tokens/s",
            f"  ratio                       {summary['speedup']:8.2f} (median of prompts)",
            f"  mean acceptance length      {summary['mean_acceptance_length']:8.2f} (bonus token counted)",
            f"  simulated                   {summary['simulated_acceptance_length']:8.2f}",
            f"  first token, plain/drafted  {summary['target_first_token_s']:8.3f} / "
            f"{summary['drafted_first_token_s']:.3f} s",
            f"  overhead of a round         {100 * summary['overhead_share']:8.2f} % of the target's forward",
            f"  identical outputs           {summary['identical_outputs']:>8}",
            f"  accepted in a round         {summary['accepted_histogram']} (0, 1, 2 ... draft tokens)",
            f"  overlap                     {setting['overlap']:>8} ({setting['overlap_reason']})",
        ]
        if summary["hit_rate"] is not None:
            lines += [
                f"  successors ready            {100 * summary['hit_rate']:8.1f} % of {summary['outcomes']} verifications, "
                f"{setting['num_successors']} of them {setting['outcome_selection']}",
                f"  overlap efficiency          {summary['overlap_efficiency']:8.2f} (1: only the longer of the two takes time)",
            ]
        return "\n".join(lines)


def run_benchmark(config: BenchmarkConfig) -> BenchmarkRecord:
    """Answers prompts plain and drafted, in turn, and compares.

    Returns:
        [`BenchmarkRecord`]: Settings, versions, the machine, a row for each prompt, and the summary.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(config.num_threads or threads)
        return _run_benchmark(config)
    finally:
        torch.set_num_threads(threads)


def _run_benchmark(config: BenchmarkConfig) -> BenchmarkRecord:
    prompts = read_prompts(config.prompts, config.num_prompts + config.num_warmup_prompts)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=config.dtype).to(config.device)
    drafter = load_drafter(config.drafter, target, **drafting_settings(config))
    encoded = [encode_prompt(tokenizer, prompt["messages"], config.device) for prompt in prompts]
    warmup, counted = encoded[: config.num_warmup_prompts], encoded[config.num_warmup_prompts :]
    if not counted:
        raise ValueError(f"`{config.prompts}` has only {len(prompts)} prompts, all of them used for warm-up.")
    for inputs in warmup:
        measure_prompt(target, drafter, inputs, config)
    rows = [measure_prompt(target, drafter, inputs, config) for inputs in tqdm(counted, desc="prompts")]
    names = [prompt.get("id", i) for i, prompt in enumerate(prompts)][config.num_warmup_prompts :]
    rows = [{"id": name} | row for name, row in zip(names, rows, strict=True)]
    setting = {
        "dataset": Path(config.prompts).stem,
        "num_prompts": len(rows),
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "dtype": config.dtype,
        "attn_implementation": target.config._attn_implementation,
        "batch_size": 1,
        "seed": config.seed,
        **{name: getattr(drafter.config, name) for name in DRAFTING},
        "overlap": drafter.report.mode,
        "overlap_reason": drafter.report.reason,
        "warmup_prompts": config.num_warmup_prompts,
    }
    drafter_config = drafter.config
    record = BenchmarkRecord(
        schema=1,
        date=time.strftime("%Y-%m-%d"),
        command=command(),
        versions=versions(),
        hardware=hardware(),
        target={"id": drafter_config.target_name_or_path, "layers": target.config.get_text_config().num_hidden_layers},
        drafter={
            "id": Path(config.drafter).name,
            "layers": drafter_config.text_config.num_hidden_layers,
            "block_size": drafter_config.block_size,
            "block_attention": drafter_config.block_attention,
            "mask_adapter_rank": drafter_config.mask_adapter_rank,
        },
        setting=setting,
        summary=summarize(rows, drafter_config.block_size),
        prompts=rows,
    )
    if config.output is not None:
        write_json(config.output, record)
    return record


def load_drafter(name: str, target, **settings):
    """A drafter beside its target: adapters over the target's own weights, or a checkpoint with a base or all of its own.

    Args:
        name (`str`): The drafter: an id on the Hub or a folder.
        target (`PreTrainedModel`): The target.
        settings: Fields of the drafter's configuration to set.

    Raises:
        `ValueError`: If there are more denoising steps than draft tokens.
    """
    over_target = is_adapter(name) and AutoConfig.from_pretrained(name).base_model_name_or_path is None
    weights = {"base_model": target} if over_target else {"dtype": target.dtype}
    drafter = AutoModel.from_pretrained(name, **weights, **settings).to(target.device)
    denoising_parts(drafter.config.block_size, drafter.config.num_denoising_steps)  # refuses what cannot be
    return drafter


def measure_prompt(target, drafter, inputs: dict, config: BenchmarkConfig) -> dict:
    """One prompt, plain and drafted: times in seconds, accepted counts, and where the outputs part if they do."""
    settings = {"max_new_tokens": config.max_new_tokens, "do_sample": config.temperature > 0}
    if config.temperature > 0:
        settings |= {"temperature": config.temperature, "top_k": 0}
    prompt_length = inputs["input_ids"].shape[1]
    torch.manual_seed(config.seed)
    plain, plain_s, first_s = timed_generate(target, inputs, settings)
    torch.manual_seed(config.seed)
    with timed_forwards(target, drafter) as forwards:
        drafted, drafted_s, drafted_first_s = timed_generate(target, inputs, settings | {"assistant_model": drafter})
    report = drafter.report
    num_tokens = drafted.shape[1] - prompt_length
    verifying = [s for name, s in forwards if name == "target"][1:]  # the first is its prefill
    drafting = [s for name, s in forwards if name == "drafter"]
    full_s, measured_s = report.full_and_measured_overlap_s
    overhead_s = report.drafting_s + report.drafter_prefill_s + report.verifying_s - sum(verifying) - sum(drafting)
    row = {
        "prompt_tokens": prompt_length,
        "new_tokens": num_tokens,
        "target_s": round(plain_s, 4),
        "target_tok_per_s": (plain.shape[1] - prompt_length) / plain_s,
        "drafted_s": round(drafted_s, 4),
        "drafted_tok_per_s": num_tokens / drafted_s,
        "target_first_token_s": round(first_s, 4),
        "drafted_first_token_s": round(drafted_first_s, 4),
        "verify_forward_s": sum(verifying),
        "draft_forward_s": sum(drafting),
        "overhead_s": overhead_s,
        "waiting_s": report.waiting_s,
        "overlapped_s": report.overlapped_s,
        "full_overlap_s": full_s,
        "overlapping_rounds_s": measured_s,
        "outcomes": report.outcomes,
        "accepted": report.accepted,
        "identical": torch.equal(plain, drafted),
    }
    if config.temperature == 0 and not row["identical"]:
        row["divergence"] = first_divergence(target, plain[0], drafted[0], prompt_length)
    example = {"prompt_ids": drafted[0, :prompt_length].tolist(), "response_ids": drafted[0, prompt_length:].tolist()}
    row["simulated_accepted"] = list(simulate_acceptance(drafter, [example]).rounds)
    return row


class _FirstToken:
    """A streamer that takes the time of the first token."""

    def __init__(self):
        self.puts = 0
        self.at = None

    def put(self, value):
        self.puts += 1
        if self.puts == 2:  # the first is the prompt
            self.at = time.perf_counter()

    def end(self):
        pass


def timed_generate(target, inputs: dict, settings: dict) -> tuple[torch.Tensor, float, float]:
    """The output, the seconds that it took, and the seconds to its first token."""
    streamer = _FirstToken()
    started = time.perf_counter()
    output = target.generate(**inputs, **settings, streamer=streamer)
    return output, time.perf_counter() - started, streamer.at - started


@contextmanager
def timed_forwards(target, drafter):
    """Collects `("target" or "drafter", seconds)` of each forward pass, the drafter's head included."""
    forwards, started = [], {}

    def begin(module, args):
        started[module] = time.perf_counter()

    def end(name):
        def hook(module, args, output):
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            forwards.append((name, time.perf_counter() - started[module]))

        return hook

    modules = [(target, "target"), (drafter, "drafter"), (drafter.get_output_embeddings(), "drafter")]
    handles = [module.register_forward_pre_hook(begin) for module, _ in modules]
    handles += [module.register_forward_hook(end(name)) for module, name in modules]
    try:
        yield forwards
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def first_divergence(target, plain: torch.Tensor, drafted: torch.Tensor, prompt_length: int) -> dict:
    """Where two greedy outputs part, and whether the target itself was undecided there.

    In half precision, verifying several tokens at once rounds differently from one at a time, so near-ties flip. A
    token whose logit is more than 2 % below the largest was no near-tie: that is a fault.

    Args:
        target (`PreTrainedModel`): The target.
        plain (`torch.LongTensor` of shape `(length,)`): Output of plain decoding, prompt included.
        drafted (`torch.LongTensor` of shape `(length,)`): Output of drafted decoding.
        prompt_length (`int`): Tokens of the prompt.

    Returns:
        `dict`: `index` among the new tokens; `relative_gap` to the largest logit, in a fresh pass there, of the less
        likely of the two tokens; whether that is a `tie`.
    """
    length = min(len(plain), len(drafted))
    index = int((plain[:length] == drafted[:length]).long().cumprod(0).sum())
    if index == length:
        return {"index": index - prompt_length, "relative_gap": None, "tie": False}
    logits = target(input_ids=plain[None, :index]).logits[0, -1].float()
    top = float(logits.max())
    gap = (top - float(torch.minimum(logits[plain[index]], logits[drafted[index]]))) / max(abs(top), 1e-9)
    return {"index": index - prompt_length, "relative_gap": gap, "tie": gap <= 0.02}


def summarize(rows: list[dict], block_size: int) -> dict:
    """The summary of the prompts' rows: medians, shares, and the histogram of accepted counts."""
    accepted = Acceptance(tuple(n for row in rows for n in row["accepted"]))
    simulated = Acceptance(tuple(n for row in rows for n in row["simulated_accepted"]))

    outcomes = DraftReport(outcomes=[outcome for row in rows for outcome in row["outcomes"]])
    overlapping_s = sum(row["overlapping_rounds_s"] for row in rows)

    def median(name):
        return statistics.median(row[name] for row in rows)

    return {
        "target_tok_per_s": median("target_tok_per_s"),
        "drafted_tok_per_s": median("drafted_tok_per_s"),
        "speedup": statistics.median(row["drafted_tok_per_s"] / row["target_tok_per_s"] for row in rows),
        "mean_acceptance_length": accepted.mean_length,
        "simulated_acceptance_length": simulated.mean_length,
        "accepted_histogram": accepted.histogram(block_size - 1),
        "target_first_token_s": median("target_first_token_s"),
        "drafted_first_token_s": median("drafted_first_token_s"),
        "verify_forward_s": sum(row["verify_forward_s"] for row in rows) / max(len(accepted.rounds), 1),
        "overhead_share": sum(row["overhead_s"] for row in rows) / sum(row["verify_forward_s"] for row in rows),
        "identical_outputs": f"{sum(row['identical'] for row in rows)}/{len(rows)}",
        "outcomes": len(outcomes.outcomes),
        "hit_rate": outcomes.hit_rate if outcomes.outcomes else None,
        "hit_rate_by_accepted": outcomes.hit_rate_by_accepted,
        "overlap_efficiency": sum(row["full_overlap_s"] for row in rows) / overlapping_s if overlapping_s else None,
        "near_ties": sum(row.get("divergence", {}).get("tie", False) for row in rows),
        "peak_memory_gib": peak_memory_gib(),
    }


def peak_memory_gib() -> float:
    """Peak memory of this process, on the accelerator if there is one, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource  # Unix only

    # Kibibytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
