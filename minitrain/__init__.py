"""minitrain: the modern large-model training stack in plain PyTorch, small enough to read in an afternoon."""

from minitrain.errors import InputError
from minitrain.models.checkpoint_hf import load_pretrained, save_pretrained

__all__ = ["InputError", "load_pretrained", "save_pretrained"]
