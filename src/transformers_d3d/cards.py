"""Model cards: rendered from one template and the records of training, pruning and benchmarks beside a checkpoint.

People's edits live outside the rendered part, or in `card.json`, and survive.
"""

import json
import os
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined

from .modeling_d3d import ADAPTER_FILE, LORA_FILE
from .records import write_text

BEGIN = "<!-- d3d: rendered from the records in this repository; edits between here and the end mark are lost -->"
END = "<!-- d3d: end of the rendered part -->"
TEMPLATE = Path(__file__).with_name("model_card.md")


def card_facts(folder: str | os.PathLike, repo_id: str) -> dict:
    """What the records in a checkpoint's folder say, as the template takes it.

    Reads `config.json`, `card.json` (what no record can know: `license`, for a checkpoint without weights `target`, and
    `reported` numbers), `training.json`, `pruning.json`, and benchmark records `bench*.json`.

    Raises:
        `ValueError`: If there is neither a configuration nor a `card.json`, or a record cannot be read.
    """
    folder = Path(folder)
    config, card = _read(folder / "config.json"), _read(folder / "card.json")
    if not config and not card:
        raise ValueError(f"`{folder}` holds no `config.json` and no `card.json`: there is nothing to make a card of.")
    target = card.get("target") or config.get("target_name_or_path")
    if target is None:
        raise ValueError(
            f'`{folder}` names no target; give it in `card.json`: {{"target": "org/name", "license": "apache-2.0"}}.'
        )
    base = config.get("base_model_name_or_path")
    lora, adapter = (folder / LORA_FILE).exists(), (folder / ADAPTER_FILE).exists()
    kinds = {
        (True, True): "adapters on mask rows over a LoRA of the base model",
        (True, False): "a LoRA over the base model",
        (False, True): f"adapters on mask rows of rank {config.get('mask_adapter_rank')} over the base model",
        (False, False): "all weights",
    }
    trained = bool(config)
    facts = {
        "name": repo_id.rpartition("/")[2],
        "repo_id": repo_id,
        "target": target,
        "base": base or (target if lora or adapter else None),
        "base_argument": ", base_model=target" if (lora or adapter) and base is None else "",
        "kind": kinds[lora, adapter] if trained else "to be trained",
        "license": card.get("license", "see the target's"),
        "trained": trained,
        "reported": card.get("reported", []),
        "config": None,
        "benchmarks": [_benchmark(_read(path)) for path in sorted(folder.glob("bench*.json"))],
        "pruned": _pruning(_read(folder / "pruning.json")),
        "training": None,
        "pictures": [path.name for path in folder.glob("*.png")],
        "versions": None,
    }
    if trained:
        facts["config"] = {"layers": config["text_config"]["num_hidden_layers"]} | {
            name: config[name] for name in ("block_size", "block_attention", "mask_token_id")
        }
    if training := _read(folder / "training.json"):
        facts["training"] = {
            "steps": training["steps"],
            "data": training["data"]["train"],
            "examples": training["data"]["train_examples"],
            "minutes": round(training["seconds"] / 60),
            "device": _device(training["hardware"]),
            "acceptance_length": f"{training['final'].get('eval_acceptance_length', float('nan')):.2f}",
            "command": training["command"],
        }
        facts["versions"] = ", ".join(f"{name} {number}" for name, number in training["versions"].items())
    return facts


def render_card(folder: str | os.PathLike, repo_id: str, existing: str | None = None) -> str:
    """The card of a checkpoint.

    Args:
        folder (`str` or `os.PathLike`): The checkpoint with its records.
        repo_id (`str`): Its id on the Hub, for the examples.
        existing (`str`, *optional*): The card that is there: what people wrote around the rendered part, and added to its
            metadata, is kept.

    Raises:
        `ValueError`: If records are missing, or the metadata of the existing card are not valid YAML.
    """
    facts = card_facts(folder, repo_id)
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    body = f"{BEGIN}\n{environment.from_string(TEMPLATE.read_text(encoding='utf-8')).render(facts).strip()}\n{END}\n"
    metadata = ModelCardData(
        base_model=facts["base"] or facts["target"],
        library_name="transformers",
        pipeline_tag="text-generation",
        license=facts["license"] if facts["license"] != "see the target's" else None,
        tags=["speculative-decoding", "d3d", "drafter"],
    ).to_dict()
    if existing:
        try:
            old = ModelCard(existing, ignore_metadata_errors=False)
            theirs, text = old.data.to_dict(), old.text
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(
                f"The metadata of the card of `{repo_id}` are not valid YAML ({' '.join(str(error).split())}); mend the "
                "lines between the first two `---` of its README.md first. Nothing was changed."
            ) from error
        tags = [*metadata["tags"], *(tag for tag in theirs.get("tags") or [] if tag not in metadata["tags"])]
        metadata = theirs | metadata | {"tags": tags}
        before, found, rest = text.partition(BEGIN)
        if found:
            body = f"{before.lstrip()}{body}{rest.partition(END)[2].lstrip()}"
        else:  # a card of people's own: all of it stays
            body = f"{text.strip()}\n\n{body}"
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def write_card(folder: str | os.PathLike, repo_id: str, existing: str | None = None) -> Path:
    """Renders the card of a checkpoint into its folder, over the one that is there or `existing`."""
    path = Path(folder) / "README.md"
    if existing is None and path.exists():
        existing = path.read_text(encoding="utf-8")
    text = render_card(folder, repo_id, existing)
    write_text(path, text)
    return path


def _read(path: Path) -> dict:
    """A record, or an empty one if there is none."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path}` is no JSON ({error}); make it again or take it away.") from error


def _device(hardware: dict) -> str:
    return f"{hardware['device']}, {hardware['cores']} cores" if "cores" in hardware else hardware["device"]


def _benchmark(record: dict) -> dict:
    setting, summary = record["setting"], record["summary"]
    return {
        "title": f"Measured: {setting['dataset']}",
        "rows": [
            ("mean acceptance length (bonus token counted)", f"{summary['mean_acceptance_length']:.2f}"),
            ("plain decoding", f"{summary['target_tok_per_s']:.1f} tokens/s"),
            ("with this drafter", f"{summary['drafted_tok_per_s']:.1f} tokens/s"),
            ("ratio", f"{summary['speedup']:.2f}"),
            ("identical outputs", summary["identical_outputs"]),
        ],
        "setting": (
            f"{setting['num_prompts']} prompts, at most {setting['max_new_tokens']} new tokens, temperature "
            f"{setting['temperature']:g}, {setting['dtype']}, overlap {setting['overlap']}, on {_device(record['hardware'])}: "
            f"`{record['command']}`"
        ),
    }


def _pruning(report: dict) -> dict | None:
    if not report:
        return None

    def share(step):
        if not step["evaluation"]:
            return "not measured"
        return f"{100 * step['evaluation']['mean'] / report['before']['evaluation']['mean']:.1f} %"

    counts = report["responses"]["calibration"]
    return {
        "before": len(report["layers_before"]),
        "removed": sorted(step["layer"] for step in report["steps"]),
        "method": report["method"],
        "responses": ", ".join(f"{count} of {source}" for source, count in counts.items()),
        "steps": [
            {"layer": step["layer"], "retained": f"{100 * step['retained']:.1f} %", "evaluation": share(step)}
            for step in report["steps"]
        ],
    }
