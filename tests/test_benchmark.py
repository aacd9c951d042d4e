"""The benchmark: its record adds up, and on the real pair it finds what the project promises."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from transformers_d3d.benchmark import BenchmarkConfig, first_divergence, read_prompts, run_benchmark, summarize

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "bench" / "gsm8k.jsonl"


@pytest.fixture
def pair(pair_folders, tmp_path):
    """A tiny pair, and a file of prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "turns": ["abc def"[i:]]}) + "\n" for i in range(4)))
    return pair_folders | {"prompts": str(prompts)}


def test_a_record_adds_up(pair, tmp_path):
    output = tmp_path / "record.json"
    record = run_benchmark(BenchmarkConfig(**pair, num_prompts=3, max_new_tokens=12, output=str(output)))
    assert json.loads(output.read_text()) == json.loads(json.dumps(record))
    assert [row["id"] for row in record["prompts"]] == ["p1", "p2", "p3"]
    for row in record["prompts"]:
        assert row["identical"] and row["new_tokens"] == 12
        assert sum(row["accepted"]) + len(row["accepted"]) == 11
        assert row["accepted"] == row["simulated_accepted"]
        assert 0 < row["overhead_s"] < row["drafted_s"]
    summary = record["summary"]
    assert summary["identical_outputs"] == "3/3"
    rounds = [n for row in record["prompts"] for n in row["accepted"]]
    assert summary["mean_acceptance_length"] == 1 + sum(rounds) / len(rounds)
    assert sum(summary["accepted_histogram"]) == len(rounds)
    assert str(tmp_path) not in json.dumps(record)
    assert "identical outputs" in str(record)


def test_overlap_is_measured_too(pair):
    threads = torch.get_num_threads()
    settings = {"overlap": "thread", "num_successors": 30, "overlap_threads": 1, "num_threads": 2}
    record = run_benchmark(BenchmarkConfig(**pair, num_prompts=2, max_new_tokens=20, **settings))
    assert torch.get_num_threads() == threads
    summary, setting = record["summary"], record["setting"]
    assert setting["overlap"] == "thread" and record["hardware"]["threads"] == 2
    assert summary["identical_outputs"] == "2/2"
    assert summary["outcomes"] == sum(len(row["outcomes"]) for row in record["prompts"]) > 0
    assert 0 < summary["hit_rate"] <= 1 and 0 < summary["overlap_efficiency"] < 1
    assert "successors ready" in str(record)
    turns = run_benchmark(BenchmarkConfig(**pair, num_prompts=1, max_new_tokens=8))
    assert turns["summary"]["hit_rate"] is None and turns["setting"]["overlap"] == "inline"
    assert "share the cpu" in str(turns)


def test_sampling_is_measured_too(pair):
    record = run_benchmark(BenchmarkConfig(**pair, num_prompts=1, max_new_tokens=8, temperature=1.0))
    assert record["summary"]["mean_acceptance_length"] >= 1


def test_what_a_command_leaves_out_is_the_drafters_own(pair, tmp_path):
    def steps(**settings):
        record = run_benchmark(BenchmarkConfig(**pair, num_prompts=1, max_new_tokens=8, **settings))
        assert record["summary"]["identical_outputs"] == "1/1"
        return record["setting"]["num_denoising_steps"], record["setting"]["num_successors"]

    config_file = Path(pair["drafter"]) / "config.json"
    config = json.loads(config_file.read_text()) | {"num_denoising_steps": 2, "num_successors": 3}
    config_file.write_text(json.dumps(config))
    assert steps() == (2, 3)
    assert steps(num_denoising_steps=3, num_successors=1) == (3, 1)
    with pytest.raises(ValueError, match="`num_denoising_steps` is 4; it must be between 1 and .* here 3"):
        steps(num_denoising_steps=4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"temperature": -1}, "temperature"),
        ({"overlap": "sometimes"}, "overlap"),
        ({"num_threads": 0}, "num_threads"),
        ({"prompts": "nowhere.jsonl"}, "nowhere"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_settings(pair, change, match):
    with pytest.raises((ValueError, FileNotFoundError, StrictDataclassError), match=match):
        run_benchmark(BenchmarkConfig(**pair | change))


@pytest.mark.parametrize("line", ["no json", "{}", '{"turns": []}', '{"turns": [3]}', "[1]"])
def test_bad_prompts_name_the_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a"]}\n' + line + "\n")
    with pytest.raises(ValueError, match="prompts.jsonl, line 2.*turns"):
        read_prompts(str(path), 5)


@pytest.mark.parametrize(("logit", "tie"), [(9.9, True), (9.0, False)], ids=["near-tie", "fault"])
def test_first_divergence_tells_a_tie_from_a_fault(logit, tie):
    def target(input_ids):
        logits = torch.zeros(1, input_ids.shape[1], 8)
        logits[0, -1, 5], logits[0, -1, 6] = 10.0, logit
        return SimpleNamespace(logits=logits)

    plain, drafted = torch.tensor([1, 2, 3, 5, 7]), torch.tensor([1, 2, 3, 6, 7])
    found = first_divergence(target, plain, drafted, prompt_length=2)
    assert (
        found["index"] == 1
        and found["relative_gap"] == pytest.approx((10 - logit) / 10, rel=1e-4)
        and found["tie"] is tie
    )


def test_an_output_that_is_too_short_is_no_tie():
    found = first_divergence(None, torch.tensor([1, 2, 3]), torch.tensor([1, 2]), prompt_length=1)
    assert found == {"index": 1, "relative_gap": None, "tie": False}


def test_overhead_and_ratio_come_from_the_rows():
    row = {
        "accepted": [2, 0], "simulated_accepted": [1, 1, 0], "target_tok_per_s": 10.0, "drafted_tok_per_s": 15.0,
        "target_first_token_s": 0.1, "drafted_first_token_s": 0.2, "verify_forward_s": 2.0, "overhead_s": 0.1,
        "identical": True, "outcomes": [(2, True), (0, False)], "full_overlap_s": 0.8, "overlapping_rounds_s": 1.0,
    }  # fmt: skip
    summary = summarize([row, row | {"drafted_tok_per_s": 25.0, "identical": False}], block_size=4)
    assert summary["speedup"] == 2.0 and summary["overhead_share"] == 0.05
    assert summary["mean_acceptance_length"] == 2.0 and summary["simulated_acceptance_length"] == pytest.approx(5 / 3)
    assert summary["hit_rate"] == 0.5 and summary["hit_rate_by_accepted"] == {0: 0.0, 2: 1.0}
    assert summary["overlap_efficiency"] == pytest.approx(0.8)
    assert summary["accepted_histogram"] == [2, 0, 2, 0] and summary["identical_outputs"] == "1/2"


@pytest.mark.slow
def test_the_real_pair():
    """Twenty GSM8K prompts, shortened: identical in float32, and as many tokens accepted as simulated."""
    from transformers_d3d.demo import demo_target_folder

    if not GSM8K.is_file():
        pytest.skip("the benchmark's prompts are not beside this checkout")
    torch.set_num_threads(2)
    try:
        record = run_benchmark(
            BenchmarkConfig(
                target=str(demo_target_folder()),
                drafter=str(ROOT / "drafters" / "d3d-smollm2-135m"),
                prompts=str(GSM8K),
                num_prompts=20,
                max_new_tokens=28,
            )
        )
    finally:
        torch.set_num_threads(1)
    summary = record["summary"]
    assert summary["identical_outputs"] == "20/20"
    assert summary["mean_acceptance_length"] > 2.6
    assert summary["simulated_acceptance_length"] == pytest.approx(summary["mean_acceptance_length"], rel=0.05)
    assert all(row["accepted"][0] <= 7 for row in record["prompts"])
