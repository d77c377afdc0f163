"""Count the FLOPs of a training step per token: cleanly, and as each published table does.

Published TFLOP/s are tokens/s times a formula, and the formulas disagree: on whether causal
attention costs half of its square, on what a frozen weight saves, on whether padding counts. So a
model is measured once (`Work`), and a convention is a function from that and a sequence length to
FLOPs. To compare tables, turn their tokens/s into `clean` FLOPs.

In the formulas N is `work.weights`, d L is `work.attention`, S is `work.state` and s is `seq_len`.
A weight costs a token 2 FLOPs in each of three products: output, gradient of the input, gradient of
the weight. Attention has two products per key (scores, values), hence 4 d L FLOPs forward and twice
that backward: 12 d L per key; with a window, there are fewer keys. Of the experts only those count
that a token goes to. A Mamba-2 state has two products per element whatever the length (what a token
adds, what it reads): 12 S.

These are model FLOPs: recomputed activations, norms, rotary embeddings, softmax and the optimizer
do not count.
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
from minitrain.models.wan import WanConfig
from minitrain.models.zoo import empty_model
from minitrain.settings import TARGETS, Config, Lora
from minitrain.training.packing import Dataset


@dataclass(frozen=True)
class Work:
    """The work that a model does for one token.

    weights: N, the matmul weights: every nn.Linear, the chosen experts, the output head (tied or
        not), which each depth of multi-token prediction uses again, no embedding.
    attention: d L, heads * head_dim summed over the layers: multiply-adds per key, for scores and
        again for values (where keys and values have different widths, their mean).
    windowed: d L of further layers, in which a token sees only `window` keys.
    routers: the weights that score experts.
    state: S, the elements of all Mamba-2 states: heads * head_dim * state size, summed over the
        layers.
    parameters: all of the model's, without adapters.
    adapters: LoRA weights, all else being frozen; 0 if the whole model is trained.
    """

    weights: int
    attention: float
    state: int
    parameters: int
    adapters: int = 0
    windowed: float = 0
    window: int = 0
    routers: int = 0

    def keys(self, seq_len: float) -> float:
        """Return d L times the keys that a token sees, on average over a causal sequence.

        They are half of the sequence, or about the window.
        """
        # by the later tokens, per token, twice
        unseen = max(seq_len - self.window, 0) ** 2 / max(seq_len, 1)
        return (self.attention * seq_len + self.windowed * (seq_len - unseen)) / 2


Convention = Callable[[Work, float], float]


def clean(work: Work, seq_len: float) -> float:
    """Count what a step has to compute: 6 N + 6 d L s, the causal half, + 12 S.

    With LoRA it is 4 per frozen weight, 6 per adapter's. Routers count as weights. Frozen weights
    still pass gradients on to their inputs, so attention's backward is whole. For packed documents,
    seq_len is their `effective_length`.
    """
    weights = work.weights + work.routers
    trained, frozen = (work.adapters, weights) if work.adapters else (weights, 0)
    return 6 * trained + 4 * frozen + 12 * work.keys(seq_len) + 12 * work.state


def automodel(work: Work, seq_len: float) -> float:
    """Count as NeMo AutoModel: 6 N + 6 d L s + 6 S.

    With LoRA, (2 + adapters / parameters) / 3 of it, attention's backward included. Source:
    NVIDIA-NeMo/Automodel, nemo_automodel/components/utils/flops_utils.py and
    recipes/llm/benchmark.py.
    """
    # counted for hybrid models only
    routers = work.routers if work.state else 0
    full = 6 * (work.weights + routers) + 12 * work.keys(seq_len) + 6 * work.state
    return full * (2 + work.adapters / work.parameters) / 3 if work.adapters else full


def nemo_pretrain(work: Work, seq_len: float) -> float:
    """Count as NeMo 25.04 in pretraining: 6 N + 12 d L s, the full square despite causal attention.

    Source: NVIDIA/NeMo v2.3.0, nemo/utils/flops_formulas.py; it was halved there in August 2025,
    after the table.
    """
    return 6 * work.weights + 12 * work.attention * seq_len


def nemo_squad(work: Work, seq_len: float) -> float:
    """Count as NeMo 25.04 in fine-tuning on packed SQuAD.

    That is 6 N (LoRA: 4 N) for slots that hold tokens, and 12 d L x 208 for attention.
    seq_len: slots of a pack, all of which the table's tokens/s counts. No source states this
    formula. Its shape is that of NVIDIA-NeMo/Megatron-Bridge, flop_utils.py; 17 empty slots a pack
    and documents of an effective 208 tokens are fitted to the table. Raises InputError for packs
    that could not hold one such document.
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
    """Measure the model of `config`, built without memory on the meta device.

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
    # where keys and values differ, their mean
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
        state=mixers.count("mamba") * config.mamba.width * config.ssm_state_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        adapters=adapters,
    )


def lora_weights(config: DecoderConfig, rank: int, targets: Iterable[str] = TARGETS) -> int:
    """Count the weights of LoRA adapters (Hu et al. 2021) that a token meets.

    They are rank * (inputs + outputs) of each matrix that `targets` name; in stacks of experts, of
    those that the token goes to.
    """
    total = 0
    for module, name in find_targets(empty_model(config), targets).values():
        *experts, outputs, inputs = getattr(module, name).shape
        total += rank * (outputs + inputs) * (config.num_experts_per_tok if experts else 1)
    return total


def effective_length(documents: Iterable[int]) -> float:
    """Return the sequence length at which attention costs a token as much as in these documents.

    They are packed; it is sum n^2 / sum n.
    """
    lengths = list(documents)
    return sum(n * n for n in lengths) / sum(lengths)


def flops_per_token(
    config: DecoderConfig, seq_len: float, convention: Convention, adapters: int = 0
) -> float:
    """Return the FLOPs of a training step, forward and backward, per token; x tokens/s = FLOP/s.

    seq_len: tokens per sequence, or slots per pack under `nemo_squad`. adapters: LoRA weights, from
    `lora_weights`.
    """
    return convention(count_work(config, adapters), seq_len)


def count_flops(config: Config, convention: Convention, visible: float = 1.0) -> float:
    """Return the FLOPs of a training step per token.

    For diffusion there is one convention, which counts what is computed.
    visible: as `visible_share` says; the tables' conventions know nothing of it.
    """
    shape = config.model.config
    batch = config.batch
    if isinstance(shape, WanConfig):
        return (
            training_flops(shape, batch.seq_len, config.data.text_tokens, config.lora)
            / batch.seq_len
        )
    seen = batch.seq_len * visible if convention is clean else batch.seq_len
    return flops_per_token(shape, seen, convention, adapter_weights(config))


def adapter_weights(config: Config) -> int:
    lora = config.lora
    return lora_weights(config.model.config, lora.rank, lora.targets) if lora else 0


def policy_flops(config: Config) -> Callable[[int], float]:
    """Return a function from the tokens of a GRPO step to its FLOPs per token.

    It counts forward and backward passes, sampling, and a forward pass for each set of
    log-probabilities.
    """
    grpo = config.grpo
    responses = grpo.prompts * grpo.group
    work = count_work(config.model.config)
    trained = replace(work, adapters=adapter_weights(config))
    forward_passes = 1 + (responses > config.batch.global_) + (grpo.kl > 0)

    def per_token(tokens: int) -> float:
        length = tokens // responses
        return clean(trained, length) + clean(work, length) * (forward_passes / 3)

    return per_token


def step_flops(config: Config, dataset: Dataset | None) -> Callable[[int], float]:
    """Return a function from the tokens of a step to its FLOPs per token (of videos, per patch).

    dataset: whose first row shows what a row costs; None for GRPO.
    """
    if config.task == "grpo":
        return policy_flops(config)
    flops = count_flops(config, clean, visible_share(dataset))
    return lambda tokens: flops


def visible_share(dataset: Dataset) -> float:
    """Return the share of the causal pairs in a row whose tokens are of one document.

    It is measured on the first row.
    """
    row = dataset.row(0)
    if "document_ids" not in row:
        return 1.0
    ids = row["document_ids"].tolist()
    return effective_length(Counter(ids).values()) / len(ids)


# -------------------------------------------------------------------------------------------- Wan

# As Megatron-Bridge counts them; with adapters, which it has not, what torch does. Three times the
# forward pass's matrix products; attention counts in full, since every token sees every token, and
# recomputed activations not at all. The published rows give TFLOP/s alone; these FLOPs make seconds
# per step of them. Source: NVIDIA-NeMo/Megatron-Bridge,
# src/megatron/bridge/diffusion/models/wan/wan_provider.py (pull request 5249).


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
