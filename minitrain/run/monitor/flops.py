"""Count the FLOPs of a training step per token, by our convention and by those of published tables.

Which function to call:
    step_flops        a run of any task: a function from a step's tokens to FLOPs per token
    count_flops       a config that trains on rows, by a convention
    policy_flops      a GRPO config, as step_flops
    flops_per_token   a decoder and a sequence length, by a convention
    training_flops    a video of Wan

Published TFLOP/s are tokens/s times a formula. The formulas disagree on whether causal attention
counts half of all pairs, on what frozen weights save, and on whether padding counts. So the work of a
model is measured once (`Work`), and a convention is a function from it and a sequence length to FLOPs.
To compare tables, convert their tokens/s to FLOPs by `clean`.

In the formulas N is `work.weights`, d L is `work.attention`, S is `work.state` and s is `seq_len`. A
weight costs 2 FLOPs per token in each of three products: output, gradient of the input, gradient of
the weight. Attention has two products per key (scores, values), 4 d L FLOPs, and twice that backward:
12 d L per key. A sliding window limits the number of keys. Of experts, only those that a token
selects count. A Mamba-2 state has two products per element (write, read), for any length: 12 S. That
of gated DeltaNet has three (read by key, write, read by query): 18 D, where D is `work.delta`.

These are model FLOPs: recomputation, norms, rotary embeddings, softmax and the optimizer do not count.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.lora import find_targets
from minitrain.models.moe import Experts
from minitrain.models.router import Router
from minitrain.models.shapes.mixers import state_elements
from minitrain.models.wan import WanConfig
from minitrain.models.zoo import empty_model
from minitrain.settings import TARGETS, Config, Lora
from minitrain.training.mtp_loss import trains_mtp
from minitrain.training.packing import Dataset


@dataclass(frozen=True)
class Work:
    """The work that a model does for one token."""

    # N, matmul weights: all Linears, the selected experts, the head (also if tied), which each depth
    # of multi-token prediction uses again, no embedding
    weights: int
    # d L, heads * head_dim summed over layers: multiply-adds per key, for scores and again for values
    # (the mean, if keys and values have different widths)
    attention: float
    # S, elements of all Mamba-2 states: heads * head_dim * state size, summed over layers
    state: int
    # all parameters of the model, without adapters
    parameters: int
    # LoRA weights, if everything else is frozen; 0 if the whole model is trained
    adapters: int = 0
    # d L of further layers, in which a token attends to `window` keys only
    windowed: float = 0
    window: int = 0
    # weights that score experts
    routers: int = 0
    # D, elements of all states of gated DeltaNets: heads * width of keys * width of values, summed
    delta: int = 0

    def keys(self, seq_len: float) -> float:
        """Return d L times the keys that a token attends to, averaged over a causal sequence.

        These are half of the sequence, or about the window.
        """
        seen = seq_len - unseen_keys(seq_len, self.window)
        return (self.attention * seq_len + self.windowed * seen) / 2


def unseen_keys(length: float, window: float) -> float:
    """Return twice the keys outside of a sliding window, averaged over a causal sequence."""
    return max(length - window, 0) ** 2 / max(length, 1)


Convention = Callable[[Work, float], float]


def clean(work: Work, seq_len: float) -> float:
    """Count only what a step must compute: 6 N + 6 d L s (the causal half) + 12 S + 18 D.

    With LoRA, a frozen weight counts 4 and an adapter's weight 6. Routers count as weights. Gradients
    also flow through frozen weights, so attention's backward pass counts in full. For packed
    documents, seq_len is their `effective_length`.
    """
    weights = work.weights + work.routers
    trained, frozen = (work.adapters, weights) if work.adapters else (weights, 0)
    states = 12 * work.state + 18 * work.delta
    return 6 * trained + 4 * frozen + 12 * work.keys(seq_len) + states


def automodel(work: Work, seq_len: float) -> float:
    """Count as NeMo AutoModel: 6 N + 6 d L s + 6 S.

    With LoRA, (2 + adapters / parameters) / 3 of it, including attention's backward pass. Source:
    NVIDIA-NeMo/Automodel, nemo_automodel/components/utils/flops_utils.py and
    recipes/llm/benchmark.py.
    """
    # it counts routers for hybrid models only
    routers = work.routers if work.state else 0
    full = 6 * (work.weights + routers) + 12 * work.keys(seq_len) + 6 * work.state
    return full * (2 + work.adapters / work.parameters) / 3 if work.adapters else full


def nemo_pretrain(work: Work, seq_len: float) -> float:
    """Count as NeMo 25.04 in pretraining: 6 N + 12 d L s, all pairs despite causal attention.

    Source: NVIDIA/NeMo v2.3.0, nemo/utils/flops_formulas.py. NeMo has halved attention in August
    2025, after the table was published.
    """
    return 6 * work.weights + 12 * work.attention * seq_len


def nemo_squad(work: Work, seq_len: float) -> float:
    """Count as NeMo 25.04 in fine-tuning on packed SQuAD.

    6 N (with LoRA, 4 N) for slots that hold tokens, and 12 d L x 208 for attention. seq_len: slots of
    a pack, all of which count in the table's tokens/s. No source states this formula: its form is
    that of NVIDIA-NeMo/Megatron-Bridge, flop_utils.py, and two numbers are fitted to the table (17
    empty slots per pack, documents of an effective length of 208). Raises InputError for packs that
    are shorter than such a document.
    """
    empty = 17
    document = 208
    if seq_len < empty + document:
        raise InputError(
            f"seq_len={seq_len} is too short for packed SQuAD (use at least {empty + document})"
        )
    per_weight = 4 if work.adapters else 6
    return per_weight * work.weights * (1 - empty / seq_len) + 12 * work.attention * document


def count_work(config: DecoderConfig, adapters: int = 0) -> Work:
    """Return the work of a decoder, from its modules on the meta device.

    adapters: see `lora_weights`.
    """
    model = empty_model(config)
    weights = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    heads = config.num_nextn_predict_layers + config.tie_word_embeddings
    weights += heads * model.head_weight.numel()
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    stacks = sum(p.numel() for module in experts for p in module.parameters() if p.ndim == 3)
    if experts:
        weights += stacks * config.num_experts_per_tok // config.num_experts
    mixers = [config.parts(layer)[0] for layer in config.all_layers]
    windowed = sum(
        mixer == "attention" and config.windowed(layer) for layer, mixer in enumerate(mixers)
    )
    width = config.head_dim
    # keys and values of different widths: count their mean
    if config.kv_lora_rank:
        width = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    width *= config.num_attention_heads
    return Work(
        weights=weights,
        attention=(mixers.count("attention") - windowed) * width,
        windowed=windowed * width,
        window=config.sliding_window,
        routers=sum(
            module.weight.numel() for module in model.modules() if isinstance(module, Router)
        ),
        state=mixers.count("mamba") * state_elements(config.mamba),
        delta=mixers.count("delta") * state_elements(config.delta),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        adapters=adapters,
    )


def lora_weights(config: DecoderConfig, rank: int, targets: Iterable[str] = TARGETS) -> int:
    """Return the number of LoRA weights (Hu et al. 2021) that are applied to a token.

    These are rank * (inputs + outputs) of each target; of experts, only those that a token selects.
    """
    total = 0
    for module, name in find_targets(empty_model(config), targets).values():
        *experts, outputs, inputs = getattr(module, name).shape
        total += rank * (outputs + inputs) * (config.num_experts_per_tok if experts else 1)
    return total


def effective_length(documents: Iterable[int]) -> float:
    """Return the length of one sequence that has as many pairs per token as these packed documents.

    It is sum n^2 / sum n.
    """
    lengths = list(documents)
    return sum(n * n for n in lengths) / sum(lengths)


def flops_per_token(
    config: DecoderConfig, seq_len: float, convention: Convention, adapters: int = 0
) -> float:
    """Return the FLOPs per token of a training step, forward and backward.

    seq_len: tokens per sequence; for `nemo_squad`, slots per pack. adapters: see `lora_weights`.
    """
    return convention(count_work(config, adapters), seq_len)


def count_flops(config: Config, convention: Convention, visible: float = 1.0) -> float:
    """Return the FLOPs per token of a training step.

    visible: see `visible_share`; conventions of tables ignore it. Diffusion has a single convention.
    """
    shape = config.model.config
    batch = config.batch
    if isinstance(shape, WanConfig):
        return (
            training_flops(shape, batch.seq_len, config.data.text_tokens, config.lora)
            / batch.seq_len
        )
    seen = batch.seq_len * visible if convention is clean else batch.seq_len
    return flops_per_token(trained_shape(config), seen, convention, adapter_weights(config))


def trained_shape(config: Config) -> DecoderConfig:
    """Return the model that a training step runs: multi-token prediction only where it is trained."""
    shape = config.model.config
    return shape if trains_mtp(config) else replace(shape, num_nextn_predict_layers=0)


def adapter_weights(config: Config) -> int:
    """Return the LoRA weights of a config, 0 without adapters."""
    lora = config.lora
    return lora_weights(trained_shape(config), lora.rank, lora.targets) if lora else 0


def policy_flops(config: Config) -> Callable[[int], float]:
    """Return a function from the tokens of a GRPO step to its FLOPs per token.

    It counts training, sampling, and a forward pass for each set of log-probabilities.
    """
    grpo = config.grpo
    responses = grpo.prompts * grpo.group
    work = count_work(replace(config.model.config, num_nextn_predict_layers=0))
    trained = replace(count_work(trained_shape(config)), adapters=adapter_weights(config))
    forward_passes = 1 + (responses > config.batch.global_) + (grpo.kl > 0)

    def per_token(tokens: int) -> float:
        length = tokens // responses
        return clean(trained, length) + clean(work, length) * (forward_passes / 3)

    return per_token


def step_flops(config: Config, dataset: Dataset | None) -> Callable[[int], float]:
    """Return a function from the tokens of a step to its FLOPs per token (for videos, per patch).

    dataset: its first row shows how documents are packed; None for GRPO.
    """
    if config.task == "grpo":
        return policy_flops(config)
    if isinstance(config.model.config, WanConfig):
        return video_flops(config, len(dataset.row(0)["text"]))
    flops = count_flops(config, clean, visible_share(dataset))
    return lambda tokens: flops


def video_flops(config: Config, text_tokens: int) -> Callable[[int], float]:
    """Return a function from the patches of a step to its FLOPs per patch.

    All videos of a step are counted as being of the mean size.
    """

    def per_patch(patches: int) -> float:
        mean = patches / config.batch.global_
        return training_flops(config.model.config, mean, text_tokens, config.lora) / mean

    return per_patch


def visible_share(dataset: Dataset) -> float:
    """Return the share of the first row's causal pairs whose tokens are in the same document."""
    row = dataset.row(0)
    if "document_ids" not in row:
        return 1.0
    ids = row["document_ids"].tolist()
    return effective_length(Counter(ids).values()) / len(ids)


# --- Wan

# These functions count as Megatron-Bridge does: three times the matrix products of a forward pass.
# Attention counts all pairs, since it is not causal. With adapters, which Megatron-Bridge lacks, they
# count what torch computes. Published rows of Wan give TFLOP/s only; these FLOPs convert them to
# seconds. Source: NVIDIA-NeMo/Megatron-Bridge,
# src/megatron/bridge/diffusion/models/wan/wan_provider.py (pull request 5249).


def forward_parts(config: WanConfig, tokens: float, text_tokens: int) -> dict[str, float]:
    """Count the FLOPs of a forward pass of one video of `tokens` patches and its text.

    The timestep's embedding is left out, as in Megatron-Bridge.
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
    config: WanConfig, tokens: float, text_tokens: int = 512, lora: Lora | None = None
) -> float:
    """Count the FLOPs of one video, forward and backward.

    lora: frozen weights have two products, because their gradients are not computed; and only one if
    their input (patches, text) needs no gradient either. Attention's backward pass counts in full, as
    its kernels compute it.
    """
    parts = forward_parts(config, tokens, text_tokens)
    if lora is None:
        return 3 * sum(parts.values())
    adapters = adapter_flops(config, lora, tokens, text_tokens)
    return (
        3 * parts["attention"] + parts["patches"] + parts["text"] + 2 * parts["others"] + adapters
    )


def adapter_flops(config: WanConfig, lora: Lora, tokens: float, text_tokens: int) -> float:
    """Count the FLOPs of all adapters A [rank, inputs], B [outputs, rank], forward and backward."""
    total = 0
    model = empty_model(config)
    for path, (module, name) in find_targets(model, lora.targets).items():
        outputs, inputs = getattr(module, name).shape
        of_text = path.endswith(("attn2.to_k", "attn2.to_v"))
        # the text itself needs no gradient
        per_token = lora.rank * ((4 if of_text else 6) * inputs + 6 * outputs)
        total += per_token * (text_tokens if of_text else tokens)
    return total
