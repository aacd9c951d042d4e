"""Prompts from JSON lines, a folder of them or a data set on the Hub, and their tokens by the chat template."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from .json_lines import read_json_lines

FIELDS = (
    "`turns` (a list of the user's turns as text, of which the first is asked), `messages` (a list of objects with `role` "
    "and `content`) or `prompt` (text)"
)
ENDINGS = (".jsonl", ".jsonl.gz")
THINKING = {"template": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


def read_prompts(path: str | os.PathLike, count: int | None = None, column: str | None = None) -> list[dict]:
    """The first prompts of a JSON-lines file, or of a folder of such files in the order of their names.

    Args:
        path (`str` or `os.PathLike`): A file, gzipped if it ends in `.gz`, or a folder of `*.jsonl` and `*.jsonl.gz`.
        count (`int`, *optional*): How many. Default: all.
        column (`str`, *optional*): The field that holds the prompt. Default: `turns`, `messages` or `prompt`.

    Returns:
        `list[dict]`: The lines' objects, each with `messages` up to the user's last turn, and a `source` (by default the
        name of the file).

    Raises:
        `FileNotFoundError`, `ValueError`: If nothing is there, or a line holds no prompt; names the line.
    """
    path = Path(path)
    files = sorted(file for file in path.glob("*") if file.name.endswith(ENDINGS)) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(
            f"No prompts at `{path}`; give a JSON-lines file, or a folder of *.jsonl or *.jsonl.gz, whose lines hold "
            f"{FIELDS}."
        )
    lines = (
        (where, value, file.name.partition(".")[0])
        for file in files
        for where, value in read_json_lines(file, f"an object with {FIELDS}")
    )
    return list(_prompts(lines, count, column))


def read_hub_prompts(
    name: str,
    count: int | None = None,
    column: str | None = None,
    config: str | None = None,
    split: str = "train",
) -> list[dict]:
    """As [`read_prompts`], from a data set on the Hub.

    Raises:
        `ImportError`: Without the package `datasets`; says what to install.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"`{name}` is no file or folder here, and reading it from the Hub needs the package `datasets`: "
            "`pip install 'transformers-d3d[data]'`."
        ) from error
    rows = load_dataset(name, config, split=split)
    source = name.rpartition("/")[2]
    return list(_prompts(((f"{name}, row {i}", row, source) for i, row in enumerate(rows)), count, column))


def _prompts(lines: Iterable[tuple[str, object, str]], count: int | None, column: str | None) -> Iterator[dict]:
    for where, value, source in islice(lines, count):
        messages = _messages(value, column)
        if messages is None:
            fields = f"`{column}` with text or messages" if column else FIELDS
            raise ValueError(f"{where}: it is {str(value)[:60]}; each line must be an object with {fields}.")
        yield {"source": source} | value | {"messages": messages}


def _messages(value: object, column: str | None) -> list[dict] | None:
    """The conversation up to the user's last turn; `None` if there is none."""
    if not isinstance(value, dict):
        return None
    prompt = next(
        (value[name] for name in ([column] if column else ["turns", "messages", "prompt"]) if name in value), None
    )
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
    ):
        return None
    last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
    return prompt[: last + 1] if last is not None else None


def check_thinking(tokenizer, thinking: str) -> None:
    """Raises `ValueError` if the tokenizer has no chat template, or one that cannot think as asked.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        thinking (`str`): `"template"`, the template's own default; `"on"` or `"off"`.
    """
    if thinking not in THINKING:
        raise ValueError(f"`thinking` is {thinking!r}; allowed are 'template', 'on' and 'off'.")
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of `{tokenizer.name_or_path}` has no chat template, so there is no telling how to ask; use an "
            "instruction-tuned target, or set `tokenizer.chat_template` and save the tokenizer with the target."
        )
    if thinking != "template" and "enable_thinking" not in tokenizer.get_chat_template():
        raise ValueError(
            f"`thinking` is {thinking!r}, but the chat template of `{tokenizer.name_or_path}` knows no `enable_thinking`; "
            "use 'template'."
        )


def encode_prompt(
    tokenizer, prompt: str | list[dict], device: str | torch.device = "cpu", thinking: str = "template"
) -> dict[str, torch.Tensor]:
    """The inputs of `generate` for a prompt: the chat template applied, the generation prompt included.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompt (`str` or `list[dict]`): The user's turn, or messages.
        device (`str` or `torch.device`): Where to.
        thinking (`str`): As in [`check_thinking`].

    Raises:
        `ValueError`: If the template refuses the messages.
    """
    from jinja2 import TemplateError  # what Transformers needs for chat templates only

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **THINKING[thinking]
        )
    except TemplateError as error:
        raise ValueError(
            f"The chat template of `{tokenizer.name_or_path}` refuses the messages {str(messages)[:100]} ({error}); change "
            "or leave out this prompt."
        ) from error
    return inputs.to(device)
