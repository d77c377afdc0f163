"""FLOPs of a training step per token: by one clean convention, and by the one behind each published table.

Published TFLOP/s are tokens/s times a formula, and the formulas disagree: on whether causal attention costs half of
its square, on what a frozen weight saves, on whether padding counts. So a model is measured once (`Work`), and a
convention is a function from that and a sequence length to FLOPs. To compare tables, turn their tokens/s into `clean`
FLOPs.

In the formulas N is `work.weights`, d L is `work.attention`, S is `work.state` and s is `seq_len`. A weight costs a
token 2 FLOPs in each of three products: output, gradient of the input, gradient of the weight. Attention has two
products per key (scores, values), hence 4 d L FLOPs forward and twice that backward: 12 d L per key. A Mamba-2 state
has two per element whatever the length (what a token adds, what it reads): 12 S.

These are model FLOPs: recomputed activations, norms, rotary embeddings, softmax and the optimizer do not count.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder, DecoderConfig

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Work:
    """What one token meets on its way through a model.

    weights: N, the matmul weights: every nn.Linear, the output head too (tied or not), the embedding look-up not.
    attention: d L, heads * head_dim summed over the layers: multiply-adds per key, for scores and again for values.
    state: S, the elements of all Mamba-2 states: heads * head_dim * state size, summed over the layers.
    parameters: all of the model's, without adapters.
    adapters: LoRA weights, all else being frozen; 0 if the whole model is trained.
    """

    weights: int
    attention: int
    state: int
    parameters: int
    adapters: int = 0


Convention = Callable[[Work, float], float]


def clean(work: Work, seq_len: float) -> float:
    """What a step has to compute: 6 N + 6 d L s, the causal half, + 12 S; LoRA: 4 per frozen weight, 6 per adapter's.

    Frozen weights still pass gradients on to their inputs, so attention's backward is whole. For packed documents,
    seq_len is their `effective_length`.
    """
    trained, frozen = (work.adapters, work.weights) if work.adapters else (work.weights, 0)
    return 6 * trained + 4 * frozen + 6 * work.attention * seq_len + 12 * work.state


def automodel(work: Work, seq_len: float) -> float:
    """NeMo AutoModel: 6 N + 6 d L s + 6 S; LoRA: (2 + adapters / parameters) / 3 of it, attention's backward included.

    Source: NVIDIA-NeMo/Automodel, nemo_automodel/components/utils/flops_utils.py and recipes/llm/benchmark.py.
    """
    full = 6 * work.weights + 6 * work.attention * seq_len + 6 * work.state
    return full * (2 + work.adapters / work.parameters) / 3 if work.adapters else full


def nemo_pretrain(work: Work, seq_len: float) -> float:
    """NeMo 25.04 pretraining: 6 N + 12 d L s, the full square although attention is causal.

    Source: NVIDIA/NeMo v2.3.0, nemo/utils/flops_formulas.py; it was halved there in August 2025, after the table.
    """
    return 6 * work.weights + 12 * work.attention * seq_len


def nemo_squad(work: Work, seq_len: float) -> float:
    """NeMo 25.04 fine-tuning on packed SQuAD: 6 N (LoRA: 4 N) for slots that hold tokens, 12 d L x 208 for attention.

    seq_len: slots of a pack, all of which the table's tokens/s counts. No source states this formula. Its shape is that
    of NVIDIA-NeMo/Megatron-Bridge, flop_utils.py; 17 empty slots a pack and documents of an effective 208 tokens are
    fitted to the table. Raises InputError for packs that could not hold one such document.
    """
    empty, document = 17, 208
    if seq_len < empty + document:
        raise InputError(f"seq_len={seq_len} is too short for packed SQuAD (use at least {empty + document})")
    per_weight = 4 if work.adapters else 6
    return per_weight * work.weights * (1 - empty / seq_len) + 12 * work.attention * document


def count_work(config: DecoderConfig, adapters: int = 0) -> Work:
    """Measure the model of `config`, built without memory on the meta device. adapters: see `lora_weights`."""
    model = _meta_model(config)
    weights = sum(layer.weight.numel() for layer in _linear_layers(model).values())
    if config.tie_word_embeddings:
        weights += model.head_weight.numel()
    mixers = [config.parts(layer)[0] for layer in range(config.num_layers)]
    return Work(
        weights=weights,
        attention=mixers.count("attention") * config.num_attention_heads * config.head_dim,
        state=mixers.count("mamba") * config.mamba.width * config.ssm_state_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        adapters=adapters,
    )


def lora_weights(config: DecoderConfig, rank: int, targets: Iterable[str] = LORA_TARGETS) -> int:
    """Weights of the LoRA adapters (Hu et al. 2021): rank * (inputs + outputs) of each Linear named in `targets`."""
    layers = _linear_layers(_meta_model(config))
    adapted = [layer for name, layer in layers.items() if name.rpartition(".")[2] in targets]
    return sum(rank * (layer.in_features + layer.out_features) for layer in adapted)


def effective_length(documents: Iterable[int]) -> float:
    """The sequence length at which attention costs a token as much as in these packed documents: sum n^2 / sum n."""
    lengths = list(documents)
    return sum(n * n for n in lengths) / sum(lengths)


def flops_per_token(config: DecoderConfig, seq_len: float, convention: Convention = clean, adapters: int = 0) -> float:
    """FLOPs of one training step, forward and backward, per token; x tokens/s = FLOP/s.

    seq_len: tokens per sequence, or slots per pack under `nemo_squad`. adapters: LoRA weights, from `lora_weights`.
    """
    return convention(count_work(config, adapters), seq_len)


def _meta_model(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
