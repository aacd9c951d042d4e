"""Drafting inside `generate`: whatever the drafter proposes, the output is the target's own."""

import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)

from transformers_d3d import D3DCandidateGenerator, D3DDrafterModel, generation_d3d, install_seam, remove_seam
from transformers_d3d.acceptance import simulate_acceptance
from transformers_d3d.masking_d3d import mask_rows, trunk_rows
from transformers_d3d.overlap_d3d import Done

BLOCK = 5
NUM_DRAFTS = BLOCK - 1
PROMPT = torch.tensor([[5, 9, 33, 17, 2, 40]])
BACKBONES = ["llama", "qwen3", "gemma", "gemma3", "mistral"]
KINDS = {None: "untrained", "random": "random", "oracle": "oracle", 0: "wrong-at-0", 1: "wrong-at-1", 3: "wrong-at-3"}


def each_drafter(*kinds):
    kinds = kinds or tuple(KINDS)
    return pytest.mark.parametrize("kind", kinds, ids=[KINDS[kind] for kind in kinds])


class Scripted(D3DCandidateGenerator):
    """Runs the drafter, but proposes a script: noise, or the target's own continuation, wrong at one offset."""

    def _block_logits(self, hidden_states, first, end):
        logits = super()._block_logits(hidden_states, first, end)
        script, wrong_at = self.drafter.script, self.drafter.wrong_at
        if script is None:
            return logits
        if isinstance(script, torch.Generator):
            return torch.randn(logits.shape, generator=script) * 5
        tokens = script[self.num_seen + first : self.num_seen + end].clone()
        if wrong_at is not None and first <= wrong_at < end:
            tokens[wrong_at - first] = (tokens[wrong_at - first] + 1) % logits.shape[1]
        scripted = torch.full_like(logits, -20.0)
        scripted[torch.arange(len(tokens)), tokens] = 20.0
        return scripted


class ScriptedDrafter(D3DDrafterModel):
    script, wrong_at = None, None

    def get_candidate_generator(self, **kwargs):
        generator = super().get_candidate_generator(**kwargs)
        generator.__class__ = Scripted
        return generator


# Settings of every drafter that `make_drafter` makes; see `each_overlap`.
DRAFTING = {}


@pytest.fixture(params=["inline", "thread"])
def each_overlap(request, monkeypatch):
    monkeypatch.setitem(DRAFTING, "overlap", request.param)
    if request.param != "inline":
        monkeypatch.setitem(DRAFTING, "num_successors", 5)
    return request.param


with_and_without_overlap = pytest.mark.usefixtures("each_overlap")


def set_drafting(drafter, **settings):
    for name, value in settings.items():
        setattr(drafter.config, name, value)
    return drafter


def make_drafter(target, kind=None, truth=None, **kwargs):
    drafter = ScriptedDrafter.from_causal_lm(target, mask_token_id=60, **{"block_size": BLOCK} | kwargs)
    set_drafting(drafter, **DRAFTING)
    if kind == "random":
        drafter.script = torch.Generator().manual_seed(0)
    elif kind is not None:
        # Longer than any test asks for, so that the oracle never runs out.
        drafter.script = greedy(target, max_new_tokens=60)[0] if truth is None else truth
        drafter.wrong_at = None if kind == "oracle" else kind
    return drafter


def greedy(target, ids=PROMPT, drafter=None, max_new_tokens=20, **kwargs):
    if drafter is not None:
        kwargs["assistant_model"] = drafter
    return target.generate(ids, do_sample=False, max_new_tokens=max_new_tokens, **kwargs)


@pytest.fixture
def llama(targets):
    return targets["llama"]


@pytest.fixture
def truth(llama):
    return greedy(llama, max_new_tokens=60)[0]


@with_and_without_overlap
@each_drafter()
@pytest.mark.parametrize("name", BACKBONES)
def test_greedy_output_is_the_targets_own(targets, name, kind):
    target = targets[name]
    drafter = make_drafter(target, kind)
    plain = greedy(target, max_new_tokens=23)
    assert torch.equal(greedy(target, drafter=drafter, max_new_tokens=23), plain)
    # The prefill gives one token and 22 are left; the last of them is the target's own.
    if kind == "oracle":
        assert drafter.report.accepted == [4, 4, 4, 4, 1]
    elif isinstance(kind, int):
        full, rest = divmod(22, kind + 1)
        assert drafter.report.accepted == [kind] * full + ([rest - 1] if rest else [])
    assert sum(drafter.report.accepted) + drafter.report.rounds == 22


@with_and_without_overlap
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("rank", [0, 4], ids=["plain", "adapters"])
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_real_acceptance_equals_the_simulated(targets, make_perturbed, name, rank, block_attention, num_steps):
    target = targets[name]
    drafter = make_perturbed(target, rank, block_size=BLOCK, block_attention=block_attention)
    set_drafting(drafter, num_denoising_steps=num_steps, **DRAFTING)
    output = greedy(target, drafter=drafter, max_new_tokens=40)
    example = {"prompt_ids": PROMPT[0].tolist(), "response_ids": output[0, PROMPT.shape[1] :].tolist()}
    assert list(simulate_acceptance(drafter, [example]).rounds) == drafter.report.accepted


@with_and_without_overlap
@each_drafter(None, "random")
@pytest.mark.parametrize("prompt", [[[10]], [[10, 11]], None], ids=["one-token", "two-tokens", "none"])
def test_short_prompts(llama, prompt, kind):
    inputs = {} if prompt is None else {"inputs": torch.tensor(prompt)}
    drafter = make_drafter(llama, kind)
    plain = llama.generate(**inputs, do_sample=False, max_new_tokens=15)
    assert torch.equal(llama.generate(**inputs, do_sample=False, max_new_tokens=15, assistant_model=drafter), plain)


@with_and_without_overlap
@each_drafter()
@pytest.mark.parametrize("max_new_tokens", [1, 2, NUM_DRAFTS, BLOCK, BLOCK + 1])
def test_remaining_length_bounds_the_draft(llama, truth, kind, max_new_tokens):
    drafter = make_drafter(llama, kind, truth)
    plain = greedy(llama, max_new_tokens=max_new_tokens)
    assert torch.equal(greedy(llama, drafter=drafter, max_new_tokens=max_new_tokens), plain)
    left = max_new_tokens - 1
    for proposed, accepted in zip(drafter.report.proposed, drafter.report.accepted, strict=True):
        assert accepted <= proposed <= max(left - 1, 0)
        left -= accepted + 1
    assert left == 0


class Collector:
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


@with_and_without_overlap
@each_drafter()
@pytest.mark.parametrize("offset", range(8))
def test_end_of_sequence_inside_a_block(llama, truth, kind, offset):
    drafter = make_drafter(llama, kind, truth)
    token = int(truth[PROMPT.shape[1] + offset])
    for eos in (token, [60, token]):
        settings = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 0}
        plain = greedy(llama, **settings)
        streamer = Collector()
        settings |= {"streamer": streamer, "return_dict_in_generate": True, "output_scores": True}
        output = greedy(llama, drafter=drafter, **settings)
        assert torch.equal(output.sequences, plain)
        assert streamer.tokens == plain[0].tolist()
        assert len(output.scores) == plain.shape[1] - PROMPT.shape[1]
        assert output.cache.get_seq_length() == plain.shape[1] - 1


class Stops(StoppingCriteria):
    def __init__(self, condition):
        self.condition = condition

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), bool(self.condition(input_ids[0])))


@with_and_without_overlap
@each_drafter()
@pytest.mark.parametrize("offset", range(7))
def test_custom_stopping_criteria_stop_inside_a_block(llama, truth, kind, offset):
    drafter = make_drafter(llama, kind, truth)
    token, length = int(truth[PROMPT.shape[1] + offset]), PROMPT.shape[1] + offset + 1
    for condition in (lambda ids: ids[-1] == token, lambda ids: len(ids) == length):
        criteria = StoppingCriteriaList([Stops(condition)])
        plain = greedy(llama, max_new_tokens=30, stopping_criteria=criteria)
        assert torch.equal(greedy(llama, drafter=drafter, max_new_tokens=30, stopping_criteria=criteria), plain)


@with_and_without_overlap
@each_drafter("oracle", 1)
def test_stop_strings(llama, truth, kind, tokenizer):
    drafter = make_drafter(llama, kind, truth)
    words = [tokenizer.decode([i]) for i in truth[PROMPT.shape[1] :].tolist()]
    for stop in (words[2], words[5], words[3] + words[4]):
        settings = {"max_new_tokens": 30, "stop_strings": [stop], "tokenizer": tokenizer}
        plain = greedy(llama, **settings)
        assert plain.shape[1] < PROMPT.shape[1] + 30
        assert torch.equal(greedy(llama, drafter=drafter, **settings), plain)


@with_and_without_overlap
@each_drafter()
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [12]]},
        {"min_new_tokens": 9, "eos_token_id": [3, 11, 12], "pad_token_id": 0},
        {"min_length": 15, "eos_token_id": 11, "pad_token_id": 0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_logits_processors_are_respected(llama, kind, settings):
    config = GenerationConfig(do_sample=False, max_new_tokens=25, **settings)
    before = config.to_dict()
    plain = llama.generate(PROMPT, generation_config=config)
    drafter = make_drafter(llama, kind, plain[0])
    assert torch.equal(llama.generate(PROMPT, generation_config=config, assistant_model=drafter), plain)
    assert config.to_dict() == before


def test_drafts_follow_the_processors(llama):
    """A drafter whose clean rows are its target's keeps its first token under a penalty that changes the choice."""
    drafter = make_drafter(llama)
    greedy(llama, drafter=drafter, max_new_tokens=30, repetition_penalty=1.7)
    assert drafter.report.accepted_by_position[0] == 1.0


@with_and_without_overlap
@each_drafter()
def test_scores_and_logits_of_every_token(llama, truth, kind):
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = greedy(llama, **settings)
    drafted = greedy(llama, drafter=make_drafter(llama, kind, truth), **settings)
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.cat(getattr(drafted, name)), torch.cat(getattr(plain, name)), rtol=1e-4, atol=1e-4
        )


@with_and_without_overlap
@pytest.mark.parametrize("padding", [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1]], ids=["left", "inside"])
def test_padding_in_the_prompt(llama, padding):
    mask = torch.tensor([padding])
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    plain = greedy(llama, ids, attention_mask=mask, max_new_tokens=25)
    drafter, bare = make_drafter(llama), make_drafter(llama)
    assert torch.equal(greedy(llama, ids, drafter=drafter, attention_mask=mask, max_new_tokens=25), plain)
    if sum(padding) == PROMPT.shape[1]:
        greedy(llama, drafter=bare, max_new_tokens=25)
        assert drafter.report.accepted == bare.report.accepted


@with_and_without_overlap
@each_drafter()
def test_embedded_prompts(llama, truth, kind):
    drafter = make_drafter(llama, kind, truth)
    embeds = llama.get_input_embeddings()(PROMPT).detach()
    for inputs in ({"inputs_embeds": embeds}, {"input_ids": PROMPT, "inputs_embeds": embeds}):
        plain = llama.generate(**inputs, do_sample=False, max_new_tokens=12)
        drafted = llama.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
        assert torch.equal(drafted, plain)


@with_and_without_overlap
@each_drafter("random", "oracle", 1)
@pytest.mark.parametrize("how", ["whole-sequence", "new-tokens-only"])
def test_a_cache_kept_across_turns(llama, kind, how):
    plain, drafted = (list(conversation(llama, how, kind, drafts)) for drafts in (False, True))
    for (a, a_length), (b, b_length) in zip(plain, drafted, strict=True):
        assert torch.equal(a, b)
        assert a_length == b_length


def conversation(target, how, kind, drafts):
    """Yields the sequence and the cache's length after each of three turns over one cache."""
    cache, sequence = DynamicCache(config=target.config), PROMPT[:, :0]
    for turn in range(3):
        ids = torch.cat([sequence, torch.tensor([[3 + turn, 8, 21]])], dim=1)
        inputs = {"inputs": ids}
        if how == "new-tokens-only" and turn:
            inputs = {"inputs": ids[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(ids)}
        settings = {"do_sample": False, "max_new_tokens": 7, "cache": cache}
        if drafts:
            settings["assistant_model"] = make_drafter(target, kind)
        output = target.generate(**inputs, **settings)
        sequence = torch.cat([ids[:, : ids.shape[1] - inputs["inputs"].shape[1]], output], dim=1)
        yield sequence, cache.get_seq_length()


@each_drafter()
def test_static_cache(llama, truth, kind):
    plain = greedy(llama, max_new_tokens=17)
    drafter = make_drafter(llama, kind, truth)
    assert torch.equal(greedy(llama, drafter=drafter, max_new_tokens=17, cache_implementation="static"), plain)


def test_wide_margins_match_in_bfloat16_too(successor):
    target = copy.deepcopy(successor).to(torch.bfloat16)
    drafter = make_drafter(target, "random")
    assert drafter.dtype == torch.bfloat16
    assert torch.equal(greedy(target, drafter=drafter, max_new_tokens=40), greedy(target, max_new_tokens=40))


@with_and_without_overlap
def test_drafter_and_target_of_different_dtype(llama):
    drafter = make_drafter(llama).to(torch.bfloat16)
    assert torch.equal(greedy(llama, drafter=drafter), greedy(llama))
    assert drafter.report.mean_acceptance_length > 1.5


# Conventional knobs


@with_and_without_overlap
@pytest.mark.parametrize("where", ["kwarg", "generation_config", "drafter"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_num_assistant_tokens(llama, truth, where, number):
    drafter = make_drafter(llama, "oracle", truth)
    kwargs = {}
    if where == "kwarg":
        kwargs = {"num_assistant_tokens": number}
    elif where == "generation_config":
        kwargs = {"generation_config": GenerationConfig(num_assistant_tokens=number)}
    else:
        drafter.generation_config.num_assistant_tokens = number
    before = drafter.generation_config.to_dict()
    assert torch.equal(greedy(llama, drafter=drafter, **kwargs)[0], truth[:26])
    assert set(drafter.report.accepted[:-1]) == {number}
    assert drafter.generation_config.to_dict() == before


def test_too_many_assistant_tokens_are_capped_by_the_block(llama, truth):
    drafter = make_drafter(llama, "oracle", truth)
    greedy(llama, drafter=drafter, num_assistant_tokens=50)
    assert max(drafter.report.accepted) == NUM_DRAFTS


@pytest.mark.parametrize(("name", "value"), [("num_assistant_tokens", -3), ("num_assistant_tokens_schedule", "some")])
def test_impossible_knobs_are_refused(llama, name, value):
    drafter = make_drafter(llama)
    setattr(drafter.generation_config, name, value)
    with pytest.raises(ValueError, match=name):
        greedy(llama, drafter=drafter)


@with_and_without_overlap
def test_heuristic_schedule_adapts_and_leaves_the_drafter_alone(llama, truth):
    drafter = make_drafter(llama, "random")
    drafter.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = drafter.generation_config.to_dict()
    greedy(llama, drafter=drafter)
    assert drafter.report.proposed[:4] == [4, 3, 2, 1]
    assert drafter.generation_config.to_dict() == before
    drafter = make_drafter(llama, "oracle", truth)
    drafter.generation_config.num_assistant_tokens = 1
    drafter.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    greedy(llama, drafter=drafter)
    assert drafter.report.proposed[:3] == [1, 3, 4]


@with_and_without_overlap
@pytest.mark.parametrize("where", ["kwarg", "drafter"])
def test_confidence_threshold_cuts_the_draft(llama, where):
    drafter, uncut = make_drafter(llama), make_drafter(llama)
    kwargs = {"assistant_confidence_threshold": 0.9} if where == "kwarg" else {}
    if where == "drafter":
        drafter.generation_config.assistant_confidence_threshold = 0.9
    assert torch.equal(greedy(llama, drafter=drafter, **kwargs), greedy(llama, drafter=uncut))
    assert sum(drafter.report.proposed) < sum(uncut.report.proposed)


# Sampling


@pytest.fixture(scope="module")
def small_vocabulary_target():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


SAMPLING = [
    ({"top_k": 3}, False),
    ({"top_k": 3, "num_denoising_steps": 3}, False),
    pytest.param({"num_denoising_steps": 2}, False, marks=pytest.mark.slow),
    pytest.param({"num_denoising_steps": 3, "assistant_confidence_threshold": 0.35}, False, marks=pytest.mark.slow),
    pytest.param({}, False, marks=pytest.mark.slow),
    pytest.param({"temperature": 0.5}, False, marks=pytest.mark.slow),
    pytest.param({"temperature": 2.0}, False, marks=pytest.mark.slow),
    pytest.param({"top_p": 0.7}, False, marks=pytest.mark.slow),
    pytest.param({"min_p": 0.2}, False, marks=pytest.mark.slow),
    pytest.param({"repetition_penalty": 1.6}, False, marks=pytest.mark.slow),
    pytest.param({"assistant_confidence_threshold": 0.35}, False, marks=pytest.mark.slow),
    pytest.param({}, True, marks=pytest.mark.slow),
    pytest.param({"top_k": 3}, True, marks=pytest.mark.slow),
]


@with_and_without_overlap
@pytest.mark.parametrize(("settings", "criteria"), SAMPLING, ids=str)
def test_sampling_has_the_targets_distribution(small_vocabulary_target, make_perturbed, settings, criteria):
    """The joint distribution of the second and third token (those of a draft) against exact enumeration."""
    target = small_vocabulary_target
    drafter = set_drafting(make_perturbed(target, 4, block_size=4, mask_token_id=7), **DRAFTING)
    prompt = torch.tensor([[1, 4]])
    settings = {"do_sample": True, "max_new_tokens": 4, "top_k": 0} | settings
    set_drafting(drafter, num_denoising_steps=settings.pop("num_denoising_steps", 1))
    extra = {"stopping_criteria": StoppingCriteriaList([Stops(lambda ids: ids[-2] == 5)])} if criteria else {}
    torch.manual_seed(0)
    counts, accepted, num_draws = torch.zeros(8, 8), 0, 800
    for _ in range(num_draws):
        output = target.generate(prompt, assistant_model=drafter, **settings, **extra)[0, 2:]
        if len(output) > 2:
            counts[output[1], output[2]] += 1
        accepted += sum(drafter.report.accepted)
    assert 0 < accepted < num_draws * 2
    exact = exact_distribution(target, prompt, settings, stop=5 if criteria else None)
    distance = 0.5 * (counts / num_draws - exact).abs().sum()
    # What a sample of this size from `exact` itself would show, and a margin.
    expected = 0.5 * (2 * exact * (1 - exact) / (torch.pi * num_draws)).sqrt().sum()
    assert distance < 1.4 * expected + 0.01


@torch.no_grad()
def exact_distribution(target, prompt, settings, stop):
    config = target._prepare_generation_config(GenerationConfig(**settings))[0]
    processors = target._get_logits_processor(config, prompt.shape[1])

    def next_token(*tokens):
        ids = torch.cat([prompt, torch.tensor([tokens], dtype=torch.long)], dim=1)
        return processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]

    exact = torch.zeros(8, 8)
    for first, p_first in enumerate(next_token()):
        for second, p_second in enumerate(next_token(first)):
            # The criterion stops behind the token after a 5, so that the third token is never drawn.
            if p_first * p_second > 0 and first != stop:
                exact[second] += p_first * p_second * next_token(first, second)
    return exact


@with_and_without_overlap
@each_drafter(None, "random")
def test_a_seed_reproduces_the_sample(llama, kind):
    def sample(seed):
        drafter = make_drafter(llama, kind)
        torch.manual_seed(seed)
        return llama.generate(PROMPT, do_sample=True, max_new_tokens=15, assistant_model=drafter).tolist()

    assert sample(0) == sample(0)
    assert len({str(sample(seed)) for seed in range(5)}) > 1


def test_unseeded_samples_differ(llama):
    drafter = make_drafter(llama)
    settings = {"do_sample": True, "max_new_tokens": 10, "assistant_model": drafter}
    assert len({str(llama.generate(PROMPT, **settings)) for _ in range(5)}) > 1


# Successors


SETTINGS = [
    {"overlap": "inline"},
    {"overlap": "inline", "num_successors": 3},
    {"overlap": "inline", "num_successors": 400},
    {"overlap": "inline", "num_successors": 6, "outcome_selection": "fan_out"},
    {"overlap": "thread", "num_successors": 0},
    {"overlap": "thread", "num_successors": 8},
]


class Delays:
    """Sleeps at random around the drafter's and the target's passes, from whatever thread."""

    def __init__(self, *modules):
        self.random = random.Random(0)
        self.handles = [module.register_forward_pre_hook(self.sleep) for module in modules]
        self.handles += [module.register_forward_hook(self.sleep) for module in modules]

    def sleep(self, *args):
        time.sleep(self.random.choice([0, 0, 0.01, 0.03]))

    def remove(self):
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_overlap_and_timing_change_nothing(targets, make_perturbed, name, do_sample, num_steps):
    """Tokens, drafts and their fate depend on no back end, no number of successors and no delay."""
    target, results = targets[name], []
    drafter = set_drafting(make_perturbed(target, 4, block_size=BLOCK), num_denoising_steps=num_steps)
    for settings in SETTINGS:
        for delayed in (None, "drafter", "target") if settings["overlap"] == "thread" else (None,):
            set_drafting(drafter, **{"num_successors": None, "outcome_selection": "likeliest"} | settings)
            delays = Delays(*{None: [], "drafter": [drafter], "target": [target]}[delayed])
            torch.manual_seed(11)
            output = target.generate(PROMPT, do_sample=do_sample, max_new_tokens=40, assistant_model=drafter)
            delays.remove()
            results.append((output.tolist(), drafter.report.proposed, drafter.report.accepted))
            if settings.get("num_successors") == 400 and not do_sample:
                assert drafter.report.hit_rate == 1.0  # all outcomes that there are
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("rank", [0, 4], ids=["plain", "adapters"])
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
@pytest.mark.parametrize(("num_drafts", "num_successors"), [(4, 9), (4, 1), (1, 6), (0, 5)])
@torch.no_grad()
def test_successors_equal_blocks_drafted_alone(
    targets, make_perturbed, name, rank, block_attention, num_drafts, num_successors
):
    """Hidden states, and what a committed successor leaves in the cache, whatever else was packed."""
    drafter = make_perturbed(targets[name], rank, block_size=BLOCK, block_attention=block_attention)
    set_drafting(drafter, overlap="inline", num_successors=num_successors)
    prompt = torch.randint(2, 60, (1, 9), generator=torch.Generator().manual_seed(2))

    def new():
        generator = drafter.get_candidate_generator(
            generation_config=GenerationConfig(max_length=60), input_ids=prompt
        )
        generator.context = prompt[0]
        return generator

    draft = torch.randint(2, 60, (num_drafts,), generator=torch.Generator().manual_seed(3))
    logits = torch.randn(num_drafts + 1, 64, generator=torch.Generator().manual_seed(4)) * 3

    def pack():
        generator = new()
        generator._block()
        return generator, generator._draft_successors(draft, logits, num_drafts, None)

    packed, successors = pack()
    assert packed.cache.length == 9 + num_drafts + num_successors * BLOCK
    assert successors.hidden_states.shape == (num_successors, BLOCK, 32)
    for index, (kept, bonus) in enumerate(successors.outcomes.tolist()):
        settled = torch.cat([draft[:kept], torch.tensor([bonus])])
        alone = new()
        alone.context = torch.cat([prompt[0], settled])
        torch.testing.assert_close(successors.hidden_states[index], alone._block(), rtol=1e-5, atol=1e-5)

        generator, again = pack()
        generator.context, generator.round = alone.context, 5
        generator.pending = ("packed", 4, lambda again=again: Done(again, 0.0, 0.0))
        generator._settle(kept + 1)
        assert generator.report.outcomes == [(kept, True)]
        assert generator.cache.length == alone.cache.length == 10 + kept
        for layer, other in zip(generator.cache.layers, alone.cache.layers, strict=True):
            length = alone.cache.length
            torch.testing.assert_close(layer.keys[:, :, :length], other.keys[:, :, :length], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.values[:, :, :length], other.values[:, :, :length], rtol=1e-5, atol=1e-5)


def passes(drafter):
    """Names of the drafter's passes in the last call, in order."""
    return [event.name for event in drafter.report.events if event.lane == "drafter" and event.name != "head"]


def test_a_hit_takes_no_pass_and_a_miss_one(llama, truth):
    """The oracle's outcomes are certain, at full acceptance by the row behind the draft; wrong drafts surprise."""
    drafter = set_drafting(make_drafter(llama, "oracle", truth), overlap="thread", num_successors=1)
    greedy(llama, drafter=drafter, max_new_tokens=30)
    report = drafter.report
    assert report.hits == len(report.outcomes) == 5 and report.misses == 0
    # The last is for a verification that keeps fewer tokens than it does.
    assert passes(drafter) == ["prefill", "block"] + ["packed"] * 6
    # Sure of a draft that is wrong at its second token: the successor of full acceptance never comes true.
    drafter = set_drafting(make_drafter(llama, 1, truth), overlap="thread", num_successors=1)
    greedy(llama, drafter=drafter, max_new_tokens=12)
    report = drafter.report
    assert report.hits == 0 and report.misses == len(report.outcomes) == 4
    assert passes(drafter) == ["prefill", "block"] + ["packed", "block"] * 4 + ["packed"]


# Denoising steps


# Draft tokens that are settled when each token of a draft is predicted.
SETTLED = {1: [0, 0, 0, 0], 2: [0, 0, 2, 2], 3: [0, 1, 2, 2], 4: [0, 1, 2, 3]}


@with_and_without_overlap
@each_drafter()
@pytest.mark.parametrize("num_steps", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_output_with_denoising_steps(targets, name, kind, num_steps):
    target = targets[name]
    drafter = set_drafting(make_drafter(target, kind), num_denoising_steps=num_steps)
    one_step = make_drafter(target, kind)
    for settings in ({}, {"num_assistant_tokens": 3}, {"assistant_confidence_threshold": 0.1}):
        plain = greedy(target, max_new_tokens=23)
        assert torch.equal(greedy(target, drafter=drafter, max_new_tokens=23, **settings), plain)
        if kind not in (None, "random"):  # a script doesn't depend on the steps
            greedy(target, drafter=one_step, max_new_tokens=23, **settings)
            assert drafter.report.accepted == one_step.report.accepted
            assert drafter.report.proposed == one_step.report.proposed


class Proposals:
    """Records what a candidate generator proposes: the tokens before, the draft and its logits."""

    def __init__(self, monkeypatch):
        self.seen, original = [], D3DCandidateGenerator.get_candidates

        def spy(generator, input_ids, **kwargs):
            candidates, logits = original(generator, input_ids, **kwargs)
            if logits is not None:
                self.seen.append((input_ids[0], candidates[0, input_ids.shape[1] :], logits[0]))
            return candidates, logits

        monkeypatch.setattr(D3DCandidateGenerator, "get_candidates", spy)


@torch.no_grad()
def naive_logits(drafter, ids, draft, num_steps):
    """The logits of each draft token by a pass of its own, without a cache, that holds the tokens settled by then."""
    rows = trunk_rows(torch.arange(len(ids))) + mask_rows(torch.tensor([len(ids) - 1]), BLOCK)
    logits = []
    for offset, num_settled in enumerate(SETTLED[num_steps][: len(draft)]):
        masks = torch.full((NUM_DRAFTS - num_settled,), drafter.config.mask_token_id)
        block = torch.cat([ids, draft[:num_settled], masks]).unsqueeze(0)
        hidden = drafter(block, rows, mask_offsets=torch.arange(NUM_DRAFTS)).last_hidden_state[0]
        logits.append(drafter.logits(hidden[len(ids) - 1 + offset]))
    return torch.stack(logits)


@pytest.mark.parametrize("num_successors", [0, 400], ids=["misses", "hits"])
@pytest.mark.parametrize("num_steps", SETTLED)
@pytest.mark.parametrize("rank", [0, 4], ids=["plain", "adapters"])
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_each_step_equals_its_naive_twin(
    targets, make_perturbed, monkeypatch, name, rank, block_attention, num_steps, num_successors
):
    drafter = make_perturbed(targets[name], rank, block_size=BLOCK, block_attention=block_attention)
    set_drafting(drafter, overlap="thread", num_denoising_steps=num_steps, num_successors=num_successors)
    proposals = Proposals(monkeypatch)
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 0, "temperature": 0.3, "max_new_tokens": 16}
    targets[name].generate(PROMPT, assistant_model=drafter, **settings)
    assert drafter.report.misses == 0 and (drafter.report.hits > 0) == (num_successors > 0)
    assert NUM_DRAFTS in {len(draft) for _, draft, _ in proposals.seen}
    for ids, draft, logits in proposals.seen:
        expected = naive_logits(drafter, ids, draft, num_steps) / 0.3
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_later_steps_run_for_the_block_that_came_true_only(llama, truth):
    def names(**settings):
        greedy(llama, drafter=drafter, **settings)
        return passes(drafter)

    drafter = make_drafter(llama, "oracle", truth)
    set_drafting(drafter, overlap="thread", num_successors=1, num_denoising_steps=2)
    # Two hits with both steps each; then one token is drafted, which the first step settles, and the last is the target's.
    assert names(max_new_tokens=19) == ["prefill", "block"] + ["denoise", "packed"] * 3 + ["packed"]
    assert drafter.report.misses == 0
    assert "D" in drafter.report.timeline() and drafter.report.drafting_s > 0
    # Nothing is predicted behind a draft that ends: by its length, an end of sequence, a stop, or a doubt.
    assert names(max_new_tokens=4) == ["prefill", "block", "packed"]
    assert names(max_new_tokens=9, num_assistant_tokens=2)[:3] == ["prefill", "block", "packed"]
    for offset, expected in ((1, 0), (2, 0), (3, 1)):
        eos = int(truth[PROMPT.shape[1] + offset])
        assert names(max_new_tokens=20, eos_token_id=eos, pad_token_id=0).count("denoise") == expected
        stop = StoppingCriteriaList([Stops(lambda ids, eos=eos: ids[-1] == eos)])
        assert names(max_new_tokens=20, stopping_criteria=stop).count("denoise") == expected
    assert "denoise" not in names(assistant_confidence_threshold=1.1)


@pytest.mark.parametrize("number", [0, NUM_DRAFTS + 1])
def test_an_impossible_number_of_steps_is_refused(llama, number):
    drafter = set_drafting(make_drafter(llama), num_denoising_steps=number)
    with pytest.raises(ValueError, match=f"`num_denoising_steps` is {number}; it must be between 1 and .* here 4"):
        greedy(llama, drafter=drafter)


def test_no_pass_is_started_that_nobody_can_use(llama, truth):
    for max_new_tokens, expected in [
        (1, []),
        (2, []),  # the second token is the target's own
        (3, ["prefill", "block"]),  # one draft token, and behind it there is no room for a draft
        (BLOCK + 1, ["prefill", "block"] + ["packed"]),  # the whole draft may be kept, or less: then more follow
    ]:
        drafter = set_drafting(make_drafter(llama, "oracle", truth), overlap="thread", num_successors=2)
        greedy(llama, drafter=drafter, max_new_tokens=max_new_tokens)
        assert passes(drafter) == expected
    # Behind an end of sequence that is the first draft token, only its rejection needs a successor.
    drafter = set_drafting(make_drafter(llama, "oracle", truth), overlap="thread", num_successors=40)
    eos, seen = int(truth[PROMPT.shape[1] + 1]), []
    original = D3DCandidateGenerator._draft_successors

    def spy(self, *args):
        seen.append(original(self, *args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(D3DCandidateGenerator, "_draft_successors", spy)
        greedy(llama, drafter=drafter, max_new_tokens=30, eos_token_id=eos, pad_token_id=0)
    (successors,) = seen
    assert set(successors.outcomes[:, 0].tolist()) == {0}
    assert eos not in successors.outcomes[:, 1].tolist()


def test_num_assistant_tokens_of_zero_starts_nothing(llama):
    drafter = set_drafting(make_drafter(llama), overlap="thread")
    greedy(llama, drafter=drafter, num_assistant_tokens=0)
    assert passes(drafter) == []


@pytest.mark.parametrize(("overlap", "number"), [("inline", 0), ("thread", 16)])
def test_the_number_of_successors_follows_the_back_end(llama, monkeypatch, overlap, number):
    made, original = [], D3DCandidateGenerator.__init__
    monkeypatch.setattr(D3DCandidateGenerator, "__init__", lambda self, *a: (original(self, *a), made.append(self))[0])
    drafter = set_drafting(make_drafter(llama), overlap=overlap)
    greedy(llama, drafter=drafter)
    assert made[0].num_successors == number
    assert drafter.report.mode == overlap and overlap in drafter.report.reason


def test_auto_takes_turns_on_one_cpu_and_says_why(llama):
    drafter = make_drafter(llama)
    greedy(llama, drafter=drafter)
    assert drafter.report.mode == "inline" and "share the cpu" in drafter.report.reason
    assert "share the cpu" in str(drafter.report) and not drafter.report.outcomes


def test_a_stream_without_cuda_is_refused(llama):
    drafter = set_drafting(make_drafter(llama), overlap="stream")
    with pytest.raises(ValueError, match="'stream'.*cpu.*Use 'auto'"):
        greedy(llama, drafter=drafter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a side stream needs a CUDA device")
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_side_stream_changes_nothing(llama, make_perturbed, do_sample):
    target, results = copy.deepcopy(llama).cuda(), []
    drafter = make_perturbed(target, 4, block_size=BLOCK).cuda()
    for overlap in ("inline", "stream", "thread", "auto"):
        set_drafting(drafter, overlap=overlap, num_successors=8)
        torch.manual_seed(11)
        settings = {"do_sample": do_sample, "max_new_tokens": 200, "assistant_model": drafter}
        results.append((target.generate(PROMPT.cuda(), **settings).tolist(), drafter.report.accepted))
    assert drafter.report.mode == "stream"
    assert all(result == results[0] for result in results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_drafter_on_another_device_overlaps_in_a_thread(llama, truth):
    drafter = make_drafter(llama, "oracle", truth)
    assert torch.equal(greedy(copy.deepcopy(llama).cuda(), PROMPT.cuda(), drafter=drafter)[0].cpu(), truth[:26])
    assert drafter.report.mode == "thread" and drafter.report.hit_rate == 1.0


# The drafter's own state


class Raises(StoppingCriteria):
    def __init__(self, error):
        self.error = error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 10:
            raise self.error()
        return torch.zeros(1, dtype=torch.bool)


@with_and_without_overlap
def test_one_drafter_for_many_calls(llama, truth):
    drafter, fresh = make_drafter(llama), {}
    for length in (30, 5, 40, 1, 12):
        one = make_drafter(llama)
        greedy(llama, drafter=one, max_new_tokens=length)
        fresh[length] = one.report.accepted
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            greedy(llama, drafter=drafter, stopping_criteria=StoppingCriteriaList([Raises(error)]))
    llama.generate(PROMPT, do_sample=True, max_new_tokens=9, assistant_model=drafter)
    for length, accepted in list(fresh.items()) * 2:
        assert torch.equal(greedy(llama, drafter=drafter, max_new_tokens=length)[0], truth[: 6 + length])
        assert drafter.report.accepted == accepted


@pytest.mark.parametrize(("overlap", "number"), [("inline", 8), ("thread", 40)])
def test_threads_share_a_drafter(llama, make_perturbed, overlap, number):
    drafter = set_drafting(make_perturbed(llama, 4, block_size=BLOCK), overlap=overlap)
    prompts = [torch.randint(2, 60, (1, 3 + i % 9), generator=torch.Generator().manual_seed(i)) for i in range(number)]
    expected = [greedy(llama, ids) for ids in prompts]
    results = [None] * number

    def run(i):
        results[i] = greedy(llama, prompts[i], drafter=drafter)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, plain) for result, plain in zip(results, expected, strict=True))
    assert drafting_threads() == []


def drafting_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("d3d-drafter")]


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_exception_in_the_background_surfaces(llama, truth, tokenizer, fails_at):
    """With its own traceback, at once, at the streamer's reader too; and the next call works."""
    drafter = set_drafting(make_drafter(llama), overlap="thread", num_successors=3)
    calls, main = [], threading.get_ident()

    def fail_in_the_background(module, args):
        assert threading.get_ident() != main
        calls.append(1)
        if len(calls) > fails_at:
            raise ZeroDivisionError("in the background")

    handle = drafter.register_forward_pre_hook(fail_in_the_background)
    streamer = TextIteratorStreamer(tokenizer, timeout=3)
    caught = []

    def run():
        try:
            greedy(llama, drafter=drafter, streamer=streamer)
        except ZeroDivisionError as error:
            caught.append("".join(traceback.format_tb(error.__traceback__)))

    thread = threading.Thread(target=run)
    thread.start()
    list(streamer)
    thread.join()
    assert len(caught) == 1 and "fail_in_the_background" in caught[0]
    assert drafting_threads() == []
    handle.remove()
    assert torch.equal(greedy(llama, drafter=drafter)[0], truth[:26])


def test_a_failing_pass_that_nobody_needs_costs_no_output(llama, truth, monkeypatch):
    messages = []
    monkeypatch.setattr(generation_d3d.logger, "warning", messages.append)
    drafter = set_drafting(make_drafter(llama, "oracle", truth), overlap="thread", num_successors=3)
    # The draft ends in an end of sequence that the target keeps, so the pass beside the last verification is for nothing.
    eos = int(truth[PROMPT.shape[1] + 3])
    original = D3DCandidateGenerator._draft_successors
    monkeypatch.setattr(D3DCandidateGenerator, "_draft_successors", lambda *a: (original(*a), 1 / 0)[0])
    plain = greedy(llama, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(greedy(llama, drafter=drafter, eos_token_id=eos, pad_token_id=0), plain)
    assert len(messages) == 1 and "ZeroDivisionError" in messages[0]


class Breaks:
    """A streamer that raises at its third call, or does something else first."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def put(self, value):
        self.calls += 1
        if self.calls > 3:
            raise self.error

    def end(self):
        pass


@with_and_without_overlap
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("where", ["streamer", "criterion"])
def test_interrupts_leave_both_models_usable(llama, truth, where, error):
    drafter = make_drafter(llama)
    for _ in range(2):
        kwargs = {"streamer": Breaks(error)}
        if where == "criterion":
            kwargs = {"stopping_criteria": StoppingCriteriaList([Raises(error)])}
        with pytest.raises(error):
            greedy(llama, drafter=drafter, **kwargs)
        assert drafting_threads() == []
        assert torch.equal(greedy(llama, drafter=drafter)[0], truth[:26])
        assert torch.equal(greedy(llama)[0], truth[:26])


def test_ctrl_c_while_waiting_for_the_drafter(llama, truth):
    drafter = set_drafting(make_drafter(llama), overlap="thread", num_successors=2)
    calls = []

    def interrupt(module, args):
        calls.append(1)
        if len(calls) == 3:
            # To the main thread, which waits for this pass by now.
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            time.sleep(0.5)

    handle = drafter.register_forward_pre_hook(interrupt)
    # A shell starts jobs in the background with Ctrl-C ignored, and Python leaves it at that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            greedy(llama, drafter=drafter)
    finally:
        signal.signal(signal.SIGINT, before)
    handle.remove()
    assert drafting_threads() == []
    assert torch.equal(greedy(llama, drafter=drafter)[0], truth[:26])


SCRIPT = """
import sys, threading, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_d3d import D3DDrafterModel

sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
target = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()
drafter = D3DDrafterModel.from_causal_lm(target, mask_token_id=60, block_size=4)
drafter.config.overlap = "thread"

class Streamer:
    calls = 0
    def put(self, value):
        self.calls += 1
        if self.calls == 3:
            started.set()
            if {where!r} == "main":
                sys.exit(7)
    def end(self):
        pass

def run():
    print(target.generate(torch.tensor([[3, 4]]), max_new_tokens=300, assistant_model=drafter, streamer=Streamer()).shape[1])

started = threading.Event()
if {where!r} == "main":
    run()
threading.Thread(target=run, daemon={where!r} == "daemon").start()
started.wait()
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main", "thread", "daemon"])
def test_the_interpreter_exits_in_the_middle_of_a_generation(where):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{where!r}", repr(where))], timeout=120, capture_output=True
    )
    # Python waits for a thread, so its generation ends; it abandons a daemon's, where PyTorch may then abort the process
    # as it does when it meets plain `generate` there.
    assert run.returncode in ((7, -signal.SIGABRT) if where == "daemon" else (7,)), run.stderr
    assert run.stdout.decode().split() == (["302"] if where == "thread" else [])
    assert b"Error" not in run.stderr, run.stderr


@with_and_without_overlap
def test_inference_mode_and_autocast(llama, truth):
    drafter = make_drafter(llama)
    with torch.inference_mode():
        assert torch.equal(greedy(llama, drafter=drafter)[0], truth[:26])
    assert torch.equal(greedy(llama, drafter=drafter)[0], truth[:26])
    dtypes = set()
    handle = drafter.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, a, out: dtypes.add(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        greedy(llama, drafter=drafter)
    handle.remove()
    assert dtypes == {torch.bfloat16}


@with_and_without_overlap
@pytest.mark.parametrize("window", [1, 2, 8, 16, None])
@pytest.mark.parametrize("length", [3, 16, 60])
def test_context_window_keeps_drafting(successor, window, length):
    """The newest token is all that this target's continuation depends on, so no window may cost acceptance."""
    drafter = make_drafter(successor, block_size=2)
    drafter.config.context_window = window
    ids = torch.arange(length).unsqueeze(0) % 50 + 2
    assert torch.equal(greedy(successor, ids, drafter=drafter), greedy(successor, ids))
    assert set(drafter.report.accepted[:-1]) == {1}


@with_and_without_overlap
def test_past_the_backbones_positions(successor):
    drafter = make_drafter(successor, block_size=2)
    drafter.config.text_config.max_position_embeddings = 24
    plain = greedy(successor, max_new_tokens=60)
    assert torch.equal(greedy(successor, drafter=drafter, max_new_tokens=60), plain)
    assert set(drafter.report.accepted[:-1]) == {1}


def test_long_prompts_are_read_in_bounded_passes(llama, monkeypatch, each_overlap):
    monkeypatch.setattr(generation_d3d, "PREFILL_ROWS", 4)
    rows, forward = [], D3DDrafterModel.forward
    monkeypatch.setattr(
        D3DDrafterModel,
        "forward",
        lambda self, ids, *a, **k: (rows.append(ids.shape[1]), forward(self, ids, *a, **k))[1],
    )
    ids = torch.randint(2, 60, (1, 30), generator=torch.Generator().manual_seed(0))
    drafter = make_drafter(llama)
    assert torch.equal(greedy(llama, ids, drafter=drafter), greedy(llama, ids))
    assert max(rows) <= (4 + BLOCK if each_overlap == "inline" else NUM_DRAFTS + 5 * BLOCK)


def test_memory_grows_with_the_context_only(llama, monkeypatch):
    """No copy of the cache for a round: the buffers stay the same until they double."""
    drafter = make_drafter(llama)
    buffers, original = [], D3DCandidateGenerator._block_logits

    def spy(self, *args):
        result = original(self, *args)
        buffers.append((self.cache.layers[0].keys.data_ptr(), self.cache.nbytes()))
        return result

    monkeypatch.setattr(D3DCandidateGenerator, "_block_logits", spy)
    greedy(llama, drafter=drafter, max_new_tokens=200)
    assert len(buffers) > 20 and len(set(buffers)) == 1


@with_and_without_overlap
def test_nothing_of_a_call_remains(llama, monkeypatch):
    drafter, references, original = make_drafter(llama), [], D3DCandidateGenerator.__init__

    def spy(self, *args, **kwargs):
        original(self, *args, **kwargs)
        references.extend([weakref.ref(self), weakref.ref(self.cache)])

    def count():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    monkeypatch.setattr(D3DCandidateGenerator, "__init__", spy)
    greedy(llama, drafter=drafter)
    before = count()
    for _ in range(10):
        greedy(llama, drafter=drafter)
    assert count() == before
    assert len(references) == 22 and all(reference() is None for reference in references)


@with_and_without_overlap
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_after_use(llama, truth, twin):
    drafter = D3DDrafterModel.from_causal_lm(llama, mask_token_id=60, block_size=BLOCK)
    set_drafting(drafter, **DRAFTING)
    greedy(llama, drafter=drafter)
    other = twin(drafter)
    assert other.report is None
    assert torch.equal(greedy(llama, drafter=other)[0], truth[:26])
    assert other.report.accepted == drafter.report.accepted


@with_and_without_overlap
def test_no_gradients_are_recorded(llama, monkeypatch):
    modes, forward = [], D3DDrafterModel.forward
    monkeypatch.setattr(
        D3DDrafterModel, "forward", lambda *a, **k: (modes.append(torch.is_grad_enabled()), forward(*a, **k))[1]
    )
    drafter = make_drafter(llama)
    greedy(llama, drafter=drafter)
    drafter.get_candidate_generator(generation_config=GenerationConfig(max_length=20), input_ids=PROMPT)
    assert modes and not any(modes)


# Errors


@with_and_without_overlap
@pytest.mark.parametrize("where", ["proposal", "streamer"])
def test_an_exception_surfaces_and_ends_the_streamers_reader(llama, truth, tokenizer, monkeypatch, where):
    drafter = make_drafter(llama)
    streamer = TextIteratorStreamer(tokenizer, timeout=3)
    if where == "proposal":
        monkeypatch.setattr(Scripted, "_block_logits", lambda self, *args: 1 / 0)
    else:
        put, calls = streamer.put, []
        monkeypatch.setattr(streamer, "put", lambda x: (put(x), calls.append(1), 1 / (0 if len(calls) > 3 else 1)))
    caught = []

    def run():
        try:
            greedy(llama, drafter=drafter, streamer=streamer)
        except ZeroDivisionError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    list(streamer)
    thread.join()
    assert len(caught) == 1
    monkeypatch.undo()
    assert torch.equal(greedy(llama, drafter=drafter)[0], truth[:26])


@pytest.mark.parametrize(
    "tokenizers", [{}, {"tokenizer": SimpleNamespace(), "assistant_tokenizer": SimpleNamespace()}]
)
@pytest.mark.parametrize("size", [40, 70])
def test_a_vocabulary_of_another_size_is_refused(llama, tokenizers, size):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=size, **sizes)
    drafter = D3DDrafterModel.from_causal_lm(LlamaForCausalLM(config), mask_token_id=39, block_size=4)
    with pytest.raises(ValueError, match=f"64 tokens and the drafter's {size}.*drafter trained for this target"):
        greedy(llama, drafter=drafter, **tokenizers)


def test_an_encoder_decoder_target_is_refused(llama):
    config = T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder.*decoder-only"):
        greedy(T5ForConditionalGeneration(config), drafter=make_drafter(llama))


# Families whose state is not, or not only, keys and values. Transformers 5.25 takes such a state back.
RECURRENT = {
    "mamba": (MambaForCausalLM, MambaConfig, {"state_size": 4}),
    "mamba2": (
        Mamba2ForCausalLM,
        Mamba2Config,
        {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8},
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
        },
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "jamba": (
        JambaForCausalLM,
        JambaConfig,
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
}


@each_drafter()
@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_target_is_served_or_refused(llama, family, kind):
    """Each may be refused by a Transformers that cannot take its state back, but never be served another output."""
    model_class, config_class, settings = RECURRENT[family]
    target = tiny(model_class, config_class, **settings)
    truth = greedy(target, max_new_tokens=60)[0]
    try:
        drafted = greedy(target, drafter=make_drafter(llama, kind, truth), max_new_tokens=30)[0]
    except ValueError as error:
        assert model_class.__name__ in str(error) or "cache" in str(error)
    else:
        assert torch.equal(drafted, truth[: len(drafted)])
        assert len(drafted) == len(PROMPT[0]) + 30


def test_a_batch_is_refused(llama):
    with pytest.raises(ValueError, match="2 sequences.*Loop over the prompts"):
        greedy(llama, PROMPT.repeat(2, 1), drafter=make_drafter(llama))
    with pytest.raises(ValueError, match="num_return_sequences"):
        llama.generate(PROMPT, do_sample=True, num_return_sequences=2, assistant_model=make_drafter(llama))


def test_beams_ignore_the_drafter_and_say_so(llama, monkeypatch):
    messages = []
    monkeypatch.setattr(generation_d3d.logger, "warning_once", messages.append)
    assert torch.equal(greedy(llama, drafter=make_drafter(llama), num_beams=2), greedy(llama, num_beams=2))
    assert "ignored" in messages[0] and "num_beams" in messages[0]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "quantized"}, "dynamic"),
        ({"use_cache": False}, "cache"),
    ],
    ids=["guidance", "quantized-cache", "no-cache"],
)
def test_what_would_be_silently_wrong_is_refused(llama, settings, match):
    with pytest.raises((ValueError, RuntimeError), match=match):
        greedy(llama, drafter=make_drafter(llama), **settings)


# The seam


def test_other_assistants_and_plain_generate_are_untouched(llama):
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=64, num_key_value_heads=1, head_dim=8, eos_token_id=None, pad_token_id=0, **sizes)
    assistant = Qwen3ForCausalLM(config).eval()

    def outputs():
        torch.manual_seed(0)
        return [
            greedy(llama),
            greedy(llama, drafter=assistant),
            greedy(llama, prompt_lookup_num_tokens=3),
            greedy(llama, num_beams=2),
            llama.generate(PROMPT, do_sample=True, max_new_tokens=10),
            llama.generate(PROMPT, do_sample=True, max_new_tokens=10, assistant_model=assistant),
        ]

    with_seam = outputs()
    remove_seam()
    try:
        assert not hasattr(GenerationMixin._assisted_decoding, "_d3d_original")
        without = outputs()
    finally:
        install_seam()
    assert all(torch.equal(a, b) for a, b in zip(with_seam, without, strict=True))


def test_the_seam_is_installed_once(llama, truth):
    methods = [GenerationMixin._assisted_decoding, GenerationMixin._get_candidate_generator]
    install_seam()
    assert methods == [GenerationMixin._assisted_decoding, GenerationMixin._get_candidate_generator]
    assert torch.equal(greedy(copy.deepcopy(llama), drafter=make_drafter(llama))[0], truth[:26])


@pytest.mark.parametrize("name", ["_assisted_decoding", "_get_candidate_generator", "_validate_generation_mode"])
@pytest.mark.parametrize("change", ["gone", "other-parameters"])
def test_an_unsupported_transformers_is_named(monkeypatch, name, change):
    remove_seam()
    try:
        with monkeypatch.context() as patch:
            if change == "gone":
                patch.delattr(GenerationMixin, name)
            else:
                patch.setattr(GenerationMixin, name, lambda self, something: None)
            with pytest.raises(ImportError, match=f"not supported.*{name}.*>=5.24,<6"):
                install_seam()
            assert not [n for n in dir(GenerationMixin) if hasattr(getattr(GenerationMixin, n), "_d3d_original")]
    finally:
        install_seam()


@with_and_without_overlap
@pytest.mark.parametrize("what", ["target", "drafter"])
def test_compiled_models(llama, truth, what):
    drafter = make_drafter(llama)
    target = torch.compile(llama, backend="eager") if what == "target" else llama
    assistant = torch.compile(drafter, backend="eager") if what == "drafter" else drafter
    for length in (5, 20):
        output = target.generate(PROMPT, do_sample=False, max_new_tokens=length, assistant_model=assistant)
        assert torch.equal(output[0], truth[: 6 + length])
    assert drafter.report.rounds > 0


@with_and_without_overlap
def test_a_peft_drafter_drafts_with_its_adapter(llama, truth):
    peft = pytest.importorskip("peft")
    drafter = make_drafter(llama)
    wrapped = peft.get_peft_model(drafter, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    assert torch.equal(greedy(llama, drafter=wrapped)[0], truth[:26])
    adapted = drafter.report.accepted
    with wrapped.disable_adapter():
        greedy(llama, drafter=wrapped)
    assert drafter.report.accepted != adapted


def test_the_report_adds_up(llama, truth):
    drafter = make_drafter(llama, 1, truth)
    greedy(llama, drafter=drafter, max_new_tokens=21)
    report = drafter.report
    assert report.rounds == 10 and report.mean_acceptance_length == 2.0
    assert report.histogram == [0, 10]
    assert report.accepted_by_position[:2] == [1.0, 0.0]
    assert report.drafting_s > 0 and report.verifying_s > 0
    assert report.target_prefill_s > 0 and report.drafter_prefill_s > 0
    assert "mean acceptance length 2.00" in str(report)


def test_a_drafter_loaded_as_a_causal_lm_drafts(llama, tmp_path):
    D3DDrafterModel.from_causal_lm(llama, mask_token_id=60, block_size=BLOCK).save_pretrained(tmp_path)
    drafter = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(greedy(llama, drafter=drafter), greedy(llama))
    assert drafter.report.rounds > 0


def test_a_mask_token_that_ends_the_targets_sequences_is_refused(llama):
    target = copy.deepcopy(llama)
    target.generation_config.eos_token_id = [2, 60]
    with pytest.raises(ValueError, match="60, an end-of-sequence id"):
        make_drafter(target)
