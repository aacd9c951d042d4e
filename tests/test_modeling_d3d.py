"""The drafter's forward pass against the plain causal language model, and every way to build, save and load one."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from transformers_d3d import D3DDrafterConfig, D3DDrafterModel
from transformers_d3d.masking_d3d import mask_rows, trunk_rows
from transformers_d3d.modeling_d3d import ADAPTER_FILE, keep_layers

BACKBONES = ["llama", "qwen3", "gemma", "gemma3", "mistral"]
REMOTE_CODE = {
    f"{name}_d3d.py"
    for name in ("cache", "configuration", "generation", "masking", "modeling", "outcomes", "overlap", "report")
}
IDS = torch.randint(3, 60, (1, 14), generator=torch.Generator().manual_seed(3))
MASK, BLOCK = 63, 4

every_backbone = pytest.mark.parametrize("name", BACKBONES)
with_and_without_adapters = pytest.mark.parametrize("rank", [0, 2], ids=["plain", "adapters"])
both_attentions = pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])


@pytest.fixture
def llama(targets):
    return targets["llama"]


def tiny_llama(dtype=torch.float32, **settings):
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes | {"vocab_size": 64, "initializer_range": 0.3} | settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def block_states(drafter, ids, anchors, cached=False, blocks=None):
    """Hidden states `(num_blocks, block_size - 1, hidden_size)` of the blocks at the anchors."""
    rows = mask_rows(torch.tensor(anchors), drafter.config.block_size)
    blocks = torch.full((1, len(rows)), drafter.config.mask_token_id) if blocks is None else blocks
    offsets = rows.position - rows.start
    if cached:
        cache = drafter.new_cache(4)
        drafter(ids, cache=cache)
        hidden = drafter(blocks, rows, cache=cache, mask_offsets=offsets).last_hidden_state
    else:
        both = torch.cat([ids, blocks], dim=1)
        clean = trunk_rows(torch.arange(ids.shape[1]))
        hidden = drafter(both, clean + rows, mask_offsets=offsets).last_hidden_state[:, ids.shape[1] :]
    return hidden.view(len(anchors), -1, hidden.shape[-1])


@torch.no_grad()
def outputs(drafter):
    """Logits of clean rows and of two blocks: everything that a checkpoint must bring back."""
    return drafter.logits(drafter(IDS).last_hidden_state), drafter.logits(block_states(drafter, IDS, [3, 9]))


def assert_same_drafter(loaded, drafter):
    assert type(loaded) is type(drafter)
    for kind in ("named_parameters", "named_buffers"):
        own, other = dict(getattr(loaded, kind)()), dict(getattr(drafter, kind)())
        assert own.keys() == other.keys()
        for name in own:
            assert own[name].dtype == other[name].dtype, name
            assert torch.equal(own[name], other[name]), name
    for one, other in zip(outputs(loaded), outputs(drafter), strict=True):
        assert torch.equal(one, other)


# Forward


@every_backbone
@with_and_without_adapters
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_clean_rows_equal_the_causal_language_model(targets, make_perturbed, name, rank, attention):
    target = targets[name]
    if attention == "eager":
        target = copy.deepcopy(target)
        target.set_attn_implementation("eager")
    drafter = make_perturbed(target, rank)
    assert drafter.config._attn_implementation == attention
    with torch.no_grad():
        expected = target(IDS).logits
        assert torch.allclose(drafter.logits(drafter(IDS).last_hidden_state), expected, atol=1e-5)
        rows = mask_rows(torch.tensor([2, 5]), BLOCK)
        ids = torch.cat([IDS, torch.full((1, len(rows)), MASK)], dim=1)
        both = trunk_rows(torch.arange(IDS.shape[1])) + rows
        hidden = drafter(ids, both, mask_offsets=rows.position - rows.start).last_hidden_state
        assert torch.allclose(drafter.logits(hidden[:, : IDS.shape[1]]), expected, atol=1e-5)


@every_backbone
@both_attentions
def test_eager_and_sdpa_give_the_same_blocks(targets, make_perturbed, name, block_attention):
    drafter = make_perturbed(targets[name], 2, block_attention=block_attention)
    eager = copy.deepcopy(drafter)
    eager.set_attn_implementation("eager")
    assert torch.allclose(block_states(eager, IDS, [3, 9]), block_states(drafter, IDS, [3, 9]), atol=1e-4)


@every_backbone
def test_a_batch_of_sequences(targets, make_perturbed, name):
    drafter = make_perturbed(targets[name])
    batch = torch.cat([IDS, IDS.flip(1)])
    with torch.no_grad():
        together = drafter(batch).last_hidden_state
        for row in range(2):
            assert torch.allclose(together[row], drafter(batch[row : row + 1]).last_hidden_state[0], atol=1e-5)


@every_backbone
@pytest.mark.parametrize("sizes", [[14], [1] * 14, [5, 9], [1, 12, 1], [6, 1, 1, 6]], ids=str)
def test_cached_equals_uncached_for_clean_rows(targets, make_perturbed, name, sizes):
    drafter = make_perturbed(targets[name])
    cache = drafter.new_cache(2)
    with torch.no_grad():
        parts = [drafter(part, cache=cache).last_hidden_state for part in IDS.split(sizes, dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), drafter(IDS).last_hidden_state, atol=1e-5)
    assert cache.length == IDS.shape[1]


@every_backbone
@with_and_without_adapters
@both_attentions
def test_cached_equals_uncached_for_blocks(targets, make_perturbed, name, rank, block_attention):
    drafter = make_perturbed(targets[name], rank, block_attention=block_attention)
    anchors = [3, 4, 9, 13]
    cached = block_states(drafter, IDS, anchors, cached=True)
    assert torch.allclose(cached, block_states(drafter, IDS, anchors), atol=1e-5)


@every_backbone
@with_and_without_adapters
@both_attentions
def test_blocks_do_not_know_of_each_other(targets, make_perturbed, name, rank, block_attention):
    drafter = make_perturbed(targets[name], rank, block_attention=block_attention)
    alone = block_states(drafter, IDS, [5])[0]
    anchors = [4, 5, 6, 7, 5]
    assert torch.allclose(block_states(drafter, IDS, anchors)[1], alone, atol=1e-5)
    blocks = torch.full((len(anchors), BLOCK - 1), MASK)
    blocks[[0, 2, 3, 4]] = torch.arange(4 * (BLOCK - 1)).view(4, -1)
    changed = block_states(drafter, IDS, anchors, blocks=blocks.view(1, -1))
    assert torch.allclose(changed[1], alone, atol=1e-5)
    assert not torch.allclose(changed[4], alone, atol=1e-2)


@every_backbone
@with_and_without_adapters
def test_a_block_does_not_see_beyond_its_anchor(targets, make_perturbed, name, rank):
    drafter = make_perturbed(targets[name], rank, block_attention="bidirectional")
    anchor = 6
    before = block_states(drafter, IDS, [anchor])
    later, at_anchor = IDS.clone(), IDS.clone()
    later[:, anchor + 1 :] = (later[:, anchor + 1 :] + 7) % 60
    at_anchor[:, anchor] = (at_anchor[:, anchor] + 7) % 60
    assert torch.allclose(block_states(drafter, later, [anchor]), before, atol=1e-5)
    assert not torch.allclose(block_states(drafter, at_anchor, [anchor]), before, atol=1e-2)


@pytest.mark.parametrize(("block_attention", "changes"), [("causal", False), ("bidirectional", True)])
def test_block_attention_decides_who_sees_the_last_mask_row(llama, make_perturbed, block_attention, changes):
    drafter = make_perturbed(llama, block_attention=block_attention)
    plain = block_states(drafter, IDS, [5])
    changed = block_states(drafter, IDS, [5], blocks=torch.tensor([[MASK, MASK, 7]]))
    assert torch.allclose(changed[0, 0], plain[0, 0], atol=1e-3) is not changes


@every_backbone
def test_adapters_act_on_mask_rows(targets, make_perturbed, name):
    plain, adapted = make_perturbed(targets[name]), make_perturbed(targets[name], 2)
    assert not torch.allclose(block_states(plain, IDS, [5]), block_states(adapted, IDS, [5]), atol=1e-2)
    untrained = D3DDrafterModel.from_causal_lm(
        targets[name], mask_token_id=MASK, block_size=BLOCK, mask_adapter_rank=2
    )
    assert torch.allclose(block_states(plain, IDS, [5]), block_states(untrained, IDS, [5]), atol=1e-5)


@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
def test_half_precision_is_finite(llama, make_perturbed, cached):
    drafter = make_perturbed(llama, 2).to(torch.bfloat16)
    for attention in ("sdpa", "eager"):
        drafter.set_attn_implementation(attention)
        assert block_states(drafter, IDS, [0, 5, 13], cached=cached).isfinite().all()


@pytest.mark.parametrize(
    ("model_class", "config_class", "settings"),
    [
        pytest.param(Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0}, id="gemma2-soft-cap"),
        pytest.param(
            GraniteForCausalLM,
            GraniteConfig,
            {"logits_scaling": 5.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.3},
            id="granite-scaling",
        ),
        pytest.param(CohereForCausalLM, CohereConfig, {"logit_scale": 0.125}, id="cohere-scale"),
        pytest.param(
            LlamaForCausalLM,
            LlamaConfig,
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
            id="llama-rope",
        ),
    ],
)
def test_heads_and_embeddings_keep_the_sources_scales(model_class, config_class, settings, tmp_path):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    if model_class is Gemma2ForCausalLM:
        sizes["head_dim"] = 8
    source = model_class(config_class(**sizes | settings)).eval()
    drafter = D3DDrafterModel.from_causal_lm(source, mask_token_id=MASK, block_size=BLOCK)
    drafter.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = source(IDS).logits
        for model in (drafter, AutoModel.from_pretrained(tmp_path)):
            assert torch.allclose(model.logits(model(IDS).last_hidden_state), expected, atol=1e-5)


# Building


@pytest.mark.parametrize("layers", [[0, 2], [1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_subset_of_the_layers(targets, make_perturbed, name, layers, tmp_path):
    target = targets[name]
    drafter = make_perturbed(target, layers=layers)
    assert drafter.config.kept_layers == layers
    assert drafter.config.text_config.num_hidden_layers == len(drafter.model.layers) == len(layers)
    assert [layer.self_attn.layer_idx for layer in drafter.model.layers] == list(range(len(layers)))
    if name == "gemma3":
        kinds = target.config.layer_types
        assert drafter.config.text_config.layer_types == [kinds[i] for i in layers]
    for kept, original in zip(drafter.model.layers, layers, strict=True):
        for own, theirs in zip(kept.parameters(), target.model.layers[original].parameters(), strict=True):
            assert torch.equal(own, theirs)
    cached = block_states(drafter, IDS, [3, 9], cached=True)
    assert torch.allclose(cached, block_states(drafter, IDS, [3, 9]), atol=1e-5)
    drafter.save_pretrained(tmp_path)
    assert_same_drafter(AutoModel.from_pretrained(tmp_path), drafter)


@pytest.mark.parametrize("layers", [[], [2, 0], [0, 0], [-1, 1], [0, 3]], ids=str)
def test_impossible_layers_are_refused(llama, layers):
    with pytest.raises(ValueError, match=r"`layers` is .* from 0 to 2"):
        D3DDrafterModel.from_causal_lm(llama, mask_token_id=MASK, layers=layers)
    with pytest.raises(ValueError, match="`layers` is"):
        keep_layers(llama.config, layers)


def test_the_source_is_left_alone(targets, make_perturbed):
    source = copy.deepcopy(targets["gemma3"])
    before, config = copy.deepcopy(source.state_dict()), source.config.to_dict()
    drafter = make_perturbed(source, 2, layers=[0, 1])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    assert source.config.to_dict() == config
    assert all(torch.equal(source.state_dict()[key], value) for key, value in before.items())


def test_from_causal_lm_keeps_dtype_and_mode(llama):
    source = copy.deepcopy(llama).to(torch.bfloat16).train()
    drafter = D3DDrafterModel.from_causal_lm(source, mask_token_id=MASK)
    assert drafter.dtype == torch.bfloat16
    assert not drafter.training
    assert source.training


def test_from_a_folder_with_its_tokenizer(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    drafter = D3DDrafterModel.from_causal_lm(tmp_path, block_size=BLOCK)
    assert drafter.config.mask_token_id == tokenizer.convert_tokens_to_ids("<|reserved|>")
    assert drafter.config.target_name_or_path is None
    with torch.no_grad():
        assert torch.allclose(drafter.logits(drafter(IDS).last_hidden_state), llama(IDS).logits, atol=1e-5)


def tiny_t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def tiny_mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1))


def tiny_rwkv():
    return RwkvForCausalLM(RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))


def tiny_bert():
    return BertModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(tiny_t5, "`T5ForConditionalGeneration` is not a decoder-only.*Llama", id="encoder-decoder"),
        pytest.param(tiny_mamba, "`mamba`.*build the drafter from a dense", id="mamba"),
        pytest.param(tiny_rwkv, "`rwkv`.*build the drafter from a dense", id="rwkv"),
        pytest.param(tiny_bert, "`BertModel` is not a decoder-only.*Llama", id="no-head"),
        pytest.param(tiny_gpt2, "`gpt2`.*`embed_tokens`.*Llama", id="other-weight-names"),
    ],
)
def test_sources_that_cannot_serve_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        D3DDrafterModel.from_causal_lm(make(), mask_token_id=MASK)


def test_a_stateful_source_folder_is_refused_before_its_weights_are_read(tmp_path):
    tiny_mamba().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`mamba`"):
        D3DDrafterModel.from_causal_lm(tmp_path, mask_token_id=MASK)


def test_a_head_that_does_more_is_refused(llama):
    class Doubling(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    source = Doubling(llama.config)
    with pytest.raises(ValueError, match="`Doubling` are not its head's output"):
        D3DDrafterModel.from_causal_lm(source, mask_token_id=MASK)


def test_a_drafter_needs_a_backbone():
    with pytest.raises(ValueError, match="from_causal_lm"):
        D3DDrafterModel(D3DDrafterConfig())


# Full checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM, D3DDrafterModel], ids=lambda c: c.__name__)
def test_round_trip(make_perturbed, tmp_path, dtype, tied, max_shard_size, auto_class):
    drafter = make_perturbed(tiny_llama(tie_word_embeddings=tied, dtype=dtype), 2)
    drafter.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == (max_shard_size == "10KB")
    assert ("lm_head.weight" in {key for file in files for key in load_file(file)}) is not tied
    junk = [torch.full((64, 64), torch.nan) for _ in range(50)]  # what uninitialised memory would hold
    del junk
    loaded = auto_class.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert not loaded.training
    assert_same_drafter(loaded, drafter)


@every_backbone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_of_every_backbone(targets, make_perturbed, tmp_path, name, dtype):
    targets[name].save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=dtype)
    drafter = make_perturbed(target, 2)
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = AutoModel.from_pretrained(tmp_path / "drafter")
    assert_same_drafter(loaded, drafter)
    assert dict(loaded.named_buffers()).keys() == dict(target.named_buffers()).keys()
    for key, buffer in target.named_buffers():
        assert torch.equal(loaded.get_buffer(key), buffer), key


@pytest.mark.parametrize(
    ("dtype", "loaded_dtype"),
    [
        pytest.param(None, torch.bfloat16, id="default"),
        pytest.param("auto", torch.bfloat16, id="auto"),
        pytest.param(torch.float32, torch.float32, id="float32"),
        pytest.param("float32", torch.float32, id="by-name"),
    ],
)
@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_dtype_on_load(llama, make_perturbed, tmp_path, kind, dtype, loaded_dtype):
    target = copy.deepcopy(llama).to(torch.bfloat16)
    drafter = make_perturbed(target, 2)
    drafter.save_pretrained(tmp_path) if kind == "full" else drafter.save_adapter(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    settings = {} if dtype is None else {"dtype": dtype}
    loaded = AutoModel.from_pretrained(tmp_path, **settings | ({"base_model": target} if kind == "adapter" else {}))
    assert {parameter.dtype for parameter in loaded.parameters()} == {loaded_dtype}
    assert all(buffer.dtype == torch.float32 for buffer in loaded.buffers())


def test_a_drafter_is_a_plain_causal_language_model_too(llama, make_perturbed, tmp_path):
    drafter = make_perturbed(llama)
    drafter.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == llama.state_dict().keys()


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_the_saved_files(llama, make_perturbed, tmp_path, kind):
    drafter = make_perturbed(llama, 2)
    drafter.save_pretrained(tmp_path) if kind == "full" else drafter.save_adapter(tmp_path)
    weights = "model.safetensors" if kind == "full" else ADAPTER_FILE
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        weights,
    } | REMOTE_CODE
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"]["AutoConfig"] == "configuration_d3d.D3DDrafterConfig"
    assert saved["auto_map"]["AutoModel"] == "modeling_d3d.D3DDrafterModel"
    assert set(saved["auto_map"]) <= {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert saved["architectures"] == ["D3DDrafterModel"]


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_loaded_drafter_saves_the_same_files(llama, make_perturbed, tmp_path, kind):
    drafter, settings = make_perturbed(llama, 2), {"base_model": llama} if kind == "adapter" else {}
    for folder in ("first", "second"):
        save = drafter.save_pretrained if kind == "full" else drafter.save_adapter
        save(tmp_path / folder)
        drafter = AutoModel.from_pretrained(tmp_path / folder, **settings)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_generation_settings_travel(llama, make_perturbed, tmp_path, kind):
    drafter = make_perturbed(llama, 2)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(tmp_path) if kind == "full" else drafter.save_adapter(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, **{"base_model": llama} if kind == "adapter" else {})
    assert loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.assistant_confidence_threshold == 0.25
    (tmp_path / "generation_config.json").unlink()
    loaded = AutoModel.from_pretrained(tmp_path, **{"base_model": llama} if kind == "adapter" else {})
    assert loaded.generation_config.num_assistant_tokens != 3


def rename(weights):
    weights["model.norm.weights"] = weights.pop("model.norm.weight")
    return "missing.*model.norm.weight.*unexpected.*model.norm.weights"


def strip(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]
    return "1 missing.*model.layers.1.mlp.up_proj.weight"


def add(weights):
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    return "1 unexpected.*model.layers.9.mlp.up_proj.weight"


def reshape(weights):
    weights["model.norm.weight"] = torch.zeros(5)
    return "1 of another shape.*model.norm.weight"


def prefix(weights):
    for key in list(weights):
        weights[f"drafter.{key}"] = weights.pop(key)
    return "missing.*unexpected"


def without_prefix(weights):
    for key in [key for key in weights if key.startswith("model.")]:
        weights[key.removeprefix("model.")] = weights.pop(key)
    return None


@pytest.mark.parametrize("damage", [rename, strip, add, reshape, prefix])
def test_a_damaged_checkpoint_is_refused(llama, make_perturbed, tmp_path, damage):
    make_perturbed(llama).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    message = damage(weights)
    save_file(weights, path, metadata={"format": "pt"})
    for auto_class in (AutoModel, D3DDrafterModel):
        with pytest.raises(ValueError, match=f"(?s){message}.*nothing was loaded"):
            auto_class.from_pretrained(tmp_path)


def test_a_missing_prefix_loads_right_or_not_at_all(llama, make_perturbed, tmp_path):
    drafter = make_perturbed(llama)
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    without_prefix(weights)
    save_file(weights, path, metadata={"format": "pt"})
    try:
        loaded = AutoModel.from_pretrained(tmp_path)
    except ValueError as error:
        assert "nothing was loaded" in str(error)
    else:
        assert_same_drafter(loaded, drafter)


def test_a_missing_tied_pair_is_refused(make_perturbed, tmp_path):
    make_perturbed(tiny_llama(tie_word_embeddings=True)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.embed_tokens.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="embed_tokens"):
        AutoModel.from_pretrained(tmp_path)


def test_loading_info_on_request(llama, make_perturbed, tmp_path):
    make_perturbed(llama).save_pretrained(tmp_path)
    drafter, info = D3DDrafterModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(drafter, D3DDrafterModel)
    assert not info["missing_keys"]


# Adapter checkpoints


@every_backbone
@pytest.mark.parametrize("base", ["in-memory", "folder", "recorded"])
def test_adapter_round_trip(targets, make_perturbed, tmp_path, name, base):
    target = targets[name]
    target.save_pretrained(tmp_path / "target")
    recorded = {"target_name_or_path": str(tmp_path / "target")} if base == "recorded" else {}
    drafter = make_perturbed(target, 2, **recorded)
    drafter.save_adapter(tmp_path / "drafter")
    base_model = {"in-memory": target, "folder": str(tmp_path / "target"), "recorded": None}[base]
    loaded = AutoModel.from_pretrained(tmp_path / "drafter", base_model=base_model)
    assert_same_drafter(loaded, drafter)
    assert not loaded.training
    assert load_file(tmp_path / "drafter" / ADAPTER_FILE).keys() == drafter.adapter_state_dict().keys()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_adapter_over_some_of_the_layers(make_perturbed, tmp_path, tied):
    target = tiny_llama(tie_word_embeddings=tied, num_hidden_layers=4)
    drafter = make_perturbed(target, 2, layers=[0, 3])
    drafter.save_adapter(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, base_model=target)
    assert_same_drafter(loaded, drafter)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert loaded.get_input_embeddings().weight.data_ptr() != target.get_input_embeddings().weight.data_ptr()


def test_adapters_in_another_dtype(llama, make_perturbed, tmp_path):
    drafter = make_perturbed(llama, 2)
    drafter.save_adapter(tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / ADAPTER_FILE).values()} == {torch.bfloat16}
    loaded = AutoModel.from_pretrained(tmp_path, base_model=llama)
    assert loaded.dtype == torch.float32
    for name, tensor in loaded.adapter_state_dict().items():
        assert torch.equal(tensor, drafter.adapter_state_dict()[name].bfloat16().float()), name


@pytest.fixture
def adapter(llama, make_perturbed, tmp_path):
    make_perturbed(llama, 2).save_adapter(tmp_path)
    return tmp_path


def test_adapter_without_a_base(adapter):
    with pytest.raises(ValueError, match="names no base model; pass `base_model=`"):
        AutoModel.from_pretrained(adapter)


def test_adapter_with_a_base_that_is_not_there(adapter):
    with pytest.raises(ValueError, match="nowhere.*could not be loaded; pass `base_model=`"):
        AutoModel.from_pretrained(adapter, base_model=str(adapter / "nowhere"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"vocab_size": 80}, r"embed_tokens.weight \(64, 32\) against \(80, 32\)", id="other-vocabulary"),
        pytest.param({"intermediate_size": 20}, "of another shape", id="other-width"),
        pytest.param({"num_hidden_layers": 1}, r"missing \['model.layers.1", id="fewer-layers"),
    ],
)
def test_adapter_with_another_base(adapter, settings, message):
    sizes = {"intermediate_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(adapter, base_model=tiny_llama(**sizes | settings))


def drop_one(tensors):
    tensors.pop(next(iter(tensors)))


def rename_one(tensors):
    name = next(iter(tensors))
    tensors[f"base_model.{name}"] = tensors.pop(name)


def reshape_one(tensors):
    tensors["mask_embedding"] = torch.zeros(BLOCK, 32)


@pytest.mark.parametrize("damage", [drop_one, rename_one, reshape_one])
def test_damaged_adapters_are_refused(adapter, llama, damage):
    tensors = load_file(adapter / ADAPTER_FILE)
    damage(tensors)
    save_file(tensors, adapter / ADAPTER_FILE)
    with pytest.raises(ValueError, match=rf"`{ADAPTER_FILE}` does not hold this drafter's adapters.*save_adapter"):
        AutoModel.from_pretrained(adapter, base_model=llama)


def test_a_base_for_a_full_checkpoint_is_refused(llama, make_perturbed, tmp_path):
    make_perturbed(llama, 2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Leave `base_model` out"):
        AutoModel.from_pretrained(tmp_path, base_model=llama)


def test_a_drafter_without_adapters_has_none_to_save(llama, make_perturbed, tmp_path):
    with pytest.raises(ValueError, match="use `save_pretrained`"):
        make_perturbed(llama).save_adapter(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_saved_config_holds_no_path(llama, make_perturbed, tmp_path):
    llama.save_pretrained(tmp_path / "target")
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    drafter = make_perturbed(source, 2)
    drafter.save_pretrained(tmp_path / "full")
    drafter.save_adapter(tmp_path / "adapter")
    AutoModel.from_pretrained(tmp_path / "full").save_pretrained(tmp_path / "again")
    for folder in ("full", "adapter", "again"):
        assert str(tmp_path) not in (tmp_path / folder / "config.json").read_text()
        assert AutoConfig.from_pretrained(tmp_path / folder).target_name_or_path is None


def test_a_backbone_that_cannot_run_a_block_is_refused_when_building(targets, monkeypatch):
    """Some backbones take clean rows, and fail at the first mask rows over a cache."""
    target = copy.deepcopy(targets["llama"])
    forward = type(target.model).forward

    def no_blocks(self, *args, cache=None, **kwargs):
        if cache is not None and cache.get_seq_length() > 0:
            raise TypeError("no cache here")
        return forward(self, *args, cache=cache, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", no_blocks)
    with pytest.raises(ValueError, match="`llama` cannot run a drafter's block .no cache here.*dense decoder-only"):
        D3DDrafterModel.from_causal_lm(target, mask_token_id=63, block_size=4)
