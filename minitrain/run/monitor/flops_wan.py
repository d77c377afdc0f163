"""FLOPs of a training step of Wan, as Megatron-Bridge counts them; with adapters, which it has not,
what torch does.

Three times the forward pass's matrix products; attention counts in full, since every token sees
every token, and recomputed activations not at all. The published rows give TFLOP/s alone; these
FLOPs make seconds per step of them.
Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/diffusion/models/wan/wan_provider.py (pull
request 5249).
"""

import math

from minitrain.models.lora import find_targets
from minitrain.models.wan import WanConfig
from minitrain.models.zoo import empty_model
from minitrain.settings import Lora


def forward_parts(config: WanConfig, tokens: int, text_tokens: int) -> dict[str, int]:
    """Count the FLOPs of one video of `tokens` patches and its text.

    The timestep's embedding is left out, as there.
    """
    d = config.dim
    layers = config.num_layers
    patch = math.prod(config.patch_size)
    return {
        "attention": layers * 4 * tokens * (tokens + text_tokens) * d,
        "patches": 2 * tokens * d * patch * config.in_channels,
        "text": text_tokens * (layers * 4 * d**2 + 2 * (config.text_dim * d + d**2)),
        "others": layers * tokens * (12 * d**2 + 4 * d * config.ffn_dim)
        + 2 * tokens * d * patch * config.out_channels,
    }


def training_flops(
    config: WanConfig, tokens: int, text_tokens: int = 512, lora: Lora | None = None
) -> int:
    """Count the FLOPs of one video, forward and backward; per token, divide by `tokens`.

    lora: a frozen weight has two products, as its own gradient is not computed; and one where what
    it multiplies, the patches and the text, needs no gradient either. Attention's backward pass
    counts whole, as its kernels compute it.
    """
    parts = forward_parts(config, tokens, text_tokens)
    if lora is None:
        return 3 * sum(parts.values())
    adapters = adapter_flops(config, lora, tokens, text_tokens)
    return (
        3 * parts["attention"] + parts["patches"] + parts["text"] + 2 * parts["others"] + adapters
    )


def adapter_flops(config: WanConfig, lora: Lora, tokens: int, text_tokens: int) -> int:
    """Count the FLOPs of all adapters, A [rank, inputs] and B [outputs, rank], forward and backward."""
    total = 0
    model = empty_model(config)
    for path, (module, name) in find_targets(model, lora.targets).items():
        outputs, inputs = getattr(module, name).shape
        of_text = path.endswith(("attn2.to_k", "attn2.to_v"))
        total += (
            lora.rank
            * ((4 if of_text else 6) * inputs + 6 * outputs)
            * (text_tokens if of_text else tokens)
        )
    return total
