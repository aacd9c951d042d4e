"""The command line: `d3d <command> [options]`. A table of commands; the work is in the modules that it names.

Beside the package and not inside it: importing anything from the package imports Transformers, which takes seconds, and
`d3d --help` should not.
"""

import importlib
import sys

# command: (module, dataclasses of its options, function)
COMMANDS = {
    "bench": ("benchmark", ("BenchmarkConfig",), "run_benchmark"),
    "card": ("hub", ("CardConfig",), "run_card"),
    "convert": ("convert", ("ConvertConfig",), "run_convert"),
    "demo": ("demo", ("DemoConfig",), "run_demo"),
    "generate-data": ("generate_data", ("GenerateDataConfig",), "run_generate_data"),
    "prune": ("pruning", ("PruneConfig", "D3DTrainingArguments"), "run_prune"),
    "pull": ("hub", ("PullConfig",), "run_pull"),
    "push": ("hub", ("PushConfig",), "run_push"),
    "trace": ("trace", ("TraceConfig",), "run_trace"),
    "train": ("trainer", ("DrafterArguments", "D3DTrainingArguments"), "train"),
}
USAGE = f"usage: d3d {{{','.join(COMMANDS)}}} [options]   (d3d <command> --help for its options)"


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 for a failure that the message explains, 2 for wrong usage."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        print(f"d3d: unknown command `{command}`\n{USAGE}", file=sys.stderr)
        return 2
    from huggingface_hub.errors import StrictDataclassError
    from transformers import HfArgumentParser

    module_name, dataclass_names, function_name = COMMANDS[command]
    module = importlib.import_module(f"transformers_d3d.{module_name}")
    parser = HfArgumentParser(
        [getattr(module, name) for name in dataclass_names], prog=f"d3d {command}", allow_abbrev=False
    )
    try:
        *configs, unknown = parser.parse_args_into_dataclasses(
            rest, return_remaining_strings=True, look_for_args_file=False
        )
        if unknown:
            parser.error(f"unknown options: {' '.join(unknown)}")
        result = getattr(module, function_name)(*configs)
    except (ValueError, OSError, ImportError, StrictDataclassError) as error:
        print(f"d3d {command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if result is not None:
        print(result)
    return 0


if __name__ == "__main__":  # `torchrun -m d3d_cli`, for several processes
    raise SystemExit(main())
