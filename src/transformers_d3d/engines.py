"""What runs the target on a batch of prompts: Transformers, or vLLM. Knows nothing about files."""

from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM


def sampling_settings(config) -> dict:
    """How `generate` chooses tokens: greedily, or from the whole distribution within `top_p`."""
    if config.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}


class TransformersEngine:
    """Answers by `target.generate`, in one left-padded batch.

    Args:
        config (`GenerateDataConfig`): The target and how it answers.
        device (`torch.device`): Where it runs.
    """

    def __init__(self, config, device: torch.device):
        self.config = config
        self.target = AutoModelForCausalLM.from_pretrained(
            config.target, revision=config.revision, dtype=config.dtype
        ).to(device)
        generation = self.target.generation_config
        eos = generation.eos_token_id
        self.eos_ids = [eos] if isinstance(eos, int) else eos or []
        self.pad_id = next((i for i in (generation.pad_token_id, *self.eos_ids) if i is not None), 0)

    def answer(self, prompts: list[list[int]], seeds: list[int]) -> list[dict]:
        """Answers prompts.

        Args:
            prompts (`list[list[int]]`): Their tokens.
            seeds (`list[int]`): A seed for each; the batch is sampled with the first.

        Returns:
            `list[dict]`: `response_ids`, up to and including an end token or cut at `max_new_tokens`, and with
            `num_top_logits` for each of these tokens the target's likeliest `top_ids` and `top_log_probs`.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        top = _TopLogProbs(self.target, self.config.num_top_logits) if self.config.num_top_logits else nullcontext()
        torch.manual_seed(seeds[0])
        with top:
            output = self.target.generate(
                input_ids=ids.to(self.target.device),
                attention_mask=mask.to(self.target.device),
                max_new_tokens=self.config.max_new_tokens,
                pad_token_id=self.pad_id,
                **sampling_settings(self.config),
            )
        answers = [{"response_ids": self._cut(row)} for row in output[:, longest:].tolist()]
        if self.config.num_top_logits:
            for answer, ids, log_probs in zip(answers, *top.by_sequence(), strict=True):
                length = len(answer["response_ids"])
                answer["top_ids"] = ids[:length]
                answer["top_log_probs"] = _rounded(log_probs[:length])
        return answers

    def _cut(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self.eos_ids), len(row) - 1)
        return row[: end + 1]


class _TopLogProbs:
    """Collects, while entered, the likeliest tokens of each forward pass: the model's own, before any processor."""

    def __init__(self, target, num: int):
        self.target, self.num = target, num
        self.ids, self.log_probs = [], []

    def _collect(self, module, args, output):
        log_probs, ids = output.logits[:, -1].float().log_softmax(-1).topk(self.num)
        self.ids.append(ids)
        self.log_probs.append(log_probs)

    def __enter__(self):
        self._handle = self.target.register_forward_hook(self._collect)

    def __exit__(self, *error):
        self._handle.remove()

    def by_sequence(self) -> tuple[list, list]:
        """Ids and log-probabilities, `(batch, steps, num)` as lists."""
        return torch.stack(self.ids, dim=1).tolist(), torch.stack(self.log_probs, dim=1).tolist()


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in rows]


class VllmEngine:
    """Answers by vLLM, which batches on its own. As [`TransformersEngine`], but each prompt is sampled with its own seed.

    Raises:
        `ImportError`: Without vLLM; says what to install.
    """

    def __init__(self, config, device: torch.device):
        try:
            import vllm
        except ImportError as error:
            raise ImportError(
                f"`engine` is 'vllm', but vLLM cannot be imported ({error}): `pip install vllm`, or use "
                "`--engine transformers`."
            ) from error
        self.config, self.vllm = config, vllm
        self.model = vllm.LLM(
            model=config.target,
            revision=config.revision,
            tokenizer_revision=config.revision,
            dtype=config.dtype,
            max_logprobs=max(config.num_top_logits, 1),
        )
        # As `generate` does; the target's ends of sequence vLLM heeds by itself.
        self.repetition_penalty = self.model.get_default_sampling_params().repetition_penalty

    def answer(self, prompts: list[list[int]], seeds: list[int]) -> list[dict]:
        """As [`TransformersEngine.answer`]."""
        config, vllm = self.config, self.vllm
        settings = [
            vllm.SamplingParams(
                temperature=config.temperature,
                top_p=config.top_p if config.temperature else 1.0,
                repetition_penalty=self.repetition_penalty,
                max_tokens=config.max_new_tokens,
                seed=seed,
                logprobs=config.num_top_logits or None,
                detokenize=False,
            )
            for seed in seeds
        ]
        inputs = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        answers = []
        for result in self.model.generate(inputs, settings, use_tqdm=False):
            completion = result.outputs[0]
            answer = {"response_ids": list(completion.token_ids)}
            if config.num_top_logits:
                # vLLM adds the chosen token when it is not among the likeliest.
                tops = [
                    sorted(((token, p.logprob) for token, p in step.items()), key=lambda pair: -pair[1])
                    for step in completion.logprobs
                ]
                tops = [top[: config.num_top_logits] for top in tops]
                answer["top_ids"] = [[token for token, _ in top] for top in tops]
                answer["top_log_probs"] = _rounded([[p for _, p in top] for top in tops])
            answers.append(answer)
        return answers


ENGINES = {"transformers": TransformersEngine, "vllm": VllmEngine}
