"""minitrain: the modern large-model training stack in plain PyTorch, small enough to read in an afternoon."""

from minitrain.errors import InputError
from minitrain.models.checkpoint_hf import load_pretrained, save_pretrained
from minitrain.models.checkpoint_peft import load_adapter
from minitrain.models.lora import merge_adapters
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import Completion, SamplingParams

__all__ = ["Completion", "InputError", "Sampler", "SamplingParams", "load_adapter", "load_pretrained",
           "merge_adapters", "save_pretrained"]  # fmt: skip
