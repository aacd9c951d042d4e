"""The drafter's training settings: changed defaults, and values that are refused."""

import pytest

from transformers_d3d.training_args import D3DTrainingArguments


def test_changed_defaults(tmp_path):
    args = D3DTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.learning_rate == 2e-4
    assert args.lr_scheduler_type == "cosine"
    assert args.get_warmup_steps(100) == 4
    assert args.per_device_train_batch_size == 2
    assert args.logging_steps == 10
    assert args.report_to == []
    assert args.remove_unused_columns is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_anchors", 0),
        ("loss_weighting", "linear"),
        ("offset_keep_rate", 0.0),
        ("offset_keep_rate", 1.1),
        ("reveal_rate", -0.1),
        ("reveal_rate", 1.0),
        ("dpace_alpha", -0.1),
        ("dpace_alpha", 1.1),
        ("divergence_weight", -0.1),
        ("divergence_weight", 1.1),
        ("num_top_logits", 0),
        ("loss_gamma", 0.0),
        ("autoregressive_weight", -1.0),
    ],
    ids=lambda value: str(value),
)
def test_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` is '?{value}"):
        D3DTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("dpace_alpha", 0.0), ("dpace_alpha", 1.0), ("autoregressive_weight", 0.0), ("num_anchors", 1)]
)
def test_bounds_are_allowed(tmp_path, name, value):
    assert getattr(D3DTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value}), name) == value


def test_a_misspelt_setting_is_refused(tmp_path):
    with pytest.raises(TypeError, match="num_anchor"):
        D3DTrainingArguments(output_dir=str(tmp_path), num_anchor=3)


def test_every_new_setting_has_help():
    fields = D3DTrainingArguments.__dataclass_fields__
    assert all(fields[name].metadata.get("help") for name in D3DTrainingArguments.__annotations__)
