"""Training: the objective's path through the model, what it changes, resuming, and `train` from end to end."""

import copy
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import flex_attention as flex
from transformers import AutoConfig, AutoModel, GenerationConfig, LlamaConfig, LlamaForCausalLM

from transformers_d3d import D3DDrafterModel
from transformers_d3d.acceptance import simulate_acceptance
from transformers_d3d.data import BlockCollator
from transformers_d3d.lora import add_lora, merge_lora
from transformers_d3d.modeling_d3d import ADAPTER_FILE
from transformers_d3d.objective import IGNORE
from transformers_d3d.trainer import (
    D3DTrainer,
    DrafterArguments,
    _packed_attention,
    make_trainer,
    train,
    training_loss,
)
from transformers_d3d.training_args import D3DTrainingArguments

BLOCK = 4

with_and_without_adapters = pytest.mark.parametrize("rank", [0, 2], ids=["full", "adapters"])
both_attentions = pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])


def arguments(folder, **settings):
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1000}
    return D3DTrainingArguments(str(folder), **quiet | settings)


def random_examples(count=6, prompt=4, response=10):
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, 60, (count, prompt + response), generator=generator).tolist()
    return [{"prompt_ids": ids[:prompt], "response_ids": ids[prompt:]} for ids in tokens]


def counting_examples(count=16, length=20):
    return [
        {"prompt_ids": [i, i + 1], "response_ids": list(range(i + 2, i + 2 + length))} for i in range(3, 3 + count)
    ]


def fresh(target, rank, **settings):
    torch.manual_seed(0)
    settings = {"mask_token_id": 63, "block_size": BLOCK} | settings
    return D3DDrafterModel.from_causal_lm(target, mask_adapter_rank=rank, **settings)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model, before):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


# One batch


class Spy:
    """Records what the head returns, in the order of the calls."""

    def __init__(self, drafter):
        self.head, self.seen = drafter.logits, []
        drafter.logits = self

    def __call__(self, hidden_states):
        self.seen.append(self.head(hidden_states))
        return self.seen[-1]


@torch.no_grad()
def drafted_logits(drafter, ids, anchor):
    """Logits of the block at the anchor on the drafting path: by the candidate generator, after the same tokens."""
    sampling = GenerationConfig(max_length=1000, do_sample=True)
    generator = drafter.get_candidate_generator(generation_config=sampling, input_ids=ids[None, :anchor])
    generator.get_candidates(ids[None, :anchor])
    candidates, logits = generator.get_candidates(ids[None, : anchor + 1])
    generator.close()
    assert candidates.shape[1] == anchor + drafter.config.block_size
    return logits[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@with_and_without_adapters
@both_attentions
def test_training_and_drafting_see_the_same(targets, make_perturbed, tmp_path, name, rank, block_attention):
    drafter = make_perturbed(targets[name], rank, block_attention=block_attention)
    rate = 0.7 if block_attention == "causal" else 1.0
    torch.manual_seed(2)
    examples = random_examples(3)
    batch = BlockCollator(BLOCK, 6, rate)(examples)
    spy = Spy(drafter)
    with torch.no_grad():
        training_loss(drafter, drafter, batch, arguments(tmp_path))
    trained, kept = spy.seen[0], batch["block_labels"] != IGNORE
    drafter.logits = spy.head
    row = 0
    for block, (anchor, sequence) in enumerate(zip(batch["anchors"], batch["anchor_sequences"], strict=True)):
        ids = torch.tensor([*examples[sequence]["prompt_ids"], *examples[sequence]["response_ids"]])
        drafted = drafted_logits(drafter, ids, int(anchor))
        count = int(kept[block].sum())
        # The last mask row is the look-ahead, which drafts nothing.
        compared = min(count, BLOCK - 2)
        torch.testing.assert_close(trained[row : row + compared], drafted[1 : 1 + compared], atol=1e-5, rtol=1e-5)
        row += count
    assert row == len(trained) == int(kept.sum())
    if rank == 0:
        clean = iter(spy.seen[1])
        for example in examples:
            ids = torch.tensor([*example["prompt_ids"], *example["response_ids"]])
            for anchor in range(len(example["prompt_ids"]) - 1, len(ids) - 1):
                torch.testing.assert_close(next(clean), drafted_logits(drafter, ids, anchor)[0], atol=1e-5, rtol=1e-5)
        assert next(clean, None) is None


def block_logits(drafter, batch, args):
    """Logits of the labelled mask rows of a batch, in training."""
    spy = Spy(drafter)
    with torch.no_grad():
        training_loss(drafter, drafter, batch, args)
    drafter.logits = spy.head
    return spy.seen[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@with_and_without_adapters
@both_attentions
def test_revealed_blocks_see_what_later_denoising_steps_do(
    targets, make_perturbed, tmp_path, name, rank, block_attention
):
    drafter = make_perturbed(targets[name], rank, block_size=6, block_attention=block_attention)
    torch.manual_seed(2)
    examples = random_examples(3)
    batch = BlockCollator(6, 6, 0.8 if block_attention == "causal" else 1.0, reveal_rate=0.8)(examples)
    trained = iter(block_logits(drafter, batch, arguments(tmp_path)))
    counts = set()
    names = ("anchors", "anchor_sequences", "revealed", "block_labels")
    for anchor, sequence, revealed, labels in zip(*(batch[name] for name in names), strict=True):
        ids = torch.tensor([*examples[sequence]["prompt_ids"], *examples[sequence]["response_ids"]])
        sampling = GenerationConfig(max_length=1000, do_sample=True)
        generator = drafter.get_candidate_generator(generation_config=sampling, input_ids=ids[None, :anchor])
        generator.get_candidates(ids[None, :anchor])
        generator.get_candidates(ids[None, : anchor + 1])
        revealed = revealed[revealed != IGNORE]
        with torch.no_grad():
            drafted = drafter.logits(generator._revise(revealed))
        for row in (labels != IGNORE).nonzero()[:, 0].tolist():
            torch.testing.assert_close(next(trained), drafted[row], atol=1e-5, rtol=1e-5)
        counts.add(len(revealed))
    assert next(trained, None) is None
    assert counts >= {0, 1, 2}


@with_and_without_adapters
@both_attentions
def test_no_supervised_row_of_a_revealed_block_sees_its_answer(
    targets, make_perturbed, tmp_path, rank, block_attention
):
    drafter, args = make_perturbed(targets["llama"], rank, block_attention=block_attention), arguments(tmp_path)
    for seed in range(8):
        torch.manual_seed(seed)
        batch = BlockCollator(BLOCK, 1, reveal_rate=0.9)(random_examples(1))
        logits = block_logits(drafter, batch, args)
        shown = (batch["revealed"][0] != IGNORE).nonzero()[:, 0]
        last_seen = int(batch["anchors"][0]) + len(shown)
        ids = batch["input_ids"].clone()
        ids[0, last_seen + 1 :] = (ids[0, last_seen + 1 :] + 1) % 60
        # The anchor's own row predicts the token behind it, so mask rows begin with the next.
        first = max(last_seen, int(batch["anchors"][0]) + 1) + 1
        answers = batch["block_labels"][0][batch["block_labels"][0] != IGNORE]
        assert torch.equal(answers, batch["input_ids"][0, first : first + len(answers)])
        assert torch.equal(block_logits(drafter, batch | {"input_ids": ids}, args), logits)
        if len(shown):  # and it does see the rest
            other = batch["revealed"].clone()
            other[0, 0] = (other[0, 0] + 1) % 60
            assert not torch.equal(block_logits(drafter, batch | {"revealed": other}, args)[0], logits[0])


@with_and_without_adapters
def test_packing_several_sequences_changes_no_prediction(targets, make_perturbed, tmp_path, rank):
    drafter, examples = make_perturbed(targets["gemma3"], rank), random_examples(3)
    args = arguments(tmp_path, loss_weighting="uniform", autoregressive_weight=0.0)
    collator = BlockCollator(BLOCK, 100)
    with torch.no_grad():
        alone = [training_loss(drafter, drafter, collator([example]), args).item() for example in examples]
        packed = training_loss(drafter, drafter, collator(examples), args).item()
    assert packed == pytest.approx(sum(alone) / 3, rel=1e-5)


def test_the_autoregressive_loss_is_added_for_full_training_only(targets, make_perturbed, tmp_path):
    batch = BlockCollator(BLOCK, 4)(random_examples(2))
    for rank in (0, 2):
        drafter = make_perturbed(targets["llama"], rank)
        losses = [
            training_loss(drafter, drafter, batch, arguments(tmp_path, autoregressive_weight=weight)).item()
            for weight in (0.0, 1.0, 2.0)
        ]
        spread = torch.tensor(losses).diff()
        assert spread[0].item() == pytest.approx(spread[1].item(), rel=1e-4)
        assert (spread[0] > 0) == (rank == 0)


@with_and_without_adapters
def test_gradients_reach_what_is_trained(targets, make_perturbed, tmp_path, rank):
    drafter = make_perturbed(copy.deepcopy(targets["llama"]), rank)
    D3DTrainer(drafter, arguments(tmp_path), train_dataset=random_examples())
    training_loss(drafter, drafter, BlockCollator(BLOCK, 4)(random_examples()), arguments(tmp_path)).backward()
    with_gradient = {n for n, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}
    expected = set(drafter.adapter_state_dict()) if rank else {n for n, _ in drafter.named_parameters()}
    assert with_gradient == expected


def nothing_supervised(kind):
    collator = BlockCollator(BLOCK, 4, reveal_rate=0.9 if kind == "revealed" else 0.0)
    batch = collator(random_examples(2, response=1 if kind == "no-anchor-fits" else 10))
    batch["labels"].fill_(IGNORE)
    batch["block_labels"].fill_(IGNORE)
    return batch


@with_and_without_adapters
@pytest.mark.parametrize("kind", ["all-ignored", "revealed", "no-anchor-fits"])
def test_nothing_to_supervise_gives_zero_and_zero_gradients(targets, make_perturbed, tmp_path, rank, kind):
    drafter = make_perturbed(targets["llama"], rank)
    loss = training_loss(drafter, drafter, nothing_supervised(kind), arguments(tmp_path))
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in drafter.parameters() if p.grad is not None)


@with_and_without_adapters
@pytest.mark.parametrize("kind", ["all-ignored", "revealed", "no-anchor-fits"])
def test_steps_with_nothing_to_supervise_change_no_weight(targets, tmp_path, rank, kind):
    drafter = fresh(targets["llama"], rank)
    before = weights(drafter)
    batch = nothing_supervised(kind)
    trainer = D3DTrainer(
        drafter,
        arguments(tmp_path, max_steps=2, learning_rate=0.1, logging_steps=1),
        train_dataset=random_examples(4),
        data_collator=lambda examples: batch,
    )
    trainer.train()
    assert not changed(drafter, before)
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


# Runs


@pytest.mark.parametrize(
    ("rank", "block_attention", "weighting"),
    [
        pytest.param(0, "causal", "exponential", id="full"),
        pytest.param(2, "causal", "dpace", id="adapters"),
        pytest.param(0, "bidirectional", "dpace", id="full-bidirectional"),
        pytest.param(2, "bidirectional", "uniform", id="adapters-bidirectional"),
    ],
)
def test_a_few_steps_lower_the_loss(targets, tmp_path, rank, block_attention, weighting):
    target = copy.deepcopy(targets["llama"])
    target_before = weights(target)
    drafter = fresh(target, rank, block_attention=block_attention)
    before = weights(drafter)
    args = arguments(
        tmp_path, max_steps=12, learning_rate=1e-2, loss_weighting=weighting, per_device_train_batch_size=6
    )
    whole = BlockCollator(BLOCK, 100)(random_examples())
    uniform = arguments(tmp_path, loss_weighting="uniform")

    def loss():
        with torch.no_grad():
            return training_loss(drafter, drafter, whole, uniform).item()

    first = loss()
    D3DTrainer(drafter, args, train_dataset=random_examples()).train()
    assert loss() < 0.9 * first
    assert changed(drafter, before) == (set(drafter.adapter_state_dict()) if rank else set(before))
    assert not changed(target, target_before)
    assert all(parameter.requires_grad for parameter in target.parameters())


@with_and_without_adapters
@pytest.mark.parametrize("reveal_rate", [0.0, 0.9])
def test_the_trainer_reveals_blocks_when_told_to(targets, tmp_path, rank, reveal_rate):
    args = arguments(tmp_path, max_steps=2, reveal_rate=reveal_rate)
    trainer = D3DTrainer(fresh(targets["llama"], rank), args, train_dataset=random_examples())
    drawn, draw = [], trainer.collator.draw
    trainer.collator.draw = lambda batch: drawn.append(draw(batch)) or drawn[-1]
    trainer.train()
    assert len(drawn) == 2
    assert all((blocks["revealed"] != IGNORE).any() == (reveal_rate > 0) for blocks in drawn)


@torch.no_grad()
def with_teacher(target, examples, num_top=64):
    """Examples with what the target predicts at each token of the responses."""
    stored = []
    for example in examples:
        prompt, response = example["prompt_ids"], example["response_ids"]
        logits = target(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        top = torch.log_softmax(logits, -1).topk(num_top)
        stored.append(example | {"top_ids": top.indices.tolist(), "top_log_probs": top.values.tolist()})
    return stored


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_divergence_from_clean_rows_is_that_from_stored_predictions(targets, make_perturbed, tmp_path, name):
    target, examples = targets[name], random_examples(3)
    drafter = make_perturbed(target, 2)
    args = arguments(tmp_path, divergence_weight=1.0, num_top_logits=64)
    losses = []
    for data in (examples, with_teacher(target, examples)):
        torch.manual_seed(5)
        losses.append(training_loss(drafter, drafter, BlockCollator(BLOCK, 4)(data), args).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    plain = training_loss(drafter, drafter, BlockCollator(BLOCK, 4)(examples), arguments(tmp_path)).item()
    assert abs(losses[0] - plain) > 1e-3


def test_full_training_takes_the_divergence_from_stored_predictions_only(targets, tmp_path):
    drafter, examples = fresh(targets["llama"], 0), random_examples(3)
    args = arguments(tmp_path, divergence_weight=0.5)
    loss = training_loss(drafter, drafter, BlockCollator(BLOCK, 4)(with_teacher(targets["llama"], examples)), args)
    assert math.isfinite(loss.item())
    with pytest.raises(ValueError, match="`divergence_weight` is above 0, but the data hold no `top_ids`"):
        training_loss(drafter, drafter, BlockCollator(BLOCK, 4)(examples), args)


@with_and_without_adapters
def test_the_optimizer_holds_what_is_trained(targets, tmp_path, rank):
    drafter = fresh(targets["llama"], rank)
    trainer = D3DTrainer(drafter, arguments(tmp_path), train_dataset=random_examples())
    trainer.create_optimizer()
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    trained = {n for n, p in drafter.named_parameters() if id(p) in held}
    assert trained == (set(drafter.adapter_state_dict()) if rank else {n for n, _ in drafter.named_parameters()})


@pytest.mark.parametrize(("rank", "learning_rate"), [(0, 1e-2), (8, 3e-2)], ids=["full", "adapters"])
def test_acceptance_rises_on_a_task_that_can_be_learnt(successor, tmp_path, rank, learning_rate):
    drafter = fresh(successor, rank)
    examples = counting_examples(24, 30)
    held_out = [{"prompt_ids": [20], "response_ids": list(range(21, 50))}]
    before = simulate_acceptance(drafter, held_out).mean_length
    args = arguments(
        tmp_path,
        max_steps=45,
        learning_rate=learning_rate,
        loss_weighting="uniform",
        autoregressive_weight=1.0,
        num_anchors=16,
        per_device_train_batch_size=4,
    )
    D3DTrainer(drafter, args, train_dataset=examples).train()
    drafter.eval()
    after = simulate_acceptance(drafter, held_out)
    assert before < 2.5
    assert after.mean_length > BLOCK - 1
    prompt = torch.tensor([[20]])
    drafted = successor.generate(prompt, assistant_model=drafter, max_new_tokens=29, do_sample=False)
    assert drafted[0].tolist() == list(range(20, 50))
    assert drafter.report.accepted == list(after.rounds)


@pytest.mark.parametrize(
    ("rank", "steps_per_epoch", "workers"),
    [
        pytest.param(0, 8, 0, id="full-within-an-epoch"),
        pytest.param(0, 2, 0, id="full-over-epochs"),
        pytest.param(2, 8, 0, id="adapters-within-an-epoch"),
        pytest.param(2, 3, 0, id="adapters-at-an-epochs-end"),
        pytest.param(2, 8, 2, id="adapters-with-workers"),
    ],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(targets, tmp_path, rank, steps_per_epoch, workers):
    def run(folder, **settings):
        drafter = fresh(targets["llama"], rank)
        args = arguments(
            tmp_path / folder,
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
            learning_rate=1e-2,
            num_anchors=3,
            logging_steps=1,
            dataloader_num_workers=workers,
        )
        trainer = D3DTrainer(drafter, args, train_dataset=random_examples(2 * steps_per_epoch))
        trainer.train(**settings)
        return drafter, trainer

    whole, first = run("whole")
    resumed, second = run("resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert not changed(resumed, weights(whole))
    assert second.state.global_step == 6
    history = [
        [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in t.state.log_history if "loss" in entry]
        for t in (first, second)
    ]
    assert history[0] == history[1]


@with_and_without_adapters
def test_what_a_checkpoint_holds(targets, tmp_path, rank):
    drafter = fresh(targets["llama"], rank)
    args = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    D3DTrainer(drafter, args, train_dataset=random_examples()).train()
    folder = tmp_path / "checkpoint-1"
    files = {path.name for path in folder.iterdir()}
    assert (ADAPTER_FILE in files) == (rank > 0)
    assert ("model.safetensors" in files) == (rank == 0)
    loaded = AutoModel.from_pretrained(folder, **{"base_model": targets["llama"]} if rank else {})
    assert not changed(loaded, weights(drafter))
    assert str(tmp_path) not in (folder / "config.json").read_text()


@pytest.mark.parametrize(
    ("rank", "lora_rank"), [(0, 0), (2, 0), (0, 2), (2, 2)], ids=["full", "adapters", "lora", "both"]
)
def test_the_best_checkpoint_is_loaded_at_the_end(successor, tmp_path, rank, lora_rank):
    drafter = fresh(successor, rank)
    if lora_rank:
        add_lora(drafter, lora_rank)
    args = arguments(
        tmp_path,
        max_steps=4,
        learning_rate=1.0,
        warmup_steps=0,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="acceptance_length",
        greater_is_better=True,
    )
    trainer = D3DTrainer(drafter, args, train_dataset=counting_examples(), eval_dataset=counting_examples(2))
    trainer.train()
    best = trainer.state.best_model_checkpoint
    loaded = AutoModel.from_pretrained(best, **{"base_model": successor} if rank + lora_rank else {})
    if lora_rank:
        merge_lora(drafter)
    assert not changed(drafter, weights(loaded))


def test_evaluate(successor, tmp_path):
    drafter = fresh(successor, 2)
    trainer = D3DTrainer(
        drafter, arguments(tmp_path), train_dataset=counting_examples(), eval_dataset=counting_examples(2)
    )
    drafter.train()
    metrics = trainer.evaluate()
    acceptance = simulate_acceptance(copy.deepcopy(drafter).eval(), counting_examples(2))
    assert drafter.training
    names = {"eval_acceptance_length", "eval_correct_1", "eval_correct_2", "eval_correct_3"}
    assert set(metrics) - {"epoch"} == names
    assert metrics["eval_acceptance_length"] == acceptance.mean_length
    assert [metrics[f"eval_correct_{j}"] for j in (1, 2, 3)] == list(acceptance.correct)
    assert trainer.state.log_history[-1].items() >= metrics.items()
    other = trainer.evaluate(random_examples(2), metric_key_prefix="test")
    assert "test_acceptance_length" in other


@pytest.fixture
def interpreted(monkeypatch):
    """Lets `flex_attention` run without a compiler, and backwards on a CPU; returns the masks that it was given."""
    masks = []

    def uncompiled(query, key, value, training=False, **kwargs):
        masks.append(kwargs["block_mask"])
        return flex.flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    return masks


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize(("rank", "checkpointing"), [(0, False), (0, True), (2, False)])
def test_flex_attention_trains_as_a_dense_mask_does(targets, tmp_path, interpreted, name, rank, checkpointing):
    trained = {}
    for kind in ("sdpa", "flex_attention"):
        drafter = fresh(targets[name], rank)
        args = arguments(
            tmp_path, max_steps=2, learning_rate=1e-3, packed_attention=kind, activation_checkpointing=checkpointing
        )
        D3DTrainer(drafter, args, train_dataset=random_examples()).train()
        assert bool(interpreted) == (kind == "flex_attention")
        trained[kind] = weights(drafter)
        assert drafter.model.config._attn_implementation == "sdpa"  # for drafting
    before = weights(fresh(targets[name], rank))
    assert any(not torch.equal(tensor, before[key]) for key, tensor in trained["sdpa"].items())
    for key, tensor in trained["sdpa"].items():
        torch.testing.assert_close(trained["flex_attention"][key], tensor, atol=2e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("kind", ["adapters", "lora", "full"])
def test_adapters_are_not_sharded(targets, tmp_path, monkeypatch, kind):
    drafter = fresh(targets["llama"], 2 if kind == "adapters" else 0)
    if kind == "lora":
        add_lora(drafter, 2)

    def with_fsdp(self):
        without(self)
        self.is_fsdp_enabled = True

    without = D3DTrainer.create_accelerator_and_postprocess
    monkeypatch.setattr(D3DTrainer, "create_accelerator_and_postprocess", with_fsdp)
    with nullcontext() if kind == "full" else pytest.raises(ValueError, match="FSDP is on, but .*`torchrun`"):
        D3DTrainer(drafter, arguments(tmp_path), train_dataset=random_examples())


def test_which_attention_trains(targets, tmp_path, monkeypatch):
    def choice(**settings):
        drafter = fresh(targets["llama"], 0)
        args = arguments(tmp_path, **settings)
        D3DTrainer(drafter, args, train_dataset=random_examples())
        return _packed_attention(drafter, args)

    assert choice() == "sdpa" and choice(packed_attention="flex_attention") == "flex_attention"
    drafter = fresh(targets["llama"], 0)
    on_cuda = SimpleNamespace(packed_attention="auto", device=torch.device("cuda"))
    assert _packed_attention(drafter, on_cuda) == "flex_attention"
    drafter.model.config._attn_implementation = "eager"  # chosen by the user
    assert _packed_attention(drafter, on_cuda) == "eager"
    monkeypatch.setattr(type(drafter.model), "_supports_flex_attn", False)
    assert choice() == "sdpa"
    with pytest.raises(ValueError, match="'flex_attention', but the backbone `llama` doesn't support it.*'sdpa'"):
        choice(packed_attention="flex_attention")
    with pytest.raises(ValueError, match="`packed_attention` is 'flash'; allowed are"):
        arguments(tmp_path, packed_attention="flash")


@pytest.mark.gpu
def test_flex_attention_trains_on_cuda_as_a_dense_mask_does(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config)
    trained = []
    for kind in ("sdpa", "flex_attention"):
        drafter = fresh(target, 0)
        settings = {"use_cpu": False, "max_steps": 2, "learning_rate": 1e-3, "packed_attention": kind}
        D3DTrainer(drafter, arguments(tmp_path, **settings), train_dataset=random_examples(response=200)).train()
        trained.append(weights(drafter))
    for key, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][key], tensor, atol=1e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["full", "lora"])
def test_activation_checkpointing_changes_nothing(targets, tmp_path, lora_rank):
    def run(**settings):
        drafter = fresh(targets["llama"], 0)
        if lora_rank:
            add_lora(drafter, lora_rank)
        args = arguments(tmp_path, max_steps=3, learning_rate=1e-2, **settings)
        D3DTrainer(drafter, args, train_dataset=random_examples()).train()
        return drafter

    plain, checkpointed = run(), run(activation_checkpointing=True)
    for name, tensor in checkpointed.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["argument", "on-the-model"])
def test_activation_checkpointing_with_adapters_is_refused(targets, tmp_path, how):
    drafter = fresh(targets["llama"], 2)
    if how == "on-the-model":
        drafter.activation_checkpointing_enable()
    args = arguments(tmp_path, activation_checkpointing=how == "argument")
    with pytest.raises(ValueError, match="`activation_checkpointing` is on.*mask_adapter_rank=0"):
        D3DTrainer(drafter, args, train_dataset=random_examples())


@with_and_without_adapters
def test_a_step_in_bfloat16_keeps_float32_weights(targets, tmp_path, rank):
    drafter = fresh(targets["llama"], rank)
    before, dtypes = weights(drafter), []
    for module in (drafter.model.layers[0].mlp.up_proj, drafter.lm_head):
        module.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    args = arguments(tmp_path, max_steps=4, learning_rate=1e-2, bf16=True, logging_steps=1)
    trainer = D3DTrainer(drafter, args, train_dataset=random_examples())
    trainer.train()
    assert set(dtypes) == {torch.bfloat16}
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    assert changed(drafter, before) == (set(drafter.adapter_state_dict()) if rank else set(before))
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def test_accumulated_batches_weigh_like_one(targets, tmp_path):
    def run(batch_size, accumulation):
        drafter = fresh(targets["llama"], 2)
        args = arguments(
            tmp_path,
            max_steps=1,
            learning_rate=1e-2,
            warmup_steps=0,
            lr_scheduler_type="constant",
            num_anchors=100,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=0.0,
            optim="sgd",
        )
        D3DTrainer(drafter, args, train_dataset=random_examples(4)).train()
        return drafter

    one, two = run(4, 1), run(2, 2)
    for name, tensor in two.adapter_state_dict().items():
        torch.testing.assert_close(tensor, one.adapter_state_dict()[name], atol=1e-6, rtol=1e-4)


# Arguments


def test_dropped_offsets_need_causal_blocks(targets, tmp_path):
    drafter = fresh(targets["llama"], 0, block_attention="bidirectional")
    with pytest.raises(ValueError, match="`offset_keep_rate` is 0.5.*'bidirectional'.*block_attention='causal'"):
        D3DTrainer(drafter, arguments(tmp_path, offset_keep_rate=0.5), train_dataset=random_examples())


# From end to end


@pytest.fixture
def project(targets, tokenizer, tmp_path):
    """A folder with a target, its tokenizer, and data."""
    targets["llama"].save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    for name in ("train", "eval"):
        lines = [json.dumps(example | {"source": name}) for example in random_examples()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def drafter_arguments(project, **settings):
    paths = {"target": "target", "train_data": "train.jsonl", "eval_data": "eval.jsonl"}
    paths = {name: str(project / path) for name, path in paths.items()}
    return DrafterArguments(**paths | {"block_size": BLOCK} | settings)


@with_and_without_adapters
def test_train_from_end_to_end(project, targets, tokenizer, rank):
    output = project / "drafter"
    args = arguments(output, max_steps=3, learning_rate=1e-2, logging_steps=1)
    settings = {"mask_adapter_rank": rank, "num_eval_examples": 2, "target_name": "org/target"}
    summary = train(drafter_arguments(project, **settings), args)
    files = {path.name for path in output.iterdir()}
    assert files >= {"config.json", "generation_config.json", "training.json", "modeling_d3d.py"}
    assert files >= ({ADAPTER_FILE} if rank else {"model.safetensors"})
    assert not list(output.glob(".*"))
    loaded = AutoModel.from_pretrained(output, **{"base_model": targets["llama"]} if rank else {})
    record = json.loads((output / "training.json").read_text())
    assert record["steps"] == 3
    assert record["data"] == {"train": "train.jsonl", "train_examples": 6, "train_header": None}
    assert record["drafter"]["mask_adapter_rank"] == rank
    assert len([entry for entry in record["history"] if "loss" in entry]) == 3
    assert (output / "training.png").is_file() == (find_spec("matplotlib") is not None)
    assert f"{record['final']['eval_acceptance_length']:.2f}" in summary
    assert simulate_acceptance(loaded, random_examples()[:2]).mean_length == pytest.approx(
        record["final"]["eval_acceptance_length"], abs=0.2
    )
    config = AutoConfig.from_pretrained(output)
    assert config.mask_token_id == tokenizer.convert_tokens_to_ids("<|reserved|>")
    assert config.target_name_or_path == "org/target"
    for name in ("config.json", "generation_config.json"):
        assert str(project) not in (output / name).read_text()
    for key in ("drafter", "data", "final", "history"):
        assert str(project) not in json.dumps(record[key])
    if rank:
        assert {tensor.dtype for tensor in load_file(output / ADAPTER_FILE).values()} == {torch.bfloat16}


def test_the_record_names_the_start_and_not_its_folder(project):
    output = project / "drafter"
    train(
        drafter_arguments(project, start_from=str(project / "target"), mask_adapter_rank=2),
        arguments(output, max_steps=1),
    )
    record = json.loads((output / "training.json").read_text())
    assert record["drafter"]["start_from"] == "target"
    assert str(project) not in json.dumps(record["drafter"])


def test_in_bfloat16_only_the_frozen_base_is_bfloat16(project):
    args = arguments(project / "drafter", bf16=True, max_steps=1, divergence_weight=0.5)
    trainer = make_trainer(drafter_arguments(project, mask_adapter_rank=2), args)
    adapter = trainer.model.adapter_state_dict()
    dtypes = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    assert {dtypes.pop(name) for name in adapter} == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert trainer.model.model.rotary_emb.inv_freq.dtype == torch.float32
    trainer.train()
    assert trainer.evaluate()["eval_acceptance_length"] >= 1


def test_train_takes_layers_sources_and_no_evaluation(project):
    output = project / "drafter"
    settings = {"mask_adapter_rank": 2, "layers": [0, 2], "eval_data": None, "block_attention": "bidirectional"}
    args = arguments(output, max_steps=1)
    with pytest.raises(ValueError, match=r"sources \['eval'\]"):
        train(drafter_arguments(project, sources=["eval"], **settings), args)
    summary = train(drafter_arguments(project, sources=["train"], **settings), args)
    assert summary.endswith("after 1 steps.")
    loaded = AutoModel.from_pretrained(output, base_model=str(project / "target"))
    assert loaded.config.kept_layers == [0, 2]
    assert loaded.config.block_attention == "bidirectional"


def test_a_drafter_is_trained_for_its_denoising_steps(project):
    output = project / "drafter"
    settings = {"mask_adapter_rank": 2, "num_denoising_steps": BLOCK - 1}
    train(drafter_arguments(project, **settings), arguments(output, max_steps=1, reveal_rate=0.5))
    assert AutoConfig.from_pretrained(output).num_denoising_steps == BLOCK - 1
    with pytest.raises(ValueError, match=f"`num_denoising_steps` is {BLOCK}; it must be between 1 and"):
        make_trainer(drafter_arguments(project, **settings | {"num_denoising_steps": BLOCK}), arguments(output))


def test_train_goes_on_from_its_last_checkpoint(project):
    output = project / "drafter"
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    rank = {"mask_adapter_rank": 2}
    train(drafter_arguments(project, **rank), arguments(output, **settings))
    whole = load_file(output / ADAPTER_FILE)
    for path in [*(output / "checkpoint-4").iterdir()]:
        path.unlink()
    (output / "checkpoint-4").rmdir()
    (output / ADAPTER_FILE).unlink()
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    assert 0 < state["log_history"][-1]["seconds"] < 100
    state["log_history"][-1]["seconds"] = 1000.0  # as if those steps had been slow
    (output / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    train(drafter_arguments(project, **rank), arguments(output, resume_from_checkpoint="true", **settings))
    assert 1000 < json.loads((output / "training.json").read_text())["seconds"] < 1100
    resumed = load_file(output / ADAPTER_FILE)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def test_evaluating_without_responses_is_refused(successor, tmp_path):
    trainer = D3DTrainer(fresh(successor, 2), arguments(tmp_path), train_dataset=counting_examples())
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.evaluate()


# LoRA


save_or_merge = pytest.mark.parametrize("save_adapter", [False, True], ids=["merged", "adapter"])


@save_or_merge
def test_train_a_lora_from_end_to_end(project, targets, save_adapter):
    output = project / "drafter"
    args = arguments(output, max_steps=3, learning_rate=1e-2)
    train(drafter_arguments(project, lora_rank=2, save_adapter=save_adapter), args)
    files = {path.name for path in output.iterdir()}
    assert ("model.safetensors" in files) != save_adapter
    loaded = AutoModel.from_pretrained(output, **{"base_model": targets["llama"]} if save_adapter else {})
    assert loaded.state_dict().keys() == targets["llama"].state_dict().keys()
    moved = changed(loaded, weights(targets["llama"]))
    assert "model.layers.0.mlp.up_proj.weight" in moved and "lm_head.weight" not in moved
    final = json.loads((output / "training.json").read_text())["final"]["eval_acceptance_length"]
    assert simulate_acceptance(loaded, random_examples()).mean_length == pytest.approx(final, abs=0.2)


@save_or_merge
def test_train_a_lora_beneath_mask_adapters(project, targets, save_adapter):
    output = project / "drafter"
    settings = {"lora_rank": 2, "mask_adapter_rank": 2, "save_adapter": save_adapter}
    train(drafter_arguments(project, **settings), arguments(output, max_steps=2, learning_rate=1e-2, save_steps=1))
    names = {path.name for path in output.iterdir()}
    assert (ADAPTER_FILE in names) == save_adapter == ("model.safetensors" not in names)
    loaded = AutoModel.from_pretrained(output, **{"base_model": targets["llama"]} if save_adapter else {})
    base = weights(targets["llama"])
    assert not torch.equal(loaded.model.layers[0].mlp.up_proj.weight, base["model.layers.0.mlp.up_proj.weight"])
    assert all(tensor.any() for name, tensor in loaded.adapter_state_dict().items() if "lora_B" in name)
    final = json.loads((output / "training.json").read_text())["final"]["eval_acceptance_length"]
    assert simulate_acceptance(loaded, random_examples()).mean_length == pytest.approx(final, abs=0.2)


def test_train_goes_on_from_a_drafter(project):
    first, second = project / "first", project / "second"
    train(drafter_arguments(project, mask_adapter_rank=2), arguments(first, max_steps=1, learning_rate=1e-2))
    settings = {"start_from": str(first), "block_size": None}
    train(drafter_arguments(project, **settings), arguments(second, max_steps=1, learning_rate=0.0))
    before, after = load_file(first / ADAPTER_FILE), load_file(second / ADAPTER_FILE)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    text = (second / "training.json").read_text()
    assert (
        json.loads(text)["drafter"].items()
        >= {"start_from": "first", "block_size": BLOCK, "mask_adapter_rank": 2}.items()
    )
    assert str(project) not in json.dumps(json.loads(text)["drafter"])


def test_a_resumed_lora_ends_where_an_uninterrupted_one_does(project):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    output = project / "drafter"
    train(drafter_arguments(project, lora_rank=2), arguments(output, **settings))
    whole = load_file(output / "model.safetensors")
    resume = str(output / "checkpoint-2")
    train(drafter_arguments(project, lora_rank=2), arguments(output, resume_from_checkpoint=resume, **settings))
    resumed = load_file(output / "model.safetensors")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


# Several processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "file", "launcher"),
    [
        pytest.param(["--mask_adapter_rank", "0"], "model.safetensors", "torchrun", id="full"),
        pytest.param(["--mask_adapter_rank", "2"], ADAPTER_FILE, "torchrun", id="adapters"),
        pytest.param(["--mask_adapter_rank", "2"], ADAPTER_FILE, "accelerate", id="accelerate"),
        pytest.param(["--lora_rank", "2"], "model.safetensors", "torchrun", id="lora"),
    ],
)
def test_two_processes_are_one_with_twice_the_batch(project, options, file, launcher):
    (project / "train.jsonl").write_text("\n".join(json.dumps(example) for example in random_examples(8)))
    common = ["-m", "d3d_cli", "train", "--target", str(project / "target"), *options]
    common += ["--train_data", str(project / "train.jsonl"), "--eval_data", str(project / "eval.jsonl")]
    common += (
        "--use_cpu true --max_steps 3 --save_strategy no --optim sgd --learning_rate 1e-2 --warmup_steps 0".split()
    )
    common += "--num_anchors 100 --block_size 4 --loss_weighting uniform --per_device_train_batch_size".split()
    launch = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        # `--multi_gpu` means several processes; on CPUs Accelerate's own kind of them needs an MPI.
        "accelerate": [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            "0",
        ],
    }[launcher]
    outputs = {}
    for name, words in {"one": [*common, "4"], "two": [*launch, *common, "2"]}.items():
        words = [sys.executable, *words, "--output_dir", str(project / name)]
        run = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-2000:]
        outputs[name] = run.stdout
    assert outputs["two"].count("Drafter saved in") == 1  # by the first process alone
    one, two = (load_file(project / name / file) for name in ("one", "two"))
    assert any(tensor.any() for name, tensor in two.items() if "lora_B" in name or "lora_" not in name)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-6, rtol=1e-4)
    records = [json.loads((project / name / "training.json").read_text()) for name in ("one", "two")]
    assert records[0]["final"]["eval_acceptance_length"] == records[1]["final"]["eval_acceptance_length"]
