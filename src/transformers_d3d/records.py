"""What a measured number travels with: versions, the machine, and an atomic file."""

import json
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import torch


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware (AMX, AVX512_BF16, or Arm's BF16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() in ("arm64", "aarch64")
    return any(flag in flags for flag in ("amx_bf16", "avx512_bf16", " bf16"))


def versions() -> dict[str, str]:
    """Versions of the packages that a number depends on."""
    names = ("transformers-d3d", "transformers", "torch", "peft", "accelerate")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def command() -> str:
    """The command line that runs. Of absolute paths only the name is kept: the rest means nothing on another machine."""
    return shlex.join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)


def hardware() -> dict[str, str | int]:
    """The machine, in words: accelerator or processor, cores, threads."""
    if torch.cuda.is_available():
        return {"device": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {
        "device": name,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "bfloat16_instructions": cpu_has_bfloat16(),
    }


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: str | os.PathLike, record: dict) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(record, indent=1) + "\n")
