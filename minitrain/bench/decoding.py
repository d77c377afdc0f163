"""Bytes that a decoding step reads at least, and that bound its speed: see `bytes_read`."""

from dataclasses import dataclass

from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.zoo import empty_model


@dataclass
class Reads:
    """Bytes of a model.

    shared: the weights that every token needs. expert: one expert, over all layers.
    token: a token in the cache of one layer, of whose `heads` tensor-parallel ranks can have
    different ones. states: a sample's, of Mamba-2.
    """

    shared: float
    expert: float
    token: float
    heads: int
    states: float = 0.0


def model_reads(config: DecoderConfig, itemsize: int = 2) -> Reads:
    """Return the bytes of a model, without embeddings, of which a step reads rows only.

    itemsize: bytes of an element; scans' states are in fp32.
    """
    looked_up = ["model.embed_positions.weight"]
    if not config.tie_word_embeddings:
        looked_up.append("model.embed_tokens.weight")
    experts = 0
    shared = 0
    for name, parameter in empty_model(config).named_parameters():
        if ".experts." in name:
            experts += parameter.numel()
        elif name not in looked_up:
            shared += parameter.numel()
    heads = config.num_key_value_heads
    width = 2 * heads * config.head_dim
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
    """Return bytes of weights and of caches that each of `tp` ranks reads for one more token.

    Weights are read once for all samples; of experts those that some token has chosen, if each
    chooses at random. Of its own cache a sample reads `context` tokens, or a window; its states are
    read and written.
    """
    touched = 0.0
    if config.num_experts:
        missed = (1 - config.num_experts_per_tok / config.num_experts) ** samples
        touched = config.num_experts * (1 - missed)
    tokens = 0.0
    for layer in range(config.num_layers):
        if config.parts(layer)[0] == "attention":
            window = config.sliding_window if config.windowed(layer) else context
            tokens += min(context, window)
    caches = samples * (tokens * reads.token / min(tp, reads.heads) + 2 * reads.states / tp)
    return (reads.shared + touched * reads.expert) / tp, caches
