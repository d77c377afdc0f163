"""What a decoding step reads at least, and so what bounds its speed: see `bytes_read`."""

from dataclasses import dataclass

from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.zoo import empty_model


@dataclass
class Reads:
    """Bytes of a model: the weights that every token needs; one expert, over all layers; a token in
    the cache of one layer, of whose `heads` tensor-parallel ranks can have different ones; a
    sample's states of Mamba-2."""

    shared: float
    expert: float
    token: float
    heads: int
    states: float = 0.0


def model_reads(config: DecoderConfig, itemsize: int = 2) -> Reads:
    """itemsize: bytes of an element; scans' states are in fp32. Of an embedding a step reads rows
    only.
    """
    weights = dict(empty_model(config).named_parameters())
    looked_up = ["model.embed_positions.weight"]
    if not config.tie_word_embeddings:
        looked_up.append("model.embed_tokens.weight")
    experts = sum(p.numel() for name, p in weights.items() if ".experts." in name)
    shared = sum(p.numel() for name, p in weights.items() if name not in looked_up) - experts
    heads = config.num_key_value_heads
    width = 2 * config.num_key_value_heads * config.head_dim
    if config.kv_lora_rank:
        heads = 1
        width = config.kv_lora_rank + config.qk_rope_head_dim
    mixers = [config.parts(layer)[0] for layer in range(config.num_layers)]
    mamba = config.mamba
    states = 4 * mamba.width * mamba.state + itemsize * (mamba.conv - 1) * sum(mamba.convolved)
    return Reads(
        itemsize * shared,
        itemsize * experts / max(1, config.num_experts),
        itemsize * width,
        heads,
        states * mixers.count("mamba"),
    )


def bytes_read(
    reads: Reads, config: DecoderConfig, samples: float, context: float, tp: int = 1
) -> tuple[float, float]:
    """Of weights, and of caches, by each of `tp` ranks, for one more token of each sample.

    Weights are read once for all samples; of experts those that some token has chosen, if each
    chooses at random. Of its own cache a sample reads `context` tokens, or a window; its states are
    read and written.
    """
    touched = 0.0
    if config.num_experts:
        touched = config.num_experts * (
            1 - (1 - config.num_experts_per_tok / config.num_experts) ** samples
        )
    attention = [
        layer for layer in range(config.num_layers) if config.parts(layer)[0] == "attention"
    ]
    tokens = sum(
        min(context, config.sliding_window) if config.windowed(layer) else context
        for layer in attention
    )
    caches = samples * (tokens * reads.token / min(tp, reads.heads) + 2 * reads.states / tp)
    return (reads.shared + touched * reads.expert) / tp, caches
