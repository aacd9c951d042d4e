"""Start points: what the drafter holds at the beginning, and what cannot serve as one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, LlamaForCausalLM

from transformers_d3d.benchmark import load_drafter
from transformers_d3d.lora import save_lora
from transformers_d3d.start_points import build_drafter


@pytest.fixture
def build(targets, tokenizer, pair_folders):
    return lambda start=None, **settings: build_drafter(pair_folders["target"], tokenizer, start, **settings)


@pytest.fixture
def sibling(targets, tokenizer, tmp_path):
    """Saves a causal language model of two layers; `settings` go into its configuration."""

    def save(save_tokenizer=tokenizer, **settings):
        config = type(targets["llama"].config)(
            **targets["llama"].config.to_dict() | {"num_hidden_layers": 2} | settings
        )
        torch.manual_seed(4)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "sibling")
        if save_tokenizer is not None:
            save_tokenizer.save_pretrained(tmp_path / "sibling")
        return str(tmp_path / "sibling")

    return save


def holds(drafter, model):
    own = drafter.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())


def test_from_the_target(build, targets):
    drafter = build()
    assert holds(drafter, targets["llama"])
    config = drafter.config
    assert (config.block_size, config.block_attention, config.mask_adapter_rank) == (8, "causal", 64)
    assert config.base_model_name_or_path is None


def test_from_a_sibling(build, sibling, tmp_path):
    folder = sibling()
    drafter = build(folder, target_name="org/target", mask_adapter_rank=2)
    assert holds(drafter, LlamaForCausalLM.from_pretrained(folder))
    assert drafter.config.target_name_or_path == "org/target"
    assert drafter.config.base_model_name_or_path == "sibling"  # not the path
    drafter.save_adapter(tmp_path / "adapters")
    loaded = AutoModel.from_pretrained(tmp_path / "adapters", base_model=folder)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    with pytest.raises(ValueError, match="base model `sibling`.*pass `base_model=`"):
        AutoModel.from_pretrained(tmp_path / "adapters")


def test_adapters_over_a_sibling_find_it(build, sibling, targets, tmp_path, monkeypatch):
    drafter = build(sibling(), mask_adapter_rank=2)
    drafter.save_adapter(tmp_path / "adapters")
    monkeypatch.chdir(tmp_path)  # where the recorded name is the sibling's folder
    for loaded in (AutoModel.from_pretrained("adapters"), load_drafter("adapters", targets["llama"])):
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_from_a_parallel_draft_model(build, sibling):
    folder = sibling(pard_token=63)
    assert build(folder, mask_adapter_rank=0).config.mask_token_id == 63
    with pytest.raises(ValueError, match="`block_attention` is 'bidirectional', there 'causal'"):
        build(folder, block_attention="bidirectional")
    with pytest.raises(ValueError, match="`mask_token_id` is 62, there 63"):
        build(folder, mask_token_id=62)


@pytest.mark.parametrize("kind", ["full", "adapters", "lora"])
def test_from_a_drafter(build, make_perturbed, targets, tmp_path, kind):
    first = make_perturbed(targets["llama"], 2 if kind == "adapters" else 0, block_attention="bidirectional")
    if kind == "lora":
        first = build(block_size=4, block_attention="bidirectional", lora_rank=2)
        torch.nn.init.normal_(first.model.layers[0].mlp.up_proj.lora_B["default"].weight)
        save_lora(first, tmp_path / "first")
        first = AutoModel.from_pretrained(tmp_path / "first", base_model=targets["llama"])
        assert not holds(first, targets["llama"])
    elif kind == "full":
        torch.nn.init.normal_(first.lm_head.weight)
        first.save_pretrained(tmp_path / "first")
    else:
        first.save_adapter(tmp_path / "first")
    drafter = build(str(tmp_path / "first"))
    assert holds(drafter, first)
    assert (drafter.config.block_size, drafter.config.block_attention) == (4, "bidirectional")
    with pytest.raises(ValueError, match="`block_size` is 8, there 4.*Leave these out"):
        build(str(tmp_path / "first"), block_size=8)
    with pytest.raises(ValueError, match="`save_adapter` is on, but.*is a D3D drafter"):
        build(str(tmp_path / "first"), lora_rank=2, save_adapter=True)


def test_another_vocabulary_is_refused(build, sibling):
    with pytest.raises(ValueError, match="a vocabulary of 80 and the target one of 64"):
        build(sibling(vocab_size=80))


def test_another_tokenizer_is_refused(build, sibling):
    folder = sibling()
    path = Path(folder) / "tokenizer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model"]["vocab"]["ä"] = settings["model"]["vocab"].pop("a")
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="another tokenizer than the target: 1 tokens.*'a'"):
        build(folder)


def test_a_start_without_a_tokenizer_is_refused(build, sibling):
    with pytest.raises(ValueError, match="has no tokenizer to compare"):
        build(sibling(None))


def test_lora_settings(build):
    assert build(lora_rank=2).config.mask_adapter_rank == 0
    assert build(lora_rank=2, mask_adapter_rank=4).config.mask_adapter_rank == 4
    with pytest.raises(ValueError, match="no LoRA to save"):
        build(save_adapter=True)
