"""The example scripts: each runs to its end on a tiny pair and says which of its promises hold."""

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


@pytest.mark.slow
def test_ablate(pair_folders, tmp_path, monkeypatch, capsys):
    ablate = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "ablate.py")))
    base = {"block_size": 4, "mask_adapter_rank": 2}
    groups = {
        "Weights": {"exponential": base, "dpace": base | {"loss_weighting": "dpace"}},
        "Block": {"4": base, "4, drafting 3": base | {ablate.MEASURED_BLOCK: 3}},
    }
    monkeypatch.setitem(ablate.main.__globals__, "GROUPS", groups)
    lines = [json.dumps({"prompt_ids": [5, 6, 7], "response_ids": list(range(i, i + 12))}) for i in range(8, 16)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    answers = [{"source": s, "prompt_ids": [5], "response_ids": list(range(i, i + 9))} for s in "xy" for i in (9, 20)]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, answers)))
    options = {"target": pair_folders["target"], "output_dir": tmp_path / "runs", "max_steps": 1, "bf16": "false"}
    options |= {name: tmp_path / f"{name.removesuffix('_data')}.jsonl" for name in ("train_data", "eval_data")}
    words = ["ablate.py", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
    monkeypatch.setattr(sys, "argv", words)
    assert ablate.main() == 0
    text = (tmp_path / "runs" / "ablations.md").read_text()
    assert "| Weights | mean | x | y | against the first | training, first = 1 |" in text
    assert len([line for line in text.splitlines() if line.startswith("| dpace |") and "±" in line]) == 1
    assert (
        text.count("d3d train --target") == 2
        and str(tmp_path) not in (tmp_path / "runs" / "ablations.json").read_text()
    )
    runs = json.loads((tmp_path / "runs" / "ablations.json").read_text())["runs"]
    assert len(runs) == 3 and all(run["lengths"].keys() == {"x", "y"} for run in runs.values())
    monkeypatch.setitem(ablate.main.__globals__, "subprocess", None)  # nothing is trained again
    assert ablate.main() == 0


# Accelerate ignores FSDP on a CPU, so this calls what it would call.
SHARDED_STEP = """
import copy, json, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from transformers_d3d import D3DDrafterModel
from transformers_d3d.acceptance import simulate_acceptance
from transformers_d3d.data import BlockCollator
from transformers_d3d.trainer import training_loss
from transformers_d3d.training_args import D3DTrainingArguments

target, config_file, output = sys.argv[1:]
dist.init_process_group("gloo")
settings = {k.removeprefix("fsdp_"): v for k, v in load_config_from_file(config_file).fsdp_config.items()}
settings |= {"fsdp_version": settings.pop("version"), "cpu_offload": settings.pop("offload_params")}
settings["auto_wrap_policy"] = settings["auto_wrap_policy"].lower()
accelerator = SimpleNamespace(
    state=SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(**settings)),
    device=torch.device("cpu"), torch_device_mesh=None, mixed_precision="no", is_main_process=dist.get_rank() == 0,
)
tokens = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(1)).tolist()
examples = [{"prompt_ids": ids[:4], "response_ids": ids[4:]} for ids in tokens]
args = D3DTrainingArguments(output, use_cpu=True, loss_weighting="uniform")
whole = D3DDrafterModel.from_causal_lm(target, mask_token_id=63, block_size=4)
sharded = fsdp2_prepare_model(accelerator, copy.deepcopy(whole))
training_loss(whole, whole, BlockCollator(4, 100)(examples), args).backward()
training_loss(sharded, sharded, BlockCollator(4, 100)([examples[dist.get_rank()]]), args).backward()
expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
for name, parameter in sharded.named_parameters():
    assert parameter.grad.to_local().numel() < parameter.numel(), name
    torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], atol=1e-6, rtol=1e-4)
assert simulate_acceptance(sharded.eval(), examples) == simulate_acceptance(whole.eval(), examples)
print(f"{type(sharded.model.layers[0]).__name__} of process {dist.get_rank()} agrees")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_step_sharded_by_the_fsdp_configuration_is_that_of_one_process(targets, tokenizer, tmp_path, tied):
    pytest.importorskip("accelerate", minversion="1.16")
    config = copy.deepcopy(targets["llama"].config)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    type(targets["llama"])(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "step.py").write_text(SHARDED_STEP)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words += [str(tmp_path / "step.py"), str(tmp_path / "target"), str(EXAMPLES / "fsdp.yaml"), str(tmp_path / "out")]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("agrees") == 2 and "FSDPLlamaDecoderLayer" in run.stdout
