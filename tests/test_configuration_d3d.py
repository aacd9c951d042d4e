"""The drafter's configuration, what it refuses, and the choice of the mask token."""

import json
import re

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, T5Config

from transformers_d3d import D3DDrafterConfig, choose_mask_token
from transformers_d3d.configuration_d3d import check_backbone, denoising_parts

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
RECURRENT = [
    "Qwen3NextConfig",
    "Qwen3_5TextConfig",
    "MambaConfig",
    "Mamba2Config",
    "FalconMambaConfig",
    "JambaConfig",
    "BambaConfig",
    "Zamba2Config",
    "FalconH1Config",
    "NemotronHConfig",
    "RecurrentGemmaConfig",
    "RwkvConfig",
    "xLSTMConfig",
    "MiniMaxConfig",
    "Llama4TextConfig",
]


def backbone(**settings):
    return LlamaConfig(**SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | settings)


def config(text_config=None, **settings):
    return D3DDrafterConfig(text_config=text_config or backbone(), **{"mask_token_id": 63} | settings)


SETTINGS = {
    "block_size": 5,
    "block_attention": "bidirectional",
    "target_name_or_path": "org/target",
    "kept_layers": [0, 1, 3, 7],
    "pruning": [{"layer": 5, "retained": 0.99}],
    "mask_adapter_rank": 2,
    "mask_adapter_scale": 0.5,
    "head_bias": True,
    "context_window": 100,
    "overlap": "thread",
    "num_successors": 5,
    "outcome_selection": "fan_out",
    "overlap_threads": 2,
    "num_denoising_steps": 3,
}
BACKBONES = {
    "llama": backbone(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}, eos_token_id=[2, 3]),
    "tied": backbone(tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, head_dim=16
    ),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_round_trip(name, tmp_path):
    saved = config(BACKBONES[name], **SETTINGS)
    saved.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is D3DDrafterConfig
    assert type(loaded.text_config) is type(saved.text_config)
    for key, value in SETTINGS.items():
        assert getattr(loaded, key) == value
    ours, theirs = loaded.to_dict(), saved.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        for dictionary in (ours, theirs, ours["text_config"], theirs["text_config"]):
            dictionary.pop(volatile, None)
    assert ours == theirs


def test_what_generate_reads_comes_from_the_backbone():
    built = config(BACKBONES["tied"])
    assert built.vocab_size == built.get_text_config().vocab_size == 64
    assert (built.pad_token_id, built.bos_token_id, built.eos_token_id) == (0, 1, 2)
    assert built.tie_word_embeddings
    assert not config().tie_word_embeddings


def test_the_backbone_as_a_dict():
    assert config(backbone().to_dict()).text_config.to_dict() == backbone().to_dict()
    with pytest.raises(ValueError, match="model_type"):
        config(SIZES)


@pytest.mark.parametrize("text_config", [None, backbone()], ids=["without-backbone", "with-backbone"])
def test_saved_file_holds_nothing_of_this_machine(tmp_path, text_config):
    built = config(text_config, target_name_or_path="org/target")
    built.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    strings = re.findall(r'"([^"]*)"', (tmp_path / "config.json").read_text())
    assert not [s for s in strings if s.startswith(("/", "~")) or str(tmp_path) in s]
    assert set(saved["auto_map"]) <= {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert all(saved["auto_map"].values())
    assert saved["model_type"] == "d3d_drafter"
    assert saved["text_config"]["model_type"] == "llama"
    for field in ("block_size", "mask_token_id", "block_attention"):
        assert saved[field] is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"mask_token_id": None}, r"`mask_token_id` is missing.*\[0, 64\)", id="no-mask"),
        pytest.param({"mask_token_id": 64}, r"64, outside the vocabulary \[0, 64\)", id="mask-too-large"),
        pytest.param({"mask_token_id": -1}, r"-1, outside the vocabulary", id="mask-negative"),
        pytest.param({"mask_token_id": 2}, "end-of-sequence", id="mask-is-eos"),
        pytest.param(
            {"mask_token_id": 3, "text_config": BACKBONES["llama"]},
            r"end-of-sequence.*\[2, 3\]",
            id="mask-in-eos-list",
        ),
        pytest.param({"block_size": 1}, "`block_size` is 1; it must be at least 2", id="block-size-1"),
        pytest.param({"block_attention": "full"}, "block_attention", id="block-attention"),
        pytest.param({"mask_adapter_rank": -1}, "`mask_adapter_rank` is -1", id="negative-rank"),
        pytest.param({"context_window": 0}, "`context_window` is 0", id="window-0"),
        pytest.param({"overlap": "fork"}, "overlap.*thread", id="overlap"),
        pytest.param({"outcome_selection": "best"}, "outcome_selection.*fan_out", id="outcome-selection"),
        pytest.param({"num_successors": -1}, "`num_successors` is -1", id="negative-successors"),
        pytest.param({"overlap_threads": 0}, "`overlap_threads` is 0", id="no-threads"),
        pytest.param({"num_denoising_steps": 0}, "`num_denoising_steps` is 0; .*between 1 and", id="no-steps"),
        pytest.param({"num_denoising_steps": 8}, "`num_denoising_steps` is 8; .*here 7", id="too-many-steps"),
        pytest.param({"text_config": T5Config()}, "`t5` is an encoder-decoder model.*Llama", id="encoder-decoder"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(StrictDataclassError, match=f"(?s){message}"):
        config(**settings)


@pytest.mark.parametrize(
    ("block_size", "parts"),
    [
        (2, [[1]]),
        (4, [[3], [1, 3], [1, 2, 3]]),
        (8, [[7], [3, 7], [2, 4, 7], [1, 3, 5, 7], [1, 2, 4, 5, 7], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_denoising_parts_by_hand(block_size, parts):
    assert [denoising_parts(block_size, steps) for steps in range(1, block_size)] == parts


@pytest.mark.parametrize("name", RECURRENT)
def test_backbones_with_a_state_are_refused_by_name(name):
    text_config = getattr(transformers, name)()
    with pytest.raises(ValueError, match=f"`{text_config.model_type}`.*build the drafter from a dense decoder-only"):
        check_backbone(text_config)
    with pytest.raises(StrictDataclassError, match=f"`{text_config.model_type}`"):
        config(text_config)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaConfig",
        "Qwen2Config",
        "Qwen3Config",
        "GemmaConfig",
        "Gemma2Config",
        "Gemma3TextConfig",
        "MistralConfig",
        "Phi3Config",
        "SmolLM3Config",
        "GraniteConfig",
        "CohereConfig",
        "Olmo2Config",
        "MixtralConfig",
    ],
)
def test_dense_backbones_pass(name):
    check_backbone(getattr(transformers, name)())


class TestChooseMaskToken:
    def test_padding_rows_beyond_the_tokenizer(self, tokenizer):
        number, why = choose_mask_token(tokenizer, len(tokenizer) + 6)
        assert number == len(tokenizer)
        assert "6 padding rows" in why

    def test_its_own_mask_token(self, tokenizer):
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        number, why = choose_mask_token(tokenizer, len(tokenizer) + 6)
        assert number == tokenizer.mask_token_id
        assert "<mask>" in why

    def test_a_reserved_token(self, tokenizer):
        number, why = choose_mask_token(tokenizer, len(tokenizer))
        assert number == tokenizer.convert_tokens_to_ids("<|reserved|>")
        assert "<|reserved|>" in why

    def test_names_that_promise_no_use_go_first(self, tokenizer):
        tokenizer.chat_template = "{{ '<|reserved|>' }}"
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|tool|>", "<|unused_1|>", "<|other|>"]})
        assert choose_mask_token(tokenizer, len(tokenizer))[0] == tokenizer.convert_tokens_to_ids("<|unused_1|>")

    def test_tokens_of_the_chat_template_are_not_free(self, tokenizer):
        tokenizer.chat_template = "{{ '<|reserved|>' }}"
        with pytest.raises(ValueError, match="add_special_tokens"):
            choose_mask_token(tokenizer, len(tokenizer))

    def test_a_tokenizer_without_a_chat_template(self, tokenizer):
        tokenizer.chat_template = None
        assert choose_mask_token(tokenizer, len(tokenizer))[0] == tokenizer.convert_tokens_to_ids("<|reserved|>")

    def test_several_chat_templates(self, tokenizer):
        tokenizer.chat_template = {"default": "plain", "tools": "{{ '<|reserved|>' }}"}
        with pytest.raises(ValueError, match="free"):
            choose_mask_token(tokenizer, len(tokenizer))

    @pytest.mark.parametrize("token", ["a", " ", "0"])
    def test_ordinary_tokens_are_refused(self, tokenizer, token):
        with pytest.raises(ValueError, match=f"{token!r}, which the tokenizer can emit in text"):
            choose_mask_token(tokenizer, len(tokenizer), tokenizer.convert_tokens_to_ids(token))

    @pytest.mark.parametrize("token", ["<s>", "</s>", "<pad>"])
    def test_tokens_with_a_role_are_refused(self, tokenizer, token):
        with pytest.raises(ValueError, match="another special token"):
            choose_mask_token(tokenizer, len(tokenizer), tokenizer.convert_tokens_to_ids(token))

    @pytest.mark.parametrize("offset", [-1, 0, 5], ids=["reserved", "first-padding-row", "last-padding-row"])
    def test_a_free_id_is_taken(self, tokenizer, offset):
        number = len(tokenizer) + offset
        assert choose_mask_token(tokenizer, len(tokenizer) + 6, number)[0] == number
