"""FLOPs of a training step of Wan, as Megatron-Bridge counts them.

Three times the forward pass's matrix products; attention counts in full, since every token sees every token, and
recomputed activations not at all. The published rows give TFLOP/s alone; these FLOPs make seconds per step of them.
Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/diffusion/models/wan/wan_provider.py (pull request 5249).
"""

from minitrain.models.wan import WanConfig


def forward_flops(config: WanConfig, tokens: int, text_tokens: int = 512) -> int:
    """Of one video of `tokens` patches, and its text. The timestep's embedding is left out, as there."""
    d, layers, text_dim = config.dim, config.num_layers, config.text_dim
    frames, rows, columns = config.patch_size
    patch = frames * rows * columns
    self_attention = 8 * tokens * d**2 + 4 * tokens**2 * d
    cross_attention = 4 * tokens * d**2 + 4 * text_tokens * d**2 + 4 * tokens * text_tokens * d
    mlp = 4 * tokens * d * config.ffn_dim
    ends = 2 * tokens * d * patch * (config.in_channels + config.out_channels)
    return layers * (self_attention + cross_attention + mlp) + ends + 2 * text_tokens * (text_dim * d + d**2)


def training_flops(config: WanConfig, tokens: int, text_tokens: int = 512) -> int:
    """Of one video, forward and backward; per token, divide by `tokens`."""
    return 3 * forward_flops(config, tokens, text_tokens)
