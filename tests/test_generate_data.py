"""Answers of a target: those of `generate` one by one, whatever the batches, processes and interruptions."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3d_cli import main
from transformers_d3d import answer_files, engines
from transformers_d3d.data import ResponseDataset
from transformers_d3d.generate_data import GenerateDataConfig, run_generate_data
from transformers_d3d.prompts import encode_prompt

ROOT = Path(__file__).parents[1]
TEXTS = ["abc def", "x", "hello there you", "no", "a b c d e f g h i j", "y z", "quite another one", "end"]
END = 42  # among the tokens that the tiny target answers with


@pytest.fixture
def project(targets, tokenizer, tmp_path):
    """Options of a run on a tiny target that ends some answers early, with prompts of many lengths."""
    targets["llama"].save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    settings = tmp_path / "target" / "generation_config.json"
    checkpoint = {"eos_token_id": END, "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_k": 3}
    settings.write_text(json.dumps(checkpoint))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "turns": [text]}) + "\n" for i, text in enumerate(TEXTS)))
    return {
        "target": str(tmp_path / "target"),
        "prompts": str(prompts),
        "output": str(tmp_path / "out" / "answers.jsonl"),
        "max_new_tokens": 12,
        "batch_size": 3,
        "device": "cpu",
    }


def run(options, **changes):
    summary = run_generate_data(GenerateDataConfig(**options | changes))
    return read((options | changes)["output"]), summary


def read(path):
    data = Path(path).read_bytes()
    header, *answers = (
        json.loads(line) for line in (gzip.decompress(data) if path.endswith(".gz") else data).splitlines()
    )
    return header["header"], answers


@pytest.fixture
def stop_after(monkeypatch):
    """Stops a run in its batch number `count`, as if it were killed."""

    answer = engines.TransformersEngine.answer

    def stop(count):
        calls = []

        def counted(self, prompts, seeds):
            calls.append(prompts)
            if len(calls) > count:
                raise KeyboardInterrupt
            return answer(self, prompts, seeds)

        monkeypatch.setattr(engines.TransformersEngine, "answer", counted)
        return calls

    return stop


def one_by_one(target, tokenizer, text, **settings):
    inputs = encode_prompt(tokenizer, text)
    output = target.generate(**inputs, do_sample=False, eos_token_id=END, max_new_tokens=12, **settings)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_answers_are_those_of_generate_one_by_one(project, targets, tokenizer):
    (header, answers), summary = run(project)
    assert [answer["id"] for answer in answers] == [f"p{i}" for i in range(8)]
    for answer, text in zip(answers, TEXTS, strict=True):
        assert answer["source"] == "prompts"
        assert answer["prompt_ids"] == encode_prompt(tokenizer, text)["input_ids"][0].tolist()
        assert answer["response_ids"] == one_by_one(targets["llama"], tokenizer, text)
    ended = [answer["response_ids"][-1] == END for answer in answers]
    assert any(ended) and not all(ended)
    assert "8 answers of target in" in summary and "tokens/s" in summary
    assert header["target"] == "target" and header["vocab_size"] == 64 and header["prompts"]["count"] == 8
    assert header["settings"] == header["settings"] | {
        "thinking": "template",
        "do_sample": False,
        "engine": "transformers",
    }
    assert str(Path(project["output"]).parents[1]) not in json.dumps(header)
    data = ResponseDataset(project["output"], 64, tokenizer=tokenizer, target="org/target")
    assert data.header == header and len(data) == 8


def test_an_answer_of_nothing_is_its_end(project, targets, tokenizer):
    first = one_by_one(targets["llama"], tokenizer, TEXTS[0])[0]
    folder = Path(project["target"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [63, first]}))
    (_, answers), _ = run(project)
    assert answers[0]["response_ids"] == [first]
    assert len(ResponseDataset(project["output"], 64)) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_the_likeliest_tokens_are_the_targets_own(project, targets, temperature):
    (_, answers), _ = run(project, num_top_logits=5, temperature=temperature, top_p=0.9 if temperature else 1.0)
    for answer in answers:
        prompt, response = answer["prompt_ids"], answer["response_ids"]
        with torch.no_grad():
            logits = targets["llama"](torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_probs, ids = logits.log_softmax(-1).topk(5)
        assert answer["top_ids"] == ids.tolist()
        torch.testing.assert_close(torch.tensor(answer["top_log_probs"]), log_probs, atol=1e-4, rtol=1e-4)
        if not temperature:
            assert [top[0] for top in answer["top_ids"]] == response
    cut = ResponseDataset(project["output"], 64, max_length=14)
    assert {len(answer["response_ids"]) - len(answer["top_ids"]) for answer in cut} == {0}


def test_sampling_follows_the_seed_and_not_the_checkpoints_settings(project, tmp_path):
    def sampled(**changes):
        (_, answers), _ = run(project, output=str(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"), **changes)
        return [answer["response_ids"] for answer in answers]

    first = sampled(temperature=1.0)
    assert sampled(temperature=1.0) == first
    assert sampled(temperature=1.0, seed=1) != first
    assert sampled(temperature=1e-4) == sampled()
    tops = run(project, temperature=5.0, num_top_logits=3)[0][1]
    chosen = [t in top for answer in tops for t, top in zip(answer["response_ids"], answer["top_ids"], strict=True)]
    assert not all(chosen)  # the checkpoint's own `top_k` is 3


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "num_top_logits": 2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["answers.jsonl", "answers.jsonl.gz"])
def test_a_killed_run_goes_on_to_the_same_file(project, tmp_path, stop_after, settings, name):
    run(project, output=str(tmp_path / name), **settings)
    output = tmp_path / "killed" / name
    calls = stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        run(project, output=str(output), **settings)
    assert not output.exists()
    (part,) = output.parent.iterdir()
    part.write_bytes(part.read_bytes()[:-5])  # a line that was cut
    calls = stop_after(3)
    run(project, output=str(output), **settings)
    assert len(calls) == 2  # the torn batch and the last
    assert output.read_bytes() == (tmp_path / name).read_bytes()
    assert list(output.parent.iterdir()) == [output]


def test_a_finished_file_is_not_made_again(project, monkeypatch):
    run(project)
    before = Path(project["output"]).stat()
    leftover = Path(project["output"]).with_name(".answers.jsonl.part-0-of-1")
    leftover.touch()
    monkeypatch.setattr(engines.TransformersEngine, "__init__", None)
    summary = run_generate_data(GenerateDataConfig(**project))
    assert "is finished: 8 answers" in summary
    assert Path(project["output"]).stat().st_mtime_ns == before.st_mtime_ns
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_new_tokens": 10}, "`max_new_tokens` is 12 there and 10 now"),
        ({"temperature": 0.5}, "`temperature` is 0.0 there and 0.5 now"),
        ({"num_top_logits": 2}, "`num_top_logits` is 0 there and 2 now"),
        ({"dtype": "bfloat16"}, "`dtype` is float32 there and bfloat16 now"),
        ({"target_name": "org/other"}, "`target` is target there and org/other now"),
        ({"num_prompts": 4}, "`prompts` is "),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
def test_settings_are_not_mixed(project, stop_after, changes, named, finished):
    stop_after(9 if finished else 1)
    try:
        run(project)
    except KeyboardInterrupt:
        assert not finished
    with pytest.raises(ValueError, match=f"made with other settings: .*{named}"):
        run(project, **changes)


def test_a_greedy_run_may_go_on_with_smaller_batches(project, stop_after, tmp_path):
    (_, answers), _ = run(project, output=str(tmp_path / "whole.jsonl"))
    stop_after(1)
    with pytest.raises(KeyboardInterrupt):
        run(project)
    stop_after(9)
    assert run(project, batch_size=2)[0][1] == answers


def test_a_full_disk_is_told_and_mended(project, monkeypatch, capsys):
    """Through the command line: one line, status 1, and no output."""
    arguments = ["generate-data", *(word for name, value in project.items() for word in (f"--{name}", str(value)))]

    def full(self, line):
        if line.startswith(b"4\t"):
            raise self._failed(self.part, OSError(28, "No space left on device"))
        return append(self, line)

    append = answer_files.AnswerWriter._append
    with monkeypatch.context() as patch:
        patch.setattr(answer_files.AnswerWriter, "_append", full)
        assert main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in error and "make room and start the same command again" in error
    assert not Path(project["output"]).exists()
    assert main(arguments) == 0
    assert "8 answers of target in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"engine": "magic"}, "`engine` is 'magic'; allowed"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0"),
        ({"temperature": -1}, "`temperature` is -1"),
        ({"top_p": 0.5}, "`top_p` is 0.5, but greedy"),
        ({"num_top_logits": 65}, "`num_top_logits` is 65; the vocabulary has only 64"),
        ({"thinking": "on"}, "no `enable_thinking`"),
        ({"max_prompt_tokens": 1}, "no prompt of at most 1 tokens; the longest has 20"),
        ({"max_new_tokens": 500}, "20 tokens.*512 positions.*--max_prompt_tokens 12"),
        ({"prompts": "none.jsonl"}, "No prompts at `none.jsonl`"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_is_refused_before_the_target_is_loaded(project, monkeypatch, changes, message):
    monkeypatch.setattr(engines.TransformersEngine, "__init__", None)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(project, **changes)
    assert not Path(project["output"]).parent.exists()


def test_long_prompts_are_left_out(project):
    (header, answers), _ = run(project, max_prompt_tokens=5)
    assert [answer["id"] for answer in answers] == ["p1", "p3", "p5", "p7"]
    assert header["prompts"]["count"] == 4


def test_batches_are_of_similar_length_the_longest_first(project, stop_after):
    calls = stop_after(9)
    run(project)
    lengths = [len(prompt) for batch in calls for prompt in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in calls] == [3, 3, 2]


def test_prompts_from_the_hub(project, monkeypatch):
    rows = [{"question": text} for text in TEXTS]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *args, split: rows))
    (_, answers), _ = run(project, prompts="org/sums", prompt_column="question", num_prompts=3)
    assert [(answer["id"], answer["source"]) for answer in answers] == [(0, "sums"), (1, "sums"), (2, "sums")]


# vLLM


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in for vLLM, whose answers count up from the prompt's length; what it was asked with."""
    asked = SimpleNamespace()

    class LLM:
        def __init__(self, **settings):
            asked.settings = settings

        def get_default_sampling_params(self):
            return SimpleNamespace(repetition_penalty=1.25)

        def generate(self, prompts, sampling, use_tqdm):
            asked.prompts, asked.sampling = prompts, sampling
            results = []
            for prompt, settings in zip(prompts, sampling, strict=True):
                start = len(prompt["prompt_token_ids"])
                ids = list(range(start, start + 3))
                # The chosen token, unlikely, comes first, as in vLLM.
                logprobs = [{i: SimpleNamespace(logprob=-9.0), 60: SimpleNamespace(logprob=-2.00004), 61: SimpleNamespace(logprob=-1.0)} for i in ids]  # fmt: skip
                completion = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs if settings["logprobs"] else None)
                results.append(SimpleNamespace(outputs=[completion]))
            return results

    module = SimpleNamespace(LLM=LLM, SamplingParams=dict, TokensPrompt=dict)
    monkeypatch.setitem(sys.modules, "vllm", module)
    return asked


def test_vllm_answers(project, vllm):
    (header, answers), _ = run(project, engine="vllm", batch_size=None, num_top_logits=2, temperature=0.5, seed=7)
    assert header["settings"]["engine"] == "vllm"
    for answer in answers:
        length = len(answer["prompt_ids"])
        assert answer["response_ids"] == [length, length + 1, length + 2]
        assert answer["top_ids"] == [[61, 60]] * 3 and answer["top_log_probs"] == [[-1.0, -2.0]] * 3
    assert vllm.settings["model"] == project["target"] and vllm.settings["max_logprobs"] == 2
    assert len(vllm.prompts) == 8
    settings = vllm.sampling[0]
    assert settings["repetition_penalty"] == 1.25  # the target's own
    assert settings["logprobs"] == 2 and settings["temperature"] == 0.5 and settings["max_tokens"] == 12
    assert sorted(settings["seed"] for settings in vllm.sampling) == list(range(7, 15))


def test_vllm_without_likeliest_tokens(project, vllm):
    (_, answers), _ = run(project, engine="vllm")
    assert all(set(answer) == {"id", "source", "prompt_ids", "response_ids"} for answer in answers)
    assert vllm.sampling[0]["logprobs"] is None and vllm.sampling[0]["temperature"] == 0


def test_vllm_must_be_installed(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="`engine` is 'vllm'.*`pip install vllm`"):
        run(project, engine="vllm")


# Several processes, and the real target


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "num_top_logits": 2}], ids=["greedy", "sampled"])
def test_two_processes_make_the_same_file_and_go_on_after_one(project, tmp_path, stop_after, settings):
    run(project, output=str(tmp_path / "alone.jsonl"), **settings)
    stop_after(1)
    with pytest.raises(KeyboardInterrupt):
        run(project, **settings)
    options = [word for name, value in (project | settings).items() for word in (f"--{name}", str(value))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "d3d_cli"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [*launch, "generate-data", *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("8 answers of target in") == 1
    assert Path(project["output"]).read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert os.listdir(Path(project["output"]).parent) == ["answers.jsonl"]


@pytest.mark.slow
def test_the_real_target(tmp_path, capsys):
    from transformers_d3d.demo import TARGET_NAME, demo_target_folder

    folder = demo_target_folder()
    questions = ["What is the capital of France?", "Name a colour.", "Count to five.", "What is 2 + 2? Explain."]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl.gz"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    options = {
        "target": folder, "target_name": TARGET_NAME, "prompts": prompts, "output": output, "max_new_tokens": 16,
        "batch_size": 2, "num_top_logits": 4, "device": "cpu",
    }  # fmt: skip
    assert (
        main(["generate-data", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]) == 0
    )
    assert f"4 answers of {TARGET_NAME} in" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = ResponseDataset(output, len(tokenizer), tokenizer=tokenizer, target=TARGET_NAME)
    assert "Paris" in tokenizer.decode(data[0]["response_ids"])
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question, answer in zip(questions, data, strict=True):
        inputs = encode_prompt(tokenizer, question)
        output = target.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
        assert answer["response_ids"] == output.tolist() == [top[0] for top in answer["top_ids"]]
