"""Count the bytes that a decoding step must read; they bound its speed."""

from dataclasses import dataclass, replace

from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.shapes.mixers import state_bytes
from minitrain.models.zoo import empty_model


@dataclass
class Reads:
    """Sizes in bytes of what a decoding step reads of a model and its caches."""

    # weights that every token uses
    shared: float
    # one expert's weights, summed over all layers
    expert: float
    # one token's entry in the KV cache of one layer
    token: float
    # number of key-value heads: more tensor-parallel ranks than these repeat heads
    heads: int
    # one sample's states of recurrent layers
    states: float = 0.0


def model_reads(config: DecoderConfig, itemsize: int = 2) -> Reads:
    """Return the sizes of a model, without its embeddings: a step reads only a few of their rows.

    Layers of multi-token prediction, which a step does not run, do not count.

    itemsize: bytes per element of weights and caches. The scans' states are fp32 regardless.
    """
    config = replace(config, num_nextn_predict_layers=0)
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
    states = sum(
        state_bytes(shape, itemsize)
        for shape in map(config.recurrence, range(config.num_layers))
        if shape
    )
    return Reads(
        itemsize * shared,
        itemsize * experts / max(1, config.num_experts),
        itemsize * width,
        heads,
        states,
    )


def bytes_read(
    reads: Reads,
    config: DecoderConfig,
    samples: float,
    context: float,
    tp: int = 1,
    together: int = 1,
) -> tuple[float, float]:
    """Return bytes of weights, and of caches, that each of `tp` ranks reads in one decoding step.

    Weights are read once for all samples. Only experts that at least one token selected are read;
    their number is the expected one if tokens select at random. Each sample reads `context` tokens
    of its own cache, or its sliding window, and reads and writes its recurrent states.
    together: the tokens of a sample that the step computes, one and its drafts.
    """
    touched = 0.0
    if config.num_experts:
        missed = (1 - config.num_experts_per_tok / config.num_experts) ** (samples * together)
        touched = config.num_experts * (1 - missed)
    tokens = 0.0
    for layer in range(config.num_layers):
        if config.parts(layer)[0] == "attention":
            window = config.sliding_window if config.windowed(layer) else context
            tokens += min(context, window)
    caches = samples * (tokens * reads.token / min(tp, reads.heads) + 2 * reads.states / tp)
    return (reads.shared + touched * reads.expert) / tp, caches
