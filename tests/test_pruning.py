"""Pruning: which layer goes, when it stops, what is kept of it, and going on after a kill."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from transformers_d3d import pruning
from transformers_d3d.acceptance import simulate_acceptance
from transformers_d3d.layers import skipped_layers
from transformers_d3d.pruning import (
    DraftingCost,
    Journal,
    PruneConfig,
    Responses,
    interval,
    lengths_by_source,
    measure_cost,
    measure_responses,
    prune_drafter,
    resampled_lengths,
    run_prune,
)
from transformers_d3d.training_args import D3DTrainingArguments

ROOT = Path(__file__).parents[1]
NUM_LAYERS, IDLE = 6, (1, 3)


@pytest.fixture(scope="module")
def target():
    """A target of six layers, two of which do nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    for i in IDLE:
        nn.init.zeros_(target.model.layers[i].self_attn.o_proj.weight)
        nn.init.zeros_(target.model.layers[i].mlp.down_proj.weight)
    return target


@pytest.fixture(scope="module")
def responses(target):
    """The target's own greedy answers, from two sources."""
    prompts = torch.randint(3, 60, (12, 4), generator=torch.Generator().manual_seed(0))
    answers = target.generate(prompts, max_new_tokens=20, do_sample=False, pad_token_id=0).tolist()
    return [{"prompt_ids": ids[:4], "response_ids": ids[4:], "source": "ab"[i % 2]} for i, ids in enumerate(answers)]


@pytest.fixture
def drafter(target, make_perturbed):
    return make_perturbed(target)


# Measuring


def test_batches_hold_as_many_of_each_source(responses):
    batched = Responses(responses[:7], 2)
    assert [len(batch) for batch in batched.batches] == [4, 3]
    assert batched.sources == ["a", "a", "b", "b", "a", "a", "b"]
    assert sorted(map(str, batched.examples)) == sorted(map(str, responses[:7]))
    assert Responses([], 2).batches == []


def test_lengths_are_those_of_the_simulation(drafter, responses):
    rows = measure_responses(drafter, (2,), responses)
    lengths = lengths_by_source(rows, [example["source"] for example in responses])
    with skipped_layers(drafter, [2]):
        for source in "ab":
            own = [example for example in responses if example["source"] == source]
            assert lengths[source] == pytest.approx(simulate_acceptance(drafter, own).mean_length)
    assert lengths["mean"] == pytest.approx((lengths["a"] + lengths["b"]) / 2)


def test_a_response_of_one_token_counts_as_nothing(drafter, responses):
    short = {"prompt_ids": [3, 4], "response_ids": [5], "source": "a"}
    rows = measure_responses(drafter, (), [short, responses[0]])
    assert rows[0] == [0, 0, 0.0]
    assert lengths_by_source(rows, ["a", "a"])["mean"] == rows[1][1] / rows[1][0]


def test_resampling_agrees_with_a_naive_twin():
    generator = torch.Generator().manual_seed(3)
    rows = [[[r, r + t, 0.0] for r, t in torch.randint(1, 9, (40, 2), generator=generator).tolist()] for _ in range(2)]
    rows[1] = [[r, 2 * n, 0.0] for r, n, _ in rows[0]]  # twice as long on every resample
    drawn = resampled_lengths(rows, ["a"] * 30 + ["b"] * 10)
    torch.testing.assert_close(drawn[1], 2 * drawn[0])
    spread = []
    for source in (slice(0, 30), slice(30, 40)):  # the delta method for a ratio of sums
        r, n = torch.tensor(rows[0][source], dtype=torch.float64)[:, :2].T
        spread.append(((n - n.sum() / r.sum() * r).var() / len(r)).sqrt() / r.mean())
    assert drawn[0].std().item() == pytest.approx(math.hypot(*spread) / 2, rel=0.15)
    low, high = interval(drawn[0], 0.9)
    assert ((drawn[0] >= low) & (drawn[0] <= high)).double().mean().item() == pytest.approx(0.9, abs=0.01)


def test_the_cost_of_a_round(drafter, target):
    cost = measure_cost(drafter, target, context=16, repeats=3)
    assert len(cost.layers) == NUM_LAYERS and min(cost.layers) > 0 and cost.verify > 0 and cost.rest >= 0
    assert cost.draft((1, 2)) == pytest.approx(cost.draft(()) - cost.layers[1] - cost.layers[2])
    assert cost.round((1,)) == pytest.approx(cost.draft((1,)) + cost.verify)
    assert not any(layer._forward_hooks for layer in drafter.model.layers)


# Removing


def test_layers_that_do_nothing_go_first(drafter, responses, target):
    report = prune_drafter(drafter, responses, num_layers=3, evaluation=responses[:4], batch_size=3)
    first, second, third = report["steps"]
    assert {first["layer"], second["layer"]} == set(IDLE)
    assert set(first["tied_with"]) == set(IDLE) - {first["layer"]}
    assert first["retained"] == second["retained"] == 1.0 and first["retained_interval"] == (1.0, 1.0)
    assert first["evaluation"] == report["before"]["evaluation"]
    assert (
        third["retained"] < 1 and third["retained_interval"][0] <= third["retained"] <= third["retained_interval"][1]
    )
    assert [len(step["candidates"]) for step in report["steps"]] == [6, 5, 4]
    assert any(candidate["responses"] < len(responses) for candidate in first["candidates"])  # dropped early
    assert report["stopped_because"] == "3 layers are removed"
    kept = [i for i in range(NUM_LAYERS) if i not in {step["layer"] for step in report["steps"]}]
    assert report["kept_layers"] == drafter.config.kept_layers == kept and len(drafter.model.layers) == 3
    assert [removal["layer"] for removal in drafter.config.pruning] == [step["layer"] for step in report["steps"]]
    left = lengths_by_source(measure_responses(drafter, (), responses), [r["source"] for r in responses])
    assert left["mean"] == pytest.approx(third["calibration"]["mean"])
    json.dumps(report)


def test_what_is_pruned_loads_and_is_pruned_again(drafter, responses, tmp_path):
    prune_drafter(drafter, responses, num_layers=2)
    drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.config.pruning == drafter.config.pruning
    report = prune_drafter(loaded, responses, num_layers=1, method="last")
    assert report["layers_before"] == [0, 2, 4, 5] and report["steps"][0]["layer"] == 5
    assert loaded.config.kept_layers == [0, 2, 4]
    assert [removal["layer"] for removal in loaded.config.pruning][2:] == [5]


def test_it_stops_before_too_little_is_left(drafter, responses):
    report = prune_drafter(drafter, responses, min_retained=0.999)
    assert {step["layer"] for step in report["steps"]} == set(IDLE)
    assert "% of the acceptance length would be left" in report["stopped_because"]
    assert drafter.config.kept_layers == [0, 2, 4, 5]


def test_it_stops_at_the_best_speed_and_weighs_time(drafter, responses):
    # The second idle layer costs nothing, so that its removal gains no speed, and the first is the dearest.
    cost = DraftingCost((0.1, 1.0, 0.1, 0.0, 0.1, 0.1), 0.1, 1.0)
    report = prune_drafter(drafter, responses, cost=cost)
    assert [step["layer"] for step in report["steps"]] == [1]
    assert report["steps"][0]["predicted_speedup"] == pytest.approx(2.5 / 1.5)
    assert report["steps"][0]["tied_with"] == []
    assert "would not get faster" in report["stopped_because"]


@pytest.mark.parametrize("method", ["one_shot", "similarity", "last"])
def test_fixed_orders(drafter, responses, method):
    report = prune_drafter(drafter, responses, num_layers=2, method=method)
    layers = [step["layer"] for step in report["steps"]]
    assert layers == [5, 4] if method == "last" else set(layers) == set(IDLE)


def test_healing(drafter, responses):
    heals = []

    def heal(healed, number):
        heals.append((number, len(healed.model.layers)))
        assert healed is drafter and healed.config.text_config.num_hidden_layers == len(healed.model.layers)
        healed.lm_head.weight.data.mul_(1.0 if number < 3 else -1.0)  # the third does harm

    report = prune_drafter(drafter, responses, min_retained=0.9, num_layers=4, heal=heal)
    assert heals == [(1, 5), (2, 4), (3, 3)]
    assert [step["unhealed"] for step in report["steps"]] == [step["calibration"] for step in report["steps"]]
    assert len(report["steps"]) == 2
    left = lengths_by_source(measure_responses(drafter, (), responses), [r["source"] for r in responses])
    assert left["mean"] == pytest.approx(report["steps"][-1]["calibration"]["mean"])  # the harm is undone


def test_healing_now_and_then(drafter, responses):
    heals = []
    prune_drafter(
        drafter, responses, num_layers=5, heal=lambda d, n: heals.append((n, len(d.model.layers))), heal_every=2
    )
    assert heals == [(1, 4), (2, 2)]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "Nothing tells when to stop"),
        ({"num_layers": 6}, "`num_layers` is 6; the drafter has 6 layers, of which 1 to 5"),
        ({"num_layers": 0}, "`num_layers` is 0"),
        ({"min_retained": 1.5}, "`min_retained` is 1.5"),
        ({"num_layers": 1, "method": "best"}, "`method` is 'best'; allowed are 'progressive'"),
        ({"num_layers": 1, "heal_every": 0}, "`heal_every` is 0"),
        ({"num_layers": 1, "confidence": 1.0}, "`confidence` is 1.0"),
        ({"num_layers": 1, "batch_size": 0}, "`batch_size` is 0"),
        ({"num_layers": 1, "calibration": []}, "no calibration responses"),
        ({"num_layers": 1, "calibration": [{"prompt_ids": [1], "response_ids": [64]}]}, "id 64.*vocabulary"),
        ({"num_layers": 1, "evaluation": [{"prompt_ids": [99], "response_ids": [1]}]}, "evaluation holds the id 99"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_is_refused_before_any_work(drafter, responses, monkeypatch, settings, match):
    monkeypatch.setattr(pruning, "measure_responses", None)
    with pytest.raises(ValueError, match=match):
        prune_drafter(drafter, **{"calibration": responses} | settings)
    assert drafter.config.kept_layers is None


def test_nothing_is_left_to_remove(drafter, responses):
    prune_drafter(drafter, responses, num_layers=5)
    with pytest.raises(ValueError, match="one layer, and one must stay"):
        prune_drafter(drafter, responses, num_layers=1)


# The journal


def test_a_killed_pruning_goes_on(target, make_perturbed, responses, tmp_path, monkeypatch):
    def prune(path):
        return prune_drafter(
            make_perturbed(target), responses, num_layers=3, evaluation=responses[:2], journal=path, batch_size=2
        )

    def counted(*arguments):
        calls.append(arguments[1])
        if len(calls) == stop:
            raise KeyboardInterrupt
        return measure(*arguments)

    measure, calls, stop = pruning.measure_responses, [], -1
    monkeypatch.setattr(pruning, "measure_responses", counted)
    expected = prune(tmp_path / "whole")
    total = len(calls)
    for stop in (1, 5, total - 1):
        calls, path = [], tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            prune(path)
        with path.open("a") as file:
            file.write('{"skipped": [1')  # killed while writing
        done, calls, stop = stop - 1, [], -1
        assert prune(path) == expected
        assert len(calls) == total - done  # nothing is measured twice
        assert path.read_text() == (tmp_path / "whole").read_text()


def test_a_journal_of_another_pruning_is_refused(drafter, responses, tmp_path):
    prune_drafter(drafter, responses, num_layers=1, journal=tmp_path / "journal")
    for changed in ({"calibration": responses[:5]}, {"batch_size": 3}, {"evaluation": responses[:1]}, {}):
        arguments = {"calibration": responses, "num_layers": 1, "journal": tmp_path / "journal"} | changed
        with pytest.raises(ValueError, match="belongs to another pruning.*`--output_dir`"):
            prune_drafter(drafter, **arguments)  # the drafter itself has changed, too


def test_a_journal_is_read_by_all_and_written_by_one(tmp_path):
    first = Journal(tmp_path / "journal", {"drafter": "a"})
    first.add((1, 2), 0, "calibration 0", [[1, 2, 0.5]])
    other = Journal(tmp_path / "journal", {"drafter": "a"}, writes=False)
    assert other.rows == {((1, 2), 0, "calibration 0"): [[1, 2, 0.5]]}
    before = (tmp_path / "journal").read_text()
    other.add((3,), 0, "calibration 0", [])
    assert (tmp_path / "journal").read_text() == before


# The command


@pytest.fixture
def project(target, make_perturbed, responses, tokenizer, tmp_path):
    """Options of `d3d prune` for a pair in folders."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_perturbed(target, 2).save_adapter(tmp_path / "drafter")
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in responses))
    return {
        "target": str(tmp_path / "target"),
        "drafter": str(tmp_path / "drafter"),
        "calibration_data": str(tmp_path / "responses.jsonl"),
        "batch_size": 2,
    }


def arguments(folder, **settings):
    return D3DTrainingArguments(str(folder), **{"use_cpu": True, "disable_tqdm": True} | settings)


def test_prune_from_end_to_end(project, target, tmp_path):
    output = tmp_path / "pruned"
    settings = {
        "num_layers": 2,
        "evaluation_data": project["calibration_data"],
        "num_evaluation": 1,
        "num_calibration": 4,
    }
    summary = run_prune(PruneConfig(**project | settings), arguments(output))
    report = json.loads((output / "pruning.json").read_text())
    assert report["responses"] == {"calibration": {"a": 4, "b": 4}, "evaluation": {"a": 1, "b": 1}}
    assert summary.count("  layer ") == 2 and "on other prompts" in summary and "2 layers are removed" in summary
    assert report["drafter"] == "drafter" and str(tmp_path) not in json.dumps(report["steps"])
    loaded = AutoModel.from_pretrained(output, base_model=target)
    assert len(loaded.model.layers) == 4 and loaded.config.kept_layers == report["kept_layers"]
    assert [removal["layer"] for removal in loaded.config.pruning] == [step["layer"] for step in report["steps"]]
    with pytest.raises(ValueError, match="report of a finished pruning"):
        run_prune(PruneConfig(**project | settings), arguments(output))


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["adapters", "lora"])
def test_prune_and_heal(project, target, tmp_path, monkeypatch, lora_rank):
    output = tmp_path / "pruned"
    settings = {"num_layers": 2, "train_data": project["calibration_data"], "heal_lora_rank": lora_rank}
    args = {"max_steps": 2, "learning_rate": 1e-2}
    summary = run_prune(PruneConfig(**project | settings), arguments(output, **args))
    report = json.loads((output / "pruning.json").read_text())
    assert summary.count("before healing") == 2
    loaded = AutoModel.from_pretrained(output, base_model=target).eval()
    rows = measure_responses(
        loaded, (), Responses([json.loads(line) for line in open(project["calibration_data"])]).examples
    )
    sources = Responses([json.loads(line) for line in open(project["calibration_data"])]).sources
    assert lengths_by_source(rows, sources)["mean"] == pytest.approx(
        report["steps"][-1]["calibration"]["mean"], abs=0.05
    )
    moved = not torch.equal(loaded.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)
    assert moved == bool(lora_rank)
    (output / "pruning.json").unlink()
    monkeypatch.setattr(pruning.D3DTrainer, "train", None)  # healed already
    run_prune(PruneConfig(**project | settings), arguments(output, **args))
    again = json.loads((output / "pruning.json").read_text())
    assert again["steps"] == report["steps"]
    (output / "pruning.json").unlink()
    with pytest.raises(ValueError, match="healed with other settings"):
        run_prune(PruneConfig(**project | settings), arguments(output, **args | {"max_steps": 3}))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"num_calibration": 0}, "`num_calibration` is 0"),
        ({"num_layers": 1, "train_data": "x.jsonl"}, "give `max_steps`"),
        ({"num_layers": 1, "heal_lora_rank": 2}, "without `train_data`"),
        ({"num_layers": 1, "sources": ["c"]}, "from the sources"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_settings_of_the_command(project, tmp_path, settings, match):
    with pytest.raises(ValueError, match=match):
        run_prune(PruneConfig(**project | settings), arguments(tmp_path / "pruned"))
    assert not (tmp_path / "pruned").exists()


def test_speed_is_measured(project, tmp_path):
    run_prune(PruneConfig(**project, by_speed=True, num_layers=1), arguments(tmp_path / "pruned"))
    report = json.loads((tmp_path / "pruned" / "pruning.json").read_text())
    assert len(report["cost"]["layers"]) == NUM_LAYERS


@pytest.mark.slow
def test_two_processes_prune_as_one(project, tmp_path):
    run_prune(PruneConfig(**project, num_layers=2), arguments(tmp_path / "one"))
    words = [
        w
        for name, value in (project | {"num_layers": 2, "use_cpu": "true"}).items()
        for w in (f"--{name}", str(value))
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "d3d_cli"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launch, "prune", *words, "--output_dir", str(tmp_path / "two")],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 layers are removed") == 1
    one, two = (json.loads((tmp_path / name / "pruning.json").read_text()) for name in ("one", "two"))
    assert one["steps"] == two["steps"] and one["kept_layers"] == two["kept_layers"]
