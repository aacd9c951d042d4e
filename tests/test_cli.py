"""The command line: quick to help, strict about its options, and brief about failures."""

import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import d3d_cli
from d3d_cli import COMMANDS, main


def test_help_names_the_commands_and_imports_no_transformers():
    code = (
        "import json, sys; from d3d_cli import main; status = main(['--help']); "
        "print(json.dumps([status, [m for m in ('torch', 'transformers', 'transformers_d3d') if m in sys.modules]]))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    usage, last = child.stdout.splitlines()
    assert json.loads(last) == [0, []]
    assert all(command in usage for command in COMMANDS)


def test_without_arguments_it_helps(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["d3d"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("usage: d3d")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_its_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: d3d {command}")
    assert "--" in out


def test_an_unknown_command_is_wrong_usage(capsys):
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert "unknown command `trian`" in captured.err
    assert "usage:" in captured.err
    assert captured.out == ""


@dataclass
class Options:
    number: int = 1

    def __post_init__(self):
        if self.number < 0:
            raise ValueError("`number` is negative;\nuse another.")


@pytest.fixture
def command(monkeypatch):
    """The command `d3d try`, and a function that sets what it does."""
    module = SimpleNamespace(Options=Options, run=lambda options: f"got {options.number}")
    monkeypatch.setitem(COMMANDS, "try", ("trying", ("Options",), "run"))
    monkeypatch.setattr(d3d_cli.importlib, "import_module", lambda name: {"transformers_d3d.trying": module}[name])
    return lambda run: setattr(module, "run", run)


def test_it_prints_what_the_command_returns(command, capsys):
    assert main(["try", "--number", "3"]) == 0
    assert capsys.readouterr().out == "got 3\n"


def test_a_command_that_returns_nothing_prints_nothing(command, capsys):
    command(lambda options: None)
    assert main(["try"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("argument", ["--numbr", "--num", "stray"])
def test_a_misspelt_option_is_wrong_usage(command, capsys, argument):
    with pytest.raises(SystemExit) as stop:
        main(["try", argument, "3"] if argument != "stray" else ["try", argument])
    assert stop.value.code == 2
    assert f"unknown options: {argument}" in capsys.readouterr().err


def test_bad_values_are_told_in_one_line(command, capsys):
    assert main(["try", "--number", "-1"]) == 1
    assert capsys.readouterr().err == "d3d try: `number` is negative; use another.\n"


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError])
def test_failures_that_the_message_explains_end_with_1(command, capsys, error):
    def run(options):
        raise error("not there\n\n  look elsewhere")

    command(run)
    assert main(["try"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "d3d try: not there look elsewhere\n"
    assert captured.out == ""


def test_faults_of_ours_keep_their_traceback(command):
    def run(options):
        raise TypeError("a bug")

    command(run)
    with pytest.raises(TypeError, match="a bug"):
        main(["try"])


def test_an_impossible_configuration_is_told_in_one_line(command, capsys):
    from transformers_d3d import D3DDrafterConfig

    command(lambda options: D3DDrafterConfig(block_size=1))
    assert main(["try"]) == 1
    error = capsys.readouterr().err
    assert "`block_size` is 1" in error and error.count("\n") == 1
