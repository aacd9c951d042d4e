"""The example scripts: each runs to its end on a tiny pair and says which of its promises hold."""

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(monkeypatch, name, *arguments):
    """The exit status of a script, run in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return stopped.value.code


@pytest.fixture
def pair(pair_folders, tmp_path):
    """Options that name a tiny pair and a file of prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": ["abc def"[i:]]}) + "\n" for i in range(4)))
    options = pair_folders | {"prompts": prompts}
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_measure_overlap(pair, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    status = run(
        monkeypatch, "measure_overlap.py", *pair, "--num_prompts", 2, "--max_new_tokens", 12, "--output", output
    )
    text = capsys.readouterr().out
    # Whether the promises on times hold is no matter here; the exit status must say so.
    assert "holds   identical outputs in every mode" in text
    assert status == ("BROKEN" in text)
    record = json.loads(output.read_text())
    assert record["setting"]["overlap"] == "thread" and record["hardware"]["threads"] == 1
    assert set(record["selection"]) == {"likeliest", "fan_out"}
    assert set(record["interleaved"]) == {"auto", "thread"}
    assert record["interleaved"]["auto"]["mode"] == "inline"
    assert all(rates["outcomes"] > 0 for rates in record["selection"].values())
    assert str(tmp_path) not in output.read_text()


def test_accelerate_takes_the_fsdp_configuration():
    from accelerate.commands.config.config_args import load_config_from_file

    settings = load_config_from_file(str(EXAMPLES / "fsdp.yaml"))
    assert settings.distributed_type == "FSDP"
    assert settings.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    # `training_loss` calls the head after the forward: resharded weights fail there.
    assert settings.fsdp_config["fsdp_reshard_after_forward"] is False


def test_measure_training(pair_folders, tmp_path, monkeypatch, capsys):
    lines = [json.dumps({"prompt_ids": [5, 6, 7], "response_ids": list(range(i, i + 12))}) for i in range(8, 16)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    options = {
        "target": pair_folders["target"],
        "train_data": tmp_path / "train.jsonl",
        "output_dir": tmp_path / "run",
    }
    options |= {"max_steps": 4, "use_cpu": "true", "save_strategy": "no", "disable_tqdm": "true"}
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert run(monkeypatch, "measure_training.py", *arguments) == 0
    record = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert len(record["steps"]) == 2
    for step in record["steps"]:
        assert step["rows"] >= 2 * 15 and step["flop"] > 0
        assert step["rows_per_s"] == pytest.approx(step["rows"] / step["seconds"])
        assert step["share_of_peak"] == pytest.approx(step["flop"] / step["seconds"] / step["peak_flop_per_s"])
    assert str(tmp_path) not in (tmp_path / "run" / "measured.json").read_text()
