"""Generating data: the target's own answers, the same whatever stops the run and however many processes share it."""

import copy
import gzip
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3d_cli import main
from transformers_d3d import answer_files, engines, generate_data
from transformers_d3d.data import ResponseDataset
from transformers_d3d.generate_data import GenerateDataConfig, run_generate_data
from transformers_d3d.prompts import encode_prompt

TEXTS = [
    "abc",
    "Hello",
    "a longer prompt of many letters",
    "xyz",
    "the",
    "some words",
    "Z",
    "four words or so",
    "b",
    "qq",
]
SOURCE = Path(__file__).parents[1] / "src"


@pytest.fixture(params=["llama", "qwen3"])
def target(request, targets):
    """A tiny target that ends some of its answers early, since two tokens end a sequence."""
    target = copy.deepcopy(targets[request.param])
    target.generation_config.eos_token_id = [21, 40]
    return target


@pytest.fixture
def settings(target, tokenizer, tmp_path):
    """The settings of a run, with a folder of the target and a file of prompts."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    lines = [{"id": f"p{i}", "turns": [text], "source": "odd" if i % 2 else "even"} for i, text in enumerate(TEXTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "target": str(tmp_path / "target"),
        "prompts": str(tmp_path / "prompts.jsonl"),
        "output": str(tmp_path / "answers.jsonl"),
        "max_new_tokens": 14,
        "batch_size": 3,
        "device": "cpu",
    }


one_target = pytest.mark.parametrize("target", ["llama"], indirect=True)


def answers(settings, **changes):
    """Runs; returns the header and the answers."""
    run_generate_data(GenerateDataConfig(**settings | changes))
    path = Path((settings | changes)["output"])
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    first, *lines = map(json.loads, text.splitlines())
    return first["header"], lines


def test_answers_are_those_of_generate_one_by_one(settings, target, tokenizer):
    _, lines = answers(settings)
    assert [(line["id"], line["source"]) for line in lines] == [
        (f"p{i}", "odd" if i % 2 else "even") for i in range(len(TEXTS))
    ]
    for text, line in zip(TEXTS, lines, strict=True):
        inputs = encode_prompt(tokenizer, text)
        alone = target.generate(**inputs, do_sample=False, max_new_tokens=14, pad_token_id=0)[0].tolist()
        assert line["prompt_ids"] + line["response_ids"] == alone
    ended = [line["response_ids"][-1] in (21, 40) for line in lines]
    assert any(ended) and not all(ended)
    assert all(len(line["response_ids"]) == 14 for line, end in zip(lines, ended, strict=True) if not end)


@one_target
def test_an_empty_answer_is_the_end_token(settings, target):
    _, lines = answers(settings)
    first = lines[2]["response_ids"][0]
    target.generation_config.eos_token_id = first
    target.save_pretrained(settings["target"])
    _, lines = answers(settings, output=settings["output"] + ".gz")
    assert lines[2]["response_ids"] == [first]
    assert ResponseDataset(settings["output"] + ".gz", 64)[2]["response_ids"] == [first]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@torch.no_grad()
def test_top_logits_are_those_of_a_forward_pass(settings, target, temperature):
    _, lines = answers(settings, num_top_logits=5, temperature=temperature)
    for line in lines:
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        rows = target(ids).logits[0, len(line["prompt_ids"]) - 1 : -1].log_softmax(-1)
        top = rows.topk(5)
        assert line["top_ids"] == top.indices.tolist()
        assert torch.tensor(line["top_log_probs"]) == pytest.approx(top.values, abs=2e-4)
        assert len(json.dumps(line["top_log_probs"][0][0]).partition(".")[2]) <= 4
        if temperature == 0:
            assert [ids[0] for ids in line["top_ids"]] == line["response_ids"]


@one_target
def test_greedy_answers_have_no_seed_and_sampled_ones_do(settings):
    def responses(name, **changes):
        return answers(settings, output=f"{settings['output']}.{name}", **changes)[1]

    sampled = responses("a", temperature=1.0)
    assert responses("b", temperature=1.0) == sampled
    assert responses("c", temperature=1.0, seed=1) != sampled
    assert responses("d", temperature=1.0, top_p=1e-6) == responses("e") == responses("f", seed=1)
    assert responses("e") != sampled


@one_target
def test_the_targets_own_way_of_sampling_is_not_used(settings, target):
    target.generation_config.update(do_sample=True, temperature=0.1, top_k=1, top_p=0.5)
    target.generation_config.save_pretrained(settings["target"])
    _, lines = answers(settings, temperature=5.0, num_top_logits=1)
    tokens = [
        (token, top[0]) for line in lines for token, top in zip(line["response_ids"], line["top_ids"], strict=True)
    ]
    assert any(token != likeliest for token, likeliest in tokens)
    _, lines = answers(settings, output=settings["output"] + ".greedy", num_top_logits=1)
    assert all([top[0] for top in line["top_ids"]] == line["response_ids"] for line in lines)


class Killed(BaseException):
    """Not an error that anybody handles."""


@one_target
@pytest.mark.parametrize("settings_of", [{}, {"temperature": 1.0}, {"num_top_logits": 2}], ids=str)
@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(settings, monkeypatch, settings_of, after):
    settings = settings | settings_of
    whole = settings["output"] + ".whole"
    answers(settings, output=whole)
    write = answer_files.AnswerWriter.write

    def write_a_few(self, index, answer):
        if len(written) == after:
            self._file.write(b'7\t{"id": "to')
            raise Killed
        written.append(index)
        write(self, index, answer)

    written = []
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(answer_files.AnswerWriter, "write", write_a_few)
        run_generate_data(GenerateDataConfig(**settings))
    assert not Path(settings["output"]).exists()
    rewritten = []
    monkeypatch.setattr(
        answer_files.AnswerWriter, "write", lambda *args: (rewritten.append(args[1]), write(*args)) and None
    )
    answers(settings)
    assert sorted(written + rewritten) == list(range(len(TEXTS)))
    assert Path(settings["output"]).read_bytes() == Path(whole).read_bytes()


@one_target
def test_a_full_disk_is_told_and_the_run_goes_on(settings, monkeypatch, capsys):
    def full(self, index, answer):
        raise self._failed(self.part, OSError(28, "No space left on device"))

    command = ["generate-data", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    with monkeypatch.context() as patch:
        patch.setattr(answer_files.AnswerWriter, "write", full)
        assert main(command) == 1
    assert "No space left on device). The answers so far are kept" in capsys.readouterr().err.splitlines()[-1]
    assert main(command) == 0
    assert f"10 answers of target in `{settings['output']}`" in capsys.readouterr().out


@one_target
def test_the_header_says_how_the_answers_were_made(settings, tmp_path):
    header, _ = answers(settings, target_name="org/tiny", num_prompts=4, num_top_logits=1)
    assert (header["schema"], header["target"], header["vocab_size"]) == (1, "org/tiny", 64)
    assert header["settings"] | {"chat_template_hash": ""} == {
        "thinking": "template",
        "chat_template_hash": "",
        "max_new_tokens": 14,
        "do_sample": False,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": None,
        "batch_size": None,
        "num_top_logits": 1,
        "engine": "transformers",
        "dtype": "float32",
        "generation_config": {"eos_token_id": [21, 40]},
    }
    assert header["prompts"]["count"] == 4 and "torch" in header["versions"]
    header, _ = answers(settings, output=settings["output"] + ".gz", temperature=1.0)
    assert header["target"] == "target" and str(tmp_path) not in json.dumps(header)
    assert (header["settings"]["seed"], header["settings"]["batch_size"]) == (0, 3)


@one_target
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"max_new_tokens": 15},
        {"num_top_logits": 2},
        {"dtype": "bfloat16"},
        {"target_name": "org/other"},
        {"num_prompts": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_are_not_mixed(settings, monkeypatch, finished, change):
    if finished:
        answers(settings)
    else:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="missing"):
            patch.setattr(answer_files.AnswerWriter, "write", lambda *args: None)
            run_generate_data(GenerateDataConfig(**settings))
    monkeypatch.setattr(generate_data, "ENGINES", {"transformers": None})  # not even loaded
    name = {"target_name": "target", "num_prompts": "prompts"}.get(*[next(iter(change))] * 2)
    with pytest.raises(ValueError, match=f"`{name}` is .* there and .* now.*`--output`"):
        run_generate_data(GenerateDataConfig(**settings | change))


@one_target
def test_what_does_not_change_greedy_answers_may_change(settings, monkeypatch):
    before = answers(settings)
    monkeypatch.setattr(generate_data, "ENGINES", {"transformers": None})  # not even loaded
    config = GenerateDataConfig(**settings | {"batch_size": 1, "seed": 7})
    leftover = Path(settings["output"]).with_name(".answers.jsonl.part-0-of-2")
    leftover.touch()  # a run was killed while it removed its parts
    assert "is finished: 10 answers" in run_generate_data(config)
    assert not leftover.exists()
    assert answers(settings) == before


class RecordingEngine:
    """Answers with the prompt, and keeps what it was asked."""

    asked = []

    def __init__(self, config, device):
        RecordingEngine.asked = []

    def answer(self, prompts, seeds):
        self.asked.append((prompts, seeds))
        return [{"response_ids": prompt} for prompt in prompts]


@one_target
def test_batches_are_of_like_length_the_longest_first(settings, monkeypatch):
    monkeypatch.setattr(generate_data, "ENGINES", {"transformers": RecordingEngine})
    answers(settings)
    lengths = [len(prompt) for prompts, _ in RecordingEngine.asked for prompt in prompts]
    assert lengths == sorted((len(text) + 1 for text in TEXTS), reverse=True)
    assert [len(prompts) for prompts, _ in RecordingEngine.asked] == [3, 3, 3, 1]
    seeds = [seed for _, seeds in RecordingEngine.asked for seed in seeds]
    assert sorted(seeds) == list(range(len(TEXTS)))


@one_target
def test_progress_shows_the_speed_and_the_time_left(settings, capsys):
    summary = run_generate_data(GenerateDataConfig(**settings))
    bar = capsys.readouterr().err.splitlines()[-1]
    assert "10/10" in bar and "tokens/s" in bar and "<00:00" in bar
    assert "tokens/s" in summary


@one_target
def test_prompts_that_do_not_fit(settings):
    with pytest.raises(ValueError, match="A prompt has 32 tokens.* 512 positions.*--max_prompt_tokens 12`"):
        run_generate_data(GenerateDataConfig(**settings | {"max_new_tokens": 500}))
    with pytest.raises(ValueError, match="no prompt of at most 1 tokens; the longest has 32"):
        run_generate_data(GenerateDataConfig(**settings | {"max_prompt_tokens": 1}))
    header, lines = answers(settings, max_prompt_tokens=5)
    assert [line["id"] for line in lines] == ["p0", "p3", "p4", "p6", "p8", "p9"] and header["prompts"]["count"] == 6


@one_target
def test_a_target_that_cannot_be_asked_so(settings, tokenizer):
    with pytest.raises(ValueError, match="`thinking` is 'off'"):
        run_generate_data(GenerateDataConfig(**settings | {"thinking": "off"}))
    tokenizer.chat_template = "{{ raise_exception('No such role.') }}"
    tokenizer.save_pretrained(settings["target"])
    with pytest.raises(ValueError, match="refuses the messages .*abc.*No such role"):
        run_generate_data(GenerateDataConfig(**settings))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"engine": "llama.cpp"}, "allowed are 'transformers' and 'vllm'"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"num_prompts": 0}, "`num_prompts` is 0"),
        ({"temperature": -1.0}, "`temperature` is -1.0"),
        ({"top_p": 0.5}, "give a `temperature`"),
        ({"top_p": 0.0, "temperature": 1.0}, "`top_p` 0.0"),
        ({"num_top_logits": -1}, "`num_top_logits` -1"),
    ],
    ids=str,
)
def test_bad_settings(change, match):
    with pytest.raises(ValueError, match=match):
        GenerateDataConfig(**{"target": "t", "prompts": "p", "output": "o"} | change)


@one_target
def test_more_top_logits_than_tokens(settings):
    with pytest.raises(ValueError, match="`num_top_logits` is 65; the vocabulary has only 64"):
        run_generate_data(GenerateDataConfig(**settings | {"num_top_logits": 65}))


@one_target
def test_prompts_from_a_folder_or_from_the_hub(settings, monkeypatch, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sums.jsonl").write_text('{"prompt": "abc"}\n')
    _, lines = answers(settings, prompts=str(tmp_path / "folder"), output=str(tmp_path / "a.jsonl"))
    assert [(line["id"], line["source"]) for line in lines] == [(0, "sums")]
    asked = []
    datasets = SimpleNamespace(load_dataset=lambda *args, **kwargs: asked.append((args, kwargs)) or [{"q": "abc"}])
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    where = {"dataset_config": "main", "dataset_split": "test", "prompt_column": "q"}
    _, lines = answers(settings, prompts="org/sums", output=str(tmp_path / "b.jsonl"), **where)
    assert asked == [(("org/sums", "main"), {"split": "test"})]
    assert [(line["id"], line["source"]) for line in lines] == [(0, "sums")]
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        run_generate_data(GenerateDataConfig(**settings | {"prompts": "nowhere.jsonl"}))


# Training on it


@one_target
def test_training_takes_the_file_for_its_own_target_only(settings, target, tokenizer):
    header, lines = answers(settings, num_top_logits=2)
    data = ResponseDataset(settings["output"], 64, max_length=12, tokenizer=tokenizer, target="org/target")
    assert data.header == header
    for line, example in zip((line for line in lines if len(line["prompt_ids"]) < 12), data, strict=True):
        room = 12 - len(line["prompt_ids"])
        for name in ("response_ids", "top_ids", "top_log_probs"):
            assert example[name] == line[name][:room]
    with pytest.raises(ValueError, match="answers.jsonl, line 1: these are answers of `target`, not of `org/other`"):
        ResponseDataset(settings["output"], 64, target="org/other")
    tokenizer.add_tokens(["more"])
    with pytest.raises(ValueError, match="answers.jsonl, line 1: .* another vocabulary"):
        ResponseDataset(settings["output"], 64, tokenizer=tokenizer)


# vLLM, whose interface a stand-in has


@dataclass
class Logprob:
    logprob: float


class LLM:
    def __init__(self, **settings):
        self.settings = settings

    def get_default_sampling_params(self):
        return SimpleNamespace(repetition_penalty=1.1)

    def generate(self, prompts, params, use_tqdm):
        LLM.asked = prompts, params, self.settings
        step = {9: Logprob(-2.0), 5: Logprob(-0.123456), 7: Logprob(-1.0)}  # 9 was drawn
        completion = SimpleNamespace(token_ids=(9, 21), logprobs=[step, step])
        return [SimpleNamespace(outputs=[completion]) for _ in prompts]


@one_target
def test_vllm(settings, monkeypatch):
    vllm = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, TokensPrompt=dict)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    header, lines = answers(
        settings | {"batch_size": None}, engine="vllm", temperature=0.8, top_p=0.9, num_top_logits=2, seed=3
    )
    assert header["settings"]["engine"] == "vllm"
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(len(TEXTS))]
    assert all(line["response_ids"] == [9, 21] for line in lines)
    assert lines[0]["top_ids"] == [[5, 7]] * 2 and lines[0]["top_log_probs"] == [[-0.1235, -1.0]] * 2
    prompts, params, model = LLM.asked
    assert (model["model"], model["dtype"]) == (settings["target"], "float32")
    assert len(prompts) == len(TEXTS) and len({p.seed for p in params}) == len(TEXTS)
    first = params[0]
    assert (first.temperature, first.top_p, first.max_tokens, first.logprobs) == (0.8, 0.9, 14, 2)
    assert first.repetition_penalty == 1.1


@one_target
def test_vllm_that_is_not_there(settings, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="`engine` is 'vllm'.*`pip install vllm`.*--engine transformers"):
        run_generate_data(GenerateDataConfig(**settings | {"engine": "vllm"}))
    state = SimpleNamespace(num_processes=2)
    monkeypatch.setattr(generate_data, "PartialState", lambda **kwargs: state)
    with pytest.raises(ValueError, match="'vllm' in 2 processes"):
        run_generate_data(GenerateDataConfig(**settings | {"engine": "vllm"}))
    assert engines.ENGINES.keys() == {"transformers", "vllm"}


# Several processes, and the real target


def d3d(settings, *launcher):
    """Runs `d3d generate-data` in a process of its own, or in several."""
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", "d3d_cli", "generate-data", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.slow
@one_target
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_processes_write_what_one_writes(settings, tmp_path, temperature):
    settings = settings | {"temperature": temperature, "num_top_logits": 2}
    answers(settings)
    shared = settings | {"output": str(tmp_path / "shared.jsonl")}
    run = d3d(shared, *TORCHRUN)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("answers of target in") == 1
    expected = Path(settings["output"]).read_bytes()
    assert Path(shared["output"]).read_bytes() == expected
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@one_target
def test_two_processes_go_on_where_one_was_killed(settings, tmp_path, monkeypatch):
    answers(settings, output=str(tmp_path / "whole.jsonl"))
    write, written = answer_files.AnswerWriter.write, []

    def write_a_few(self, index, answer):
        if len(written) == 4:
            raise Killed
        written.append(index)
        write(self, index, answer)

    monkeypatch.setattr(answer_files.AnswerWriter, "write", write_a_few)
    with pytest.raises(Killed):
        run_generate_data(GenerateDataConfig(**settings))
    run = d3d(settings, *TORCHRUN)
    assert run.returncode == 0, run.stderr
    assert Path(settings["output"]).read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*"))
    refused = d3d(settings | {"max_new_tokens": 9}, *TORCHRUN)
    assert refused.returncode != 0 and "`max_new_tokens` is 14 there and 9 now" in refused.stderr


@pytest.mark.slow
def test_the_real_target(tmp_path):
    from transformers_d3d.demo import demo_target_folder

    folder = demo_target_folder()
    questions = ["What is 3 plus 4?", "Name a colour.", "Write one line about the sea, please.", "Say hello."]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    output = tmp_path / "answers.jsonl.gz"
    settings = {
        "target": folder,
        "prompts": tmp_path / "asked.jsonl",
        "output": output,
        "max_new_tokens": 16,
        "num_top_logits": 4,
        "target_name": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "device": "cpu",
    }
    run = d3d(settings)
    assert run.returncode == 0, run.stderr
    assert "tokens/s" in run.stderr and "4 answers of HuggingFaceTB/SmolLM2-135M-Instruct" in run.stdout
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = ResponseDataset(output, tokenizer=tokenizer, target=folder.name, vocab_size=len(tokenizer))
    assert len(data) == 4 and data.header["settings"]["num_top_logits"] == 4
    target = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    for text, example in zip(questions, data, strict=True):
        alone = target.generate(**encode_prompt(tokenizer, text), do_sample=False, max_new_tokens=16)[0].tolist()
        assert example["prompt_ids"] + example["response_ids"] == alone
        assert [ids[0] for ids in example["top_ids"]] == example["response_ids"]
    assert "Nothing to do" in d3d(settings).stdout
