"""D3D drafters for speculative decoding in Hugging Face Transformers.

drafter = AutoModel.from_pretrained("org/d3d-qwen3-8b")
target.generate(**inputs, assistant_model=drafter)
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache_d3d import RollbackCache
from .configuration_d3d import D3DDrafterConfig, choose_mask_token
from .generation_d3d import D3DCandidateGenerator, DraftReport, install_seam, remove_seam
from .modeling_d3d import D3DDrafterModel

__version__ = "0.1.0"
AutoConfig.register(D3DDrafterConfig.model_type, D3DDrafterConfig, exist_ok=True)
AutoModel.register(D3DDrafterConfig, D3DDrafterModel, exist_ok=True)
AutoModelForCausalLM.register(D3DDrafterConfig, D3DDrafterModel, exist_ok=True)

# Remote code: these write `auto_map` and copy the files when a drafter is saved.
D3DDrafterConfig.register_for_auto_class()
D3DDrafterModel.register_for_auto_class("AutoModel")

__all__ = [
    "D3DCandidateGenerator",
    "D3DDrafterConfig",
    "D3DDrafterModel",
    "DraftReport",
    "RollbackCache",
    "choose_mask_token",
    "install_seam",
    "remove_seam",
]
