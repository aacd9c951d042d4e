"""Conversion: what is exported drafts the same in an engine's own input layout, and what is imported drafts at once."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from transformers_d3d.acceptance import draft_all_anchors
from transformers_d3d.convert import ConvertConfig, drafter_from_model, parallel_draft_model, run_convert

BLOCK = 5
IDS = torch.tensor([5, 6, 7, 8, 9, 10, 11])


@torch.no_grad()
def engine_draft(model, ids, num_drafts):
    """What vLLM and TensorRT-LLM document for parallel drafting: the newest token and `num_drafts - 1` masks, over a cache."""
    mask = model.config.pard_token
    cache = DynamicCache()
    model(ids[None, :-1], cache=cache)
    rows = torch.tensor([[ids[-1], *[mask] * (num_drafts - 1)]])
    return model(rows, cache=cache).logits[0].argmax(-1)


@pytest.fixture
def folder(targets, make_perturbed, tokenizer, tmp_path):
    """Saves a drafter and its target."""

    def save(name="llama", **settings):
        drafter = make_perturbed(
            targets[name], **{"block_size": BLOCK, "target_name_or_path": "org/target"} | settings
        )
        drafter.save_pretrained(tmp_path / "drafter")
        targets[name].save_pretrained(tmp_path / "target")
        tokenizer.save_pretrained(tmp_path / "target")
        return drafter

    return save


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_an_exported_drafter_drafts_the_same(folder, tmp_path, name):
    drafter = folder(name)
    target = str(tmp_path / "target")
    text = run_convert(ConvertConfig(str(tmp_path / "drafter"), str(tmp_path / "plain"), "parallel_draft", target))
    assert f'"num_speculative_tokens": {BLOCK}' in text and "mask_token_id=63" in text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(model).__name__ == type(AutoModelForCausalLM.from_pretrained(target)).__name__
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["pard_token"] == config["mask_token_id"] == 63
    assert len(AutoTokenizer.from_pretrained(tmp_path / "plain")) == 64
    for length in range(2, len(IDS) + 1):
        expected = draft_all_anchors(drafter, torch.cat([IDS[:length], IDS[:1]]), length - 1)[0]
        drafted = engine_draft(model, IDS[:length], BLOCK)
        assert torch.equal(drafted[: BLOCK - 1], expected)
        assert torch.equal(engine_draft(model, IDS[:length], 3), drafted[:3])


def test_there_and_back_again(folder, tmp_path):
    drafter = folder()
    target = str(tmp_path / "target")
    run_convert(ConvertConfig(str(tmp_path / "drafter"), str(tmp_path / "plain"), "parallel_draft", target))
    run_convert(ConvertConfig(str(tmp_path / "plain"), str(tmp_path / "again"), target="org/target", block_size=BLOCK))
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert again.config.mask_token_id == 63 and again.config.block_attention == "causal"
    assert again.config.target_name_or_path == "org/target"
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert torch.equal(draft_all_anchors(again, IDS, 0), draft_all_anchors(drafter, IDS, 0))


def test_a_parallel_draft_checkpoint_drafts_at_once(targets, tokenizer, tmp_path):
    model = targets["llama"]
    model.save_pretrained(tmp_path / "pard")
    tokenizer.add_special_tokens({"additional_special_tokens": ["Z"]})  # so that no text holds the token 62
    tokenizer.save_pretrained(tmp_path / "pard")
    config = json.loads((tmp_path / "pard" / "config.json").read_text())
    (tmp_path / "pard" / "config.json").write_text(json.dumps(config | {"pard_token": 62}))
    drafter = drafter_from_model(tmp_path / "pard", target="org/target", mask_token_id=62, block_size=4)
    assert drafter.config.mask_token_id == 62
    drafter.config.overlap = "thread"
    inputs = {"input_ids": IDS[None], "attention_mask": torch.ones_like(IDS[None])}
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=drafter), plain)
    assert drafter.report.mode == "thread" and drafter.report.mean_acceptance_length > 1.5
    with pytest.raises(ValueError, match="`mask_token_id` is 61, but .*`pard_token` 62; leave it out"):
        drafter_from_model(tmp_path / "pard", mask_token_id=61)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_attention": "bidirectional"}, "`block_attention` is 'bidirectional'.*see no later rows"),
        ({"mask_adapter_rank": 2}, "adapters of rank 2 act on mask rows only.*`mask_adapter_rank=0`"),
    ],
)
def test_what_a_plain_model_cannot_do_is_refused(targets, make_perturbed, settings, match):
    with pytest.raises(ValueError, match=match):
        parallel_draft_model(make_perturbed(targets["llama"], **settings))


def test_a_pruned_drafter_is_exported(targets, make_perturbed):
    drafter = make_perturbed(targets["gemma3"], layers=[0, 2])
    model = parallel_draft_model(drafter)
    assert model.config.num_hidden_layers == 2 and len(model.config.layer_types) == 2
    ids = IDS[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, drafter.logits(drafter(ids).last_hidden_state))


def test_any_causal_model_can_become_a_drafter(targets, tokenizer, tmp_path):
    targets["llama"].save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = run_convert(ConvertConfig(str(tmp_path / "model"), str(tmp_path / "drafter"), dtype="bfloat16"))
    assert "mask token 63" in text
    loaded = AutoModel.from_pretrained(tmp_path / "drafter")
    assert loaded.dtype == torch.bfloat16 and loaded.config.block_size == 8
    assert len(AutoTokenizer.from_pretrained(tmp_path / "drafter")) == 64


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"to": "onnx"}, "`to` is 'onnx'; allowed are 'drafter' and 'parallel_draft'"),
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"output_dir": "drafter"}, "holds a checkpoint already"),
        ({"source": "drafter"}, "a D3D drafter already"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_settings(folder, tmp_path, settings, match):
    folder()
    paths = {name: str(tmp_path / value) for name, value in settings.items() if name in ("source", "output_dir")}
    config = {"source": str(tmp_path / "target"), "output_dir": str(tmp_path / "new")} | settings | paths
    with pytest.raises(ValueError, match=match):
        run_convert(ConvertConfig(**config))
    assert AutoConfig.from_pretrained(tmp_path / "drafter").model_type == "d3d_drafter"
    assert not (tmp_path / "new").exists()
