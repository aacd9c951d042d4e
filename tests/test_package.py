"""The package as a whole: exported names, who may import whom, and a README that holds."""

import ast
import dataclasses
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import transformers
from transformers import AutoModel, AutoModelForCausalLM, HfArgumentParser

import transformers_d3d
from d3d_cli import COMMANDS
from transformers_d3d import demo

ROOT = Path(__file__).parents[1]
MODULES = {path.stem: path for path in (ROOT / "src" / "transformers_d3d").glob("*.py")}
REMOTE = sorted(name for name in MODULES if name.endswith("_d3d"))
LEAVES = [
    "cache_d3d",
    "configuration_d3d",
    "json_lines",
    "masking_d3d",
    "objective",
    "outcomes_d3d",
    "overlap_d3d",
    "records",
    "report_d3d",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON_BLOCKS = [code for language, code in BLOCKS if language == "python"]


def imports(path):
    """What a file imports, anywhere in it: names of ours, and top-level names of others."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            assert node.level == 1, f"{path.name}:{node.lineno} imports from a parent package"
            assert node.module, f"{path.name}:{node.lineno} says `from . import`, which a saved drafter would lack"
            ours.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            others.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
    return ours, others


def test_exported_names():
    assert transformers_d3d.__all__ == [
        "D3DCandidateGenerator",
        "D3DDrafterConfig",
        "D3DDrafterModel",
        "DraftReport",
        "RollbackCache",
        "choose_mask_token",
        "install_seam",
        "remove_seam",
    ]
    assert all(hasattr(transformers_d3d, name) for name in transformers_d3d.__all__)


def test_the_auto_classes_know_the_drafter(targets, make_perturbed):
    config = make_perturbed(targets["llama"]).config
    for auto_class in (AutoModel, AutoModelForCausalLM):
        assert type(auto_class.from_config(config)) is transformers_d3d.D3DDrafterModel


def test_the_version_is_in_one_place():
    holders = [
        path.name
        for path in (*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md")
        if re.search(
            rf"(?<![\d.=]){re.escape(transformers_d3d.__version__)}(?![\d.])", path.read_text(encoding="utf-8")
        )
    ]
    assert holders == ["__init__.py"]
    assert f"[{transformers_d3d.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", REMOTE)
def test_remote_code_imports_only_what_every_user_has(name):
    ours, others = imports(MODULES[name])
    assert ours <= set(REMOTE)
    allowed = {"torch", "transformers", "huggingface_hub", "safetensors"}
    assert others - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_import_nothing_of_ours(name):
    ours, others = imports(MODULES[name])
    assert ours == set()
    assert not others & {"transformers_d3d", "d3d_cli"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nobody_imports_the_command_line_or_the_package_by_name(name):
    ours, others = imports(MODULES[name])
    assert ours <= set(MODULES)
    assert not others & {"transformers_d3d", "d3d_cli"}


def test_one_module_imports_peft():
    assert [name for name, path in MODULES.items() if "peft" in imports(path)[1]] == ["lora"]


def test_imports_go_one_way():
    edges = {name: imports(path)[0] for name, path in MODULES.items()}
    while edges:
        free = [name for name, needed in edges.items() if not needed & set(edges)]
        assert free, f"a circle among {sorted(edges)}"
        for name in free:
            del edges[name]


# The README


def test_the_readme_has_the_program():
    assert PYTHON_BLOCKS
    for code in PYTHON_BLOCKS:
        compile(code, "README.md", "exec")
    assert "assistant_model=drafter" in PYTHON_BLOCKS[0]


def test_the_readmes_program_runs(targets, make_perturbed, tokenizer, tmp_path, monkeypatch, capsys):
    """On a tiny pair in place of the demo pair."""
    targets["llama"].save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_perturbed(targets["llama"], 4).save_adapter(tmp_path / "drafters" / "d3d-smollm2-135m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "demo_target_folder", lambda: tmp_path / "target")
    names = {}
    exec(compile(PYTHON_BLOCKS[0], "README.md", "exec"), names)
    assert names["drafter"].report.rounds > 0
    assert "mean acceptance length" in capsys.readouterr().out


def readme_commands():
    """The `d3d` commands of the README's code blocks and of its text."""
    text = [code for language, code in BLOCKS if language in ("bash", "sh", "")]
    text += re.findall(r"(?<!`)`(d3d [^`]+)`(?!`)", README)
    lines = "\n".join(text).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("d3d ")]


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_the_readmes_commands_exist(words):
    _, command, *rest = words
    if command == "--help":
        return
    module_name, dataclass_names, _ = COMMANDS[command]
    module = importlib.import_module(f"transformers_d3d.{module_name}")
    parser = HfArgumentParser([getattr(module, name) for name in dataclass_names])
    known = {option for action in parser._actions for option in action.option_strings}
    assert {word for word in rest if word.startswith("-")} <= known


def test_the_readme_names_every_command_and_training_option():
    named = {words[1] for words in readme_commands()}
    assert set(COMMANDS) <= named
    from transformers_d3d.training_args import D3DTrainingArguments

    inherited = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    own = {f.name for f in dataclasses.fields(D3DTrainingArguments)} - inherited
    assert {name for name in own if name not in README} == set()


def test_the_readmes_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"`make (\w+)", README))
    assert {"demo", "test"} <= named <= targets


def test_the_readmes_links_to_files_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"} <= set(links)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_makefile_installs_as_the_readme_says():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(TORCH)", "torch==2.13.0")
    installs = {line.split("pip install ", 1)[1] for line in README.splitlines() if line.startswith("pip install ")}
    assert installs
    assert all(f"pip install {what.partition('  #')[0]}\n" in makefile for what in installs)
