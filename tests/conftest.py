"""Tiny targets from configurations, a drafter whose adapters matter, and a tokenizer: all in memory."""

import copy
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from transformers_d3d import D3DDrafterModel

logging.disable_progress_bar()
torch.set_num_threads(1)

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
BACKBONES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 5, "layer_types": MIXED}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
}


def tiny(model_class, config_class, **settings):
    """A random model of three layers. The wide initialisation keeps its greedy output from repeating one token."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    return model_class(config_class(**sizes | settings)).eval()


@pytest.fixture(scope="session")
def targets():
    """Tiny targets by backbone name. Tests that change one take a `deepcopy`."""
    return {name: tiny(*classes, **settings) for name, (*classes, settings) in BACKBONES.items()}


@pytest.fixture(scope="session")
def successor():
    """A target whose greedy continuation counts up, with margins so wide that no arithmetic flips a token."""
    target = tiny(LlamaForCausalLM, LlamaConfig, hidden_size=64, head_dim=16)
    with torch.no_grad():
        target.model.embed_tokens.weight.copy_(torch.eye(64) * 8)
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-2)
            layer.mlp.down_proj.weight.mul_(1e-2)
        target.lm_head.weight.copy_(torch.eye(64).roll(1, dims=0) * 8)
    return target


@pytest.fixture(scope="session")
def make_perturbed():
    """Builds drafters whose adapters, if any, are random instead of zero, so that they matter."""

    def make(target, mask_adapter_rank=0, **settings):
        settings = {"mask_token_id": 63, "block_size": 4} | settings
        drafter = D3DDrafterModel.from_causal_lm(target, mask_adapter_rank=mask_adapter_rank, **settings)
        torch.manual_seed(1)
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name or name == "mask_embedding":
                nn.init.normal_(parameter, std=0.3)
        return drafter

    return make


@pytest.fixture(scope="session")
def base_tokenizer():
    letters = " 0123456" + string.ascii_letters
    vocabulary = ["<pad>", "<s>", "</s>", *letters, "<|reserved|>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|reserved|>"],
    )
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture
def tokenizer(base_tokenizer):
    """A tokenizer of 64 tokens, a letter each, one of them reserved, with a chat template."""
    return copy.deepcopy(base_tokenizer)


@pytest.fixture
def pair_folders(targets, make_perturbed, tokenizer, tmp_path):
    """Folders of a tiny target with a tokenizer, and of adapters over it: `target` and `drafter`."""
    targets["llama"].save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_perturbed(targets["llama"], 4).save_adapter(tmp_path / "drafter")
    return {"target": str(tmp_path / "target"), "drafter": str(tmp_path / "drafter")}
