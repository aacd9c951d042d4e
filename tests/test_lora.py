"""LoRA on all rows: what is trained, what a checkpoint holds, and loading one without `peft`."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from transformers_d3d.lora import add_lora, has_lora, load_lora, merge_lora, save_lora
from transformers_d3d.masking_d3d import mask_rows, trunk_rows
from transformers_d3d.modeling_d3d import ADAPTER_FILE, LORA_CONFIG, LORA_FILE, LORA_FOLDER

IDS = torch.tensor([[3, 4, 63, 63]])


@pytest.fixture
def random_lora(make_perturbed):
    """Builds drafters with a LoRA that is random instead of zero."""

    def make(target, rank=2, alpha=3.0, **settings):
        drafter = make_perturbed(target, **settings)
        add_lora(drafter, rank, alpha)
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
        return drafter

    return make


@torch.no_grad()
def logits(drafter):
    return drafter.logits(drafter(IDS).last_hidden_state)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_drafter_that_is_loaded_is_the_one_that_was_trained(targets, random_lora, tmp_path, name):
    drafter = random_lora(targets[name])
    save_lora(drafter, tmp_path)
    trained = logits(drafter)
    loaded = AutoModel.from_pretrained(tmp_path, base_model=targets[name])
    assert (trained - logits(random_lora(targets[name], 1))).abs().max() > 1e-2
    torch.testing.assert_close(logits(loaded), trained, atol=1e-4, rtol=1e-4)
    by_peft = PeftModel.from_pretrained(copy.deepcopy(targets[name]), tmp_path / LORA_FOLDER)
    torch.testing.assert_close(by_peft(IDS).logits, trained, atol=1e-4, rtol=1e-4)
    merge_lora(drafter)
    assert not has_lora(drafter)
    assert drafter.state_dict().keys() == targets[name].state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name


def test_only_the_lora_is_trained(targets, random_lora):
    drafter = random_lora(targets["llama"])
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    linears = sum(type(module) is nn.Linear for module in targets["llama"].model.modules())
    assert sum("lora_A" in name for name in trained) == linears
    assert {name for name in trained if "lora_" not in name} == {
        "model.embed_tokens.token_adapter.trainable_tokens_delta.default"
    }


def test_a_saved_lora_loads_back_bit_for_bit(targets, random_lora, tmp_path):
    drafter, other = random_lora(targets["llama"]), random_lora(targets["llama"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += parameter.requires_grad
    save_lora(drafter, tmp_path)
    load_lora(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"of another shape.*same `--lora_rank`"):
        load_lora(random_lora(targets["llama"], 4), tmp_path)


@pytest.mark.parametrize(
    ("setting", "value"), [("use_dora", True), ("use_rslora", True), ("peft_type", "LOHA"), ("rank_pattern", {"q": 1})]
)
def test_kinds_that_cannot_be_merged_are_refused(targets, random_lora, tmp_path, setting, value):
    save_lora(random_lora(targets["llama"]), tmp_path)
    settings = json.loads((tmp_path / LORA_CONFIG).read_text()) | {setting: value}
    (tmp_path / LORA_CONFIG).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="a plain `LORA` is all that can be merged.*`peft`"):
        AutoModel.from_pretrained(tmp_path, base_model=targets["llama"])


def test_weights_that_are_left_over_are_refused(targets, random_lora, tmp_path):
    save_lora(random_lora(targets["llama"]), tmp_path)
    save_file(load_file(tmp_path / LORA_FILE) | {"odd.lora_A.weight": torch.zeros(2, 2)}, tmp_path / LORA_FILE)
    with pytest.raises(ValueError, match="1 weights are left over.*odd.lora_A.weight"):
        AutoModel.from_pretrained(tmp_path, base_model=targets["llama"])


MASKED = {"mask_offsets": torch.tensor([0, 1])}


@pytest.mark.parametrize("merged", [False, True], ids=["adapters", "merged"])
def test_a_lora_beneath_mask_adapters(targets, make_perturbed, random_lora, tmp_path, merged):
    def logits(drafter):
        with torch.no_grad():
            rows = trunk_rows(torch.arange(2)) + mask_rows(torch.tensor([1]), 3)
            return drafter.logits(drafter(IDS, rows, **MASKED).last_hidden_state)

    base = make_perturbed(targets["llama"], 2, block_size=3)
    drafter = random_lora(targets["llama"], mask_adapter_rank=2, block_size=3)
    assert drafter.adapter_state_dict().keys() == base.adapter_state_dict().keys()
    assert {n for n, p in drafter.named_parameters() if p.requires_grad} >= {"mask_embedding"}
    trained = logits(drafter)
    if merged:
        merge_lora(drafter)
        with pytest.raises(ValueError, match="A LoRA is merged .*`save_pretrained`"):
            drafter.save_adapter(tmp_path)
        drafter.save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(tmp_path)
    else:
        save_lora(drafter, tmp_path)
        other = random_lora(targets["llama"], mask_adapter_rank=2, block_size=3)
        load_lora(other, tmp_path)
        assert torch.equal(logits(other), trained)
        loaded = AutoModel.from_pretrained(tmp_path, base_model=targets["llama"])
        with pytest.raises(ValueError, match="A LoRA is merged"):
            loaded.save_adapter(tmp_path / "again")
    torch.testing.assert_close(logits(loaded), trained, atol=1e-4, rtol=1e-4)
    assert (logits(base) - trained)[:, :2].abs().max() > 1e-2  # of the clean rows, which mask adapters don't change


def test_a_checkpoint_that_lost_its_mask_adapters_is_refused(targets, random_lora, tmp_path):
    save_lora(random_lora(targets["llama"], mask_adapter_rank=2), tmp_path)
    (tmp_path / ADAPTER_FILE).unlink()
    with pytest.raises(ValueError, match="no `mask_adapter.safetensors`, but its `mask_adapter_rank` is 2"):
        AutoModel.from_pretrained(tmp_path, base_model=targets["llama"])
