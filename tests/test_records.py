"""What a measured number travels with."""

import json

import pytest
import torch
import transformers

from transformers_d3d import records
from transformers_d3d.records import command, cpu_has_bfloat16, hardware, versions, write_json


def test_versions_are_those_in_use():
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert set(found) == {"python", "transformers-d3d", "transformers", "torch", "peft", "accelerate"}


def test_hardware_is_in_words_and_json():
    found = hardware()
    assert json.loads(json.dumps(found)) == found
    assert isinstance(found["device"], str)
    assert found["device"]


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags : fpu avx512_bf16 sse", True),
        ("flags : amx_bf16", True),
        ("Features : asimd bf16", True),
        ("flags : fpu avx512f", False),
    ],
    ids=["avx512", "amx", "arm", "none"],
)
def test_bfloat16_by_the_cpus_flags(monkeypatch, flags, has):
    monkeypatch.setattr(records.Path, "read_text", lambda path: flags)
    assert cpu_has_bfloat16() is has


@pytest.mark.parametrize(("machine", "has"), [("arm64", True), ("aarch64", True), ("x86_64", False)])
def test_bfloat16_without_cpuinfo(monkeypatch, machine, has):
    def missing(path):
        raise FileNotFoundError

    monkeypatch.setattr(records.Path, "read_text", missing)
    monkeypatch.setattr(records.platform, "machine", lambda: machine)
    assert cpu_has_bfloat16() is has


def test_write_json_makes_folders_and_leaves_no_part(tmp_path):
    path = tmp_path / "a" / "b" / "record.json"
    write_json(path, {"one": 1})
    write_json(path, {"two": [2.5, None]})
    assert json.loads(path.read_text()) == {"two": [2.5, None]}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"one": 1})
    with pytest.raises(TypeError):
        write_json(path, {"one": object()})
    assert json.loads(path.read_text()) == {"one": 1}


def test_the_command_holds_no_paths_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "sys.argv", ["/usr/bin/d3d", "train", "--target", str(tmp_path / "target"), "--seed", "3", "a/b"]
    )
    assert command() == "d3d train --target target --seed 3 a/b"
