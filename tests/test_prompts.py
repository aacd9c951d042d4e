"""Reading prompts from files, folders and the Hub, and asking in a stated thinking mode."""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from transformers_d3d.prompts import check_thinking, encode_prompt, read_hub_prompts, read_prompts

HI = [{"role": "user", "content": "Hi"}]
CHAT = [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Hello"}]


def write(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        pytest.param({"turns": ["Hi", "And?"]}, HI, id="the-first-turn"),
        pytest.param({"prompt": "Hi"}, HI, id="prompt"),
        pytest.param({"messages": HI}, HI, id="messages"),
        pytest.param({"messages": CHAT}, CHAT[:2], id="up-to-the-users-last-turn"),
        pytest.param({"messages": CHAT + HI}, CHAT + HI, id="several-turns"),
        pytest.param({"prompt": CHAT}, CHAT[:2], id="messages-by-another-name"),
        pytest.param({"turns": ["Hi"], "prompt": "Bye"}, HI, id="turns-first"),
    ],
)
@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_what_a_line_may_hold(tmp_path, name, line, messages):
    path = write(tmp_path / name, [line | {"id": "a", "other": 1}])
    assert read_prompts(path) == [line | {"id": "a", "other": 1, "messages": messages, "source": "prompts"}]


def test_a_column_and_a_count(tmp_path):
    path = write(tmp_path / "prompts.jsonl", [{"question": "Hi", "prompt": "Bye", "source": "mine"}] * 3 + ["bad"])
    prompts = read_prompts(path, 2, column="question")
    assert [(prompt["messages"], prompt["source"]) for prompt in prompts] == [(HI, "mine")] * 2


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    write(tmp_path / "b.jsonl", [{"prompt": "3"}])
    write(tmp_path / "a.jsonl.gz", [{"prompt": "1"}, {"prompt": "2"}])
    (tmp_path / "notes.txt").write_text("no prompts")
    prompts = read_prompts(tmp_path)
    assert [(p["prompt"], p["source"]) for p in prompts] == [("1", "a"), ("2", "a"), ("3", "b")]


def test_line_separators_within_a_text_end_no_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(path)[0]["messages"][0]["content"] == "a\u2028b"


@pytest.mark.parametrize(
    "line",
    [
        [1],
        {},
        {"prompt": 3},
        {"prompt": None},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "system", "content": "x"}]},
        {"turns": [3]},
    ],
    ids=str,
)
def test_lines_without_prompt_are_named(tmp_path, line):
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}, line])
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 2: .*`turns`.*`messages`.*`prompt`"):
        read_prompts(path)
    with pytest.raises(ValueError, match=r"line 1: .*`question` with text or messages"):
        read_prompts(path, column="question")


def test_nothing_there_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(FileNotFoundError, match=f"No prompts at `{path}`"):
            read_prompts(path)


def test_a_data_set_on_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return [{"question": "Hi", "id": i} for i in range(4)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prompts = read_hub_prompts("org/sums", 3, "question", "main", "test")
    assert asked == [("org/sums", "main", "test")]
    assert [(p["id"], p["messages"], p["source"]) for p in prompts] == [(i, HI, "sums") for i in range(3)]
    with pytest.raises(ValueError, match="org/sums, row 0: .*`turns`"):
        read_hub_prompts("org/sums")


def test_the_hub_needs_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"`org/sums` is no file.*pip install 'transformers-d3d\[data\]'"):
        read_hub_prompts("org/sums")


# Asking


def test_text_and_messages_ask_the_same(tokenizer):
    ids = encode_prompt(tokenizer, "abc")["input_ids"].tolist()
    assert ids == encode_prompt(tokenizer, [{"role": "user", "content": "abc"}])["input_ids"].tolist()
    assert tokenizer.decode(ids[0]) == "<s>abc"


def test_the_thinking_mode_reaches_the_template(tokenizer):
    tokenizer.chat_template += (
        "{% if enable_thinking is not defined %}d{% elif enable_thinking %}y{% else %}n{% endif %}"
    )
    for thinking, letter in {"template": "d", "on": "y", "off": "n"}.items():
        check_thinking(tokenizer, thinking)
        ids = encode_prompt(tokenizer, "abc", thinking=thinking)["input_ids"][0]
        assert tokenizer.decode(ids) == f"<s>abc{letter}"


def test_thinking_that_the_template_does_not_know(tokenizer):
    check_thinking(tokenizer, "template")
    for thinking in ("on", "off"):
        with pytest.raises(ValueError, match=f"`thinking` is '{thinking}'.*no `enable_thinking`; use 'template'"):
            check_thinking(tokenizer, thinking)
    with pytest.raises(ValueError, match="`thinking` is 'maybe'; allowed are"):
        check_thinking(tokenizer, "maybe")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template.*instruction-tuned"):
        check_thinking(tokenizer, "template")
