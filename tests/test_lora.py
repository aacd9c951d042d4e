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
from transformers_d3d.modeling_d3d import LORA_CONFIG, LORA_FILE, LORA_FOLDER

IDS = torch.tensor([[3, 4, 63, 63]])


@pytest.fixture
def random_lora(make_perturbed):
    """Builds drafters with a LoRA that is random instead of zero."""

    def make(target, rank=2, alpha=3.0):
        drafter = make_perturbed(target)
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


def test_a_lora_beside_mask_adapters_is_refused(targets, make_perturbed):
    with pytest.raises(ValueError, match="`mask_adapter_rank` is 2.*Use one of them"):
        add_lora(make_perturbed(targets["llama"], 2), 4)
