"""A GRPO step on another machine: `--simulate` for rows of task=grpo.

    sampling    token by token, by the memory's bandwidth, of which decoding kernels reach a share: each decoding step
                reads the weights (of experts, those that its tokens choose) and the caches of all samples that have
                not ended, and begins when the host has prepared it. Lengths are log-normal around the published mean,
                cut off at the limit: the longest responses decode almost alone.
    log-probs   a forward pass for the old policy if there is more than one update, one for the reference
    training    the simulated optimizer step, on rows that are packed full
    refit       every sampler receives its share of the weights, in bf16, over the slowest link between the ranks

Apart, samplers and trainers work side by side, and a step takes as long as the slower of the two. Left out: rewards,
prefill, and how far acceptance of one step's lag changes lengths.
"""

import dataclasses
import math
import time
from dataclasses import dataclass

import torch

from minitrain.bench.layout import stated_ranks
from minitrain.bench.measure import compare
from minitrain.bench.measure_policy import flops_of_token, published_lengths
from minitrain.bench.simulate import Simulation, record, timed
from minitrain.bench.timeline import System
from minitrain.config import GRPO, Config
from minitrain.models.decoder_config import DecoderConfig
from minitrain.training.build import make_model

SPREAD = 0.8  # standard deviation of the logarithm of responses' lengths


@dataclass
class Shape:
    """What decoding reads, in bf16: bytes of the weights that every token needs, of one expert over all layers, and of
    a token's cache over all layers."""

    shared: float
    expert: float
    cache: float


def simulated_policy_row(config: Config, row: str, system: System) -> tuple[Simulation, dict]:
    """The simulation of an optimizer step, and the row's result with the seconds of each phase."""
    began = time.perf_counter()
    gpus, sampling = stated_ranks(config), config.grpo.generation_ranks
    limit, lengths = config.rollout.max_tokens, published_lengths(config)
    response, prompt = lengths.rollout.max_tokens, lengths.grpo.mock_digits + 1
    responses = config.grpo.prompts * config.grpo.group
    tokens = responses * (prompt + response)
    updates = max(1, responses // config.batch.global_)
    learner = training_config(config, gpus - sampling, tokens / updates)
    simulation = timed(learner, *record(learner), system)
    phases = {
        "generation": generation_seconds(config, system, responses, prompt, response, limit, sampling or gpus),
        "logprobs": ((updates > 1) + (config.grpo.kl > 0)) * updates * forward_share(learner) * simulation.step,
        "training": updates * simulation.step,
        "refit": refit_seconds(config, system, gpus),
    }
    sampler, trainer = phases["generation"], phases["logprobs"] + phases["training"]
    step = (max(sampler, trainer) if sampling else sampler + trainer) + phases["refit"]
    rate = tokens / step / gpus
    flops = flops_of_token(config, tokens)
    peak = max(sum(trace.peak.values()) for trace in simulation.traces.values())
    return simulation, {
        "row": row, "system": system.name, "device": system.name, "mode": "simulated", "proxy": False,
        "world_size": gpus, "step_time_s": step, "tokens_per_sec_per_gpu": rate, "tflops_per_gpu": rate * flops / 1e12,
        "clean_tflops_per_gpu": rate * flops / 1e12, "mfu": rate * flops / system.bf16,
        "matmul_tflops": system.bf16 / 1e12, "peak_memory_gib": peak / 2**30, "fits": peak <= system.capacity,
        **{f"{phase}_s": seconds for phase, seconds in phases.items()},
        "response_tokens": response, "reference": config.reference,
        "published_step_time_s": config.reference.get("step_time_s"),
        "ratio": compare(rate, rate * flops, config.reference), "torch": torch.__version__,
        "simulated_in_s": time.perf_counter() - began,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- training


def training_config(config: Config, ranks: int, tokens: float) -> Config:
    """An optimizer step on `tokens` in full rows, as plain language modelling, which computes the same."""
    p, b = config.parallel, config.batch
    rows = ranks // (p.tp * p.cp * p.pp) * b.micro
    packs = max(1, math.ceil(tokens / b.seq_len / rows))
    packs = max(packs, p.pp) if p.pp > 1 else packs
    batch = dataclasses.replace(b, global_=packs * rows)
    return dataclasses.replace(config, task="pretrain", batch=batch, grpo=GRPO())


def forward_share(config: Config) -> float:
    """Of a training step: 2 of 6 products per weight, and 2 of 8 where the forward pass is run again."""
    return 1 / 4 if config.recompute == "full" else 1 / 3


# ------------------------------------------------------------------------------------------------------------- sampling


def generation_seconds(
    config: Config, system: System, responses: int, prompt: int, mean: int, limit: int, gpus: int
) -> float:
    """Until every sampler has finished its share: the sum over decoding steps of what each reads."""
    tp = config.reference.get("generation_tp", config.rollout.tp)
    samples, shape, model = responses * tp / gpus, decoding_shape(config), config.model.config
    location = log_normal_location(mean, limit)
    seconds, step = 0.0, max(1, limit // 256)
    for position in range(0, limit, step):
        left = samples * share_longer(position, location)
        if left < 0.5 and position:  # the last sample has ended
            break
        seconds += step * decoding_seconds(system, model, shape, max(left, 1.0), prompt + position, tp)
    return seconds


def decoding_seconds(
    system: System, model: DecoderConfig, shape: Shape, samples: float, context: float, tp: int
) -> float:
    """One token for each of `samples`, whose caches hold `context` tokens on average."""
    touched = 0.0
    if model.num_experts:
        touched = model.num_experts * (1 - (1 - model.num_experts_per_tok / model.num_experts) ** samples)
    moved = (shape.shared + touched * shape.expert + samples * context * shape.cache) / tp
    exchange = system.latency / 2 if tp <= system.domain else system.far_latency  # near ones are single kernels
    exchanges = 2 * model.num_layers * exchange if tp > 1 else 0.0
    return moved / (system.decode * system.memory) + exchanges + system.decode_step


def decoding_shape(config: Config) -> Shape:
    model = config.model.config
    weights = make_model(config)
    experts = sum(p.numel() for name, p in weights.named_parameters() if ".experts." in name and "shared" not in name)
    embedding = model.vocab_size * model.hidden_size
    shared = sum(p.numel() for p in weights.parameters()) - experts - embedding
    if model.kv_lora_rank:
        cache = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        cache = 2 * model.num_key_value_heads * model.head_dim
    return Shape(2 * shared, 2 * experts / max(1, model.num_experts), 2 * cache * model.num_layers)


def log_normal_location(mean: float, limit: int) -> float:
    """The location of a log-normal whose values, cut off at `limit`, have this mean; by bisection."""
    points, low, high = [limit * (i + 0.5) / 512 for i in range(512)], 0.0, math.log(limit) + 3
    for _ in range(60):
        middle = (low + high) / 2
        too_short = sum(share_longer(x, middle) for x in points) * limit / 512 < mean
        low, high = (middle, high) if too_short else (low, middle)
    return (low + high) / 2


def share_longer(length: float, location: float) -> float:
    """Of all responses."""
    return 0.5 * math.erfc((math.log(max(length, 1e-9)) - location) / (SPREAD * math.sqrt(2)))


# ---------------------------------------------------------------------------------------------------------------- refit


def refit_seconds(config: Config, system: System, gpus: int) -> float:
    """Each GPU of a sampler receives 1 / tp of the weights, over the network unless all GPUs share a domain."""
    size = 2 * sum(p.numel() for p in make_model(config).parameters())
    tp = config.reference.get("generation_tp", config.rollout.tp)
    return size / tp / (system.nvlink if gpus <= system.domain else system.network)
