"""`d3d generate-data`: a target's answers to prompts, as training data that says how it was made."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from .answer_files import SCHEMA, AnswerWriter, short_name, stable_hash, tokenizer_hash
from .benchmark import check_dtype
from .engines import ENGINES
from .prompts import ENDINGS, check_thinking, encode_prompt, read_hub_prompts, read_prompts
from .records import versions


@dataclass
class GenerateDataConfig:
    """What `d3d generate-data` asks, and how the target answers."""

    target: str = field(metadata={"help": "The target: an id on the Hub or a folder."})
    prompts: str = field(
        metadata={
            "help": "JSON-lines file (.gz too) of `turns`, `messages` or `prompt`; a folder of them; or the id of a data "
            "set on the Hub."
        }
    )
    output: str = field(metadata={"help": "Write the answers to this JSON-lines file, gzipped if it ends in .gz."})
    revision: str | None = field(default=None, metadata={"help": "Revision of the target on the Hub."})
    target_name: str | None = field(
        default=None, metadata={"help": "Id of the target on the Hub, kept in the file. Default: that of --target."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set on the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the data set on the Hub."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Field with the prompt: text or messages. Default: turns, messages or prompt."}
    )
    num_prompts: int | None = field(default=None, metadata={"help": "Use the first prompts only."})
    max_prompt_tokens: int | None = field(default=None, metadata={"help": "Leave out longer prompts."})
    thinking: str = field(
        default="template", metadata={"help": "on, off, or template: whatever the chat template does by itself."}
    )
    max_new_tokens: int = field(default=512, metadata={"help": "Length of each answer, in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "0 for greedy decoding, else sampling."})
    top_p: float = field(default=1.0, metadata={"help": "Sample from the likeliest tokens with this probability."})
    seed: int = field(default=0, metadata={"help": "Seed, when sampling."})
    num_top_logits: int = field(
        default=0, metadata={"help": "Keep this many of the target's likeliest tokens at each token of an answer."}
    )
    engine: str = field(default="transformers", metadata={"help": "transformers or vllm."})
    batch_size: int | None = field(
        default=None, metadata={"help": "Prompts answered at once. Default: 16, or 512 with vllm."}
    )
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16."})
    device: str | None = field(
        default=None, metadata={"help": "cpu, cuda ... Default: an accelerator if there is one."}
    )

    def __post_init__(self):
        check_dtype(self.dtype)
        if self.engine not in ENGINES:
            raise ValueError(f"`engine` is {self.engine!r}; allowed are 'transformers' and 'vllm'.")
        if self.batch_size is None:
            self.batch_size = 512 if self.engine == "vllm" else 16
        for name in ("max_new_tokens", "batch_size", "num_prompts", "max_prompt_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.num_top_logits < 0:
            raise ValueError(
                f"`temperature` is {self.temperature} (it must be 0, for greedy, or positive), `top_p` {self.top_p} (above "
                f"0 and at most 1) and `num_top_logits` {self.num_top_logits} (0 or more)."
            )
        if self.temperature == 0 and self.top_p != 1:
            raise ValueError(
                f"`top_p` is {self.top_p}, but greedy decoding samples nothing; give a `temperature`, too."
            )


def run_generate_data(config: GenerateDataConfig) -> str | None:
    """Answers prompts with the target and writes the answers.

    Batches are made of prompts of similar length, the longest first, and are fixed before anything is generated: a run
    that goes on where another was stopped makes the same batches, and samples them with the same seeds. Several
    processes (`torchrun`, `accelerate launch`) share the batches.

    Returns:
        `str`: A summary for people; `None` in all processes but the first.

    Raises:
        `ValueError`, `OSError`, `ImportError`: For what the user can mend; the message says how.
    """
    # The processes wait for the slowest at the end, for longer than the few minutes that are usual in training.
    state = PartialState(cpu=config.device == "cpu", timeout=timedelta(days=7))
    if state.num_processes > 1 and config.engine == "vllm":
        raise ValueError(
            f"`engine` is 'vllm' in {state.num_processes} processes, but vLLM starts its own; start this one alone."
        )
    tokenizer = AutoTokenizer.from_pretrained(config.target, revision=config.revision)
    check_thinking(tokenizer, config.thinking)
    target_config = AutoConfig.from_pretrained(config.target, revision=config.revision)
    prompts = _prompts(config, tokenizer, target_config.get_text_config())
    header = _header(config, tokenizer, target_config, prompts)
    writer = AnswerWriter(config.output, header, len(prompts), state.process_index, state.num_processes)
    state.wait_for_everyone()  # before anyone writes what another still reads
    if not writer.finished:
        speed = _answer(config, writer, prompts, state)
        state.wait_for_everyone()
    if not state.is_main_process:
        return None
    if writer.finished:
        writer.remove_parts()
        return f"`{config.output}` is finished: {len(prompts)} answers, made with these settings. Nothing to do."
    writer.finish()
    return f"{len(prompts)} answers of {header['target']} in `{config.output}`{speed}."


def _prompts(config: GenerateDataConfig, tokenizer, text_config) -> list[dict]:
    """The prompts with their `prompt_ids`."""
    path = Path(config.prompts)
    if path.exists() or path.name.endswith(ENDINGS) or path.is_absolute():
        prompts = read_prompts(path, config.num_prompts, config.prompt_column)
    else:
        prompts = read_hub_prompts(
            config.prompts, config.num_prompts, config.prompt_column, config.dataset_config, config.dataset_split
        )
    for prompt in prompts:
        prompt["prompt_ids"] = encode_prompt(tokenizer, prompt["messages"], thinking=config.thinking)["input_ids"][
            0
        ].tolist()
    longest = max((len(prompt["prompt_ids"]) for prompt in prompts), default=0)
    if config.max_prompt_tokens is not None:
        prompts = [prompt for prompt in prompts if len(prompt["prompt_ids"]) <= config.max_prompt_tokens]
    if not prompts:
        raise ValueError(
            f"`{config.prompts}` leaves no prompt"
            + (f" of at most {config.max_prompt_tokens} tokens; the longest has {longest}." if longest else ".")
        )
    room = getattr(text_config, "max_position_embeddings", None)
    longest = max(len(prompt["prompt_ids"]) for prompt in prompts)
    if room is not None and longest + config.max_new_tokens > room:
        raise ValueError(
            f"A prompt has {longest} tokens, and with `max_new_tokens` {config.max_new_tokens} that is more than the "
            f"target's {room} positions; give fewer, or leave out long prompts with "
            f"`--max_prompt_tokens {max(room - config.max_new_tokens, 1)}`."
        )
    return prompts


def _header(config: GenerateDataConfig, tokenizer, target_config, prompts: list[dict]) -> dict:
    vocab_size = target_config.get_text_config().vocab_size
    if config.num_top_logits > vocab_size:
        raise ValueError(f"`num_top_logits` is {config.num_top_logits}; the vocabulary has only {vocab_size} tokens.")
    sampled = config.temperature > 0
    return {
        "schema": SCHEMA,
        "target": config.target_name or short_name(config.target),
        "revision": getattr(target_config, "_commit_hash", None),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "vocab_size": vocab_size,
        "settings": {
            "thinking": config.thinking,
            "chat_template_hash": stable_hash(tokenizer.get_chat_template()),
            "max_new_tokens": config.max_new_tokens,
            "do_sample": sampled,
            "temperature": config.temperature,
            "top_p": config.top_p,
            # What only sampled answers depend on.
            "seed": config.seed if sampled else None,
            "batch_size": config.batch_size if sampled and config.engine == "transformers" else None,
            "num_top_logits": config.num_top_logits,
            "engine": config.engine,
            "dtype": config.dtype,
            "generation_config": _generation_config(config, target_config),
        },
        "prompts": {
            "count": len(prompts),
            "hash": stable_hash([[p.get("id"), p["source"], p["messages"]] for p in prompts]),
        },
        "versions": versions(),
    }


def _generation_config(config: GenerateDataConfig, target_config) -> dict:
    """What the target's own generation configuration adds to the settings: ends of sequence, a repetition penalty and the like."""
    try:
        own = GenerationConfig.from_pretrained(config.target, revision=config.revision)
    except OSError:  # the target has none
        own = GenerationConfig.from_model_config(target_config)
    ours = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "max_length")
    harmless = ("use_cache", "bos_token_id", "pad_token_id", "transformers_version")  # they change no token
    return {
        name: value
        for name, value in own.to_diff_dict().items()
        if name not in ours + harmless and not name.startswith(("_", "output_"))
    }


def _answer(config: GenerateDataConfig, writer: AnswerWriter, prompts: list[dict], state: PartialState) -> str:
    """Answers this process's share of what is left; returns its speed, in words."""
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]["prompt_ids"]), index))
    batches = [order[first : first + config.batch_size] for first in range(0, len(order), config.batch_size)]
    done = writer.done
    # Whole batches, also those begun: with other neighbours, other tokens are sampled.
    left = [batch for batch in batches if not done.issuperset(batch)][state.process_index :: state.num_processes]
    if not left:
        return ""
    device = config.device if config.device and state.num_processes == 1 else state.device
    engine = ENGINES[config.engine](config, device)
    num_tokens, started = 0, time.perf_counter()
    todo = [index for batch in left for index in batch if index not in done]
    bar = tqdm(
        total=len(done) + len(todo),
        initial=len(done),
        desc="answers" if state.num_processes == 1 else f"answers (1 of {state.num_processes} processes)",
        unit="answer",
        smoothing=0,
        disable=not state.is_main_process,
    )
    with writer, bar:
        for batch in left:
            answers = engine.answer(
                [prompts[index]["prompt_ids"] for index in batch], [config.seed + index for index in batch]
            )
            num_tokens += sum(len(answer["response_ids"]) for answer in answers)
            for index, answer in zip(batch, answers, strict=True):
                if index not in done:
                    prompt = prompts[index]
                    about = {"id": prompt.get("id", index), "source": prompt["source"]}
                    writer.write(index, about | {"prompt_ids": prompt["prompt_ids"]} | answer)
                    bar.update()
            bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - started):.1f} tokens/s")
    return f", {num_tokens} tokens at {num_tokens / (time.perf_counter() - started):.1f} tokens/s in this process"
