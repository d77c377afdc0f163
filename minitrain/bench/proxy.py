"""Estimate a large row on one rank from a smaller proxy: `bench.py --config ROW --proxy 4,8`.

A proxy keeps the model's full width, so that a layer costs as much per token as in the whole model.
It has fewer layers, and only as many experts as one rank of the config holds (but no fewer than a
token selects). All parallel dimensions are 1. The micro-batch stays; a step has at most
MICRO_BATCHES of them. Two proxies with different numbers of layers give the time of the whole
model, because seconds grow linearly with the FLOPs of the layers.

Left out: all communication, the pipeline's bubble, uneven load of experts. The optimizer's share of
the time is larger than in the whole run, which has more tokens per step.
"""

import re
from collections import Counter
from dataclasses import replace

from minitrain.bench.figures import placed, published_step_time, rates, token_flops
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.run.config.checks import validate
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.ranks import micro_batches, stated_ranks
from minitrain.run.monitor.flops import clean, count_flops, visible_share
from minitrain.settings import Config, Parallel
from minitrain.training.build import fp8_experts

# the most per step
MICRO_BATCHES = 8
LEFT_OUT = "communication, the pipeline's bubble, uneven experts, most micro-batches of a step"


def parse_counts(word: str) -> list[int]:
    """Return the one or two numbers of layers in `--proxy`'s value. Raises InputError."""
    is_list = re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)?", word)
    counts = [int(part) for part in word.split(",")] if is_list else []
    if not counts or sorted(set(counts)) != counts:
        raise InputError(
            f"--proxy={word} must be a number of layers, or two that rise (such as 4,8)"
        )
    return counts


def make_proxy(config: Config, layers: int) -> Config:
    """Return the config's proxy with this many layers. Raises InputError where none is possible."""
    whole = config.model.config
    every = config.recompute
    first_dense = getattr(whole, "first_k_dense_replace", 0)
    if config.task == "grpo":
        raise InputError("--proxy is for training, not task=grpo")
    if not first_dense < layers <= whole.num_layers:
        raise InputError(
            f"--proxy={layers} must be above {first_dense} and at most num_layers={whole.num_layers}"
        )
    if isinstance(every, int) and layers % every:
        raise InputError(
            f"--proxy={layers} is not a multiple of recompute={every}, which recomputes one block in {every}"
        )
    if config.fp8.form == "tensor" and fp8_experts(config):
        raise InputError(
            "--proxy: one expert per rank, in FP8, has no stand-in on one rank (use fp8.experts=false)"
        )
    check_layout(config, stated_ranks(config))
    rows = config.batch.micro * min(MICRO_BATCHES, micro_batches(config))
    p = config.parallel
    alone = Parallel(
        dp_shard=1,
        reshard_after_forward=p.reshard_after_forward,
        reduce=p.reduce,
        prefetch=p.prefetch,
    )
    proxy = replace(
        cut_layers(config, layers),
        batch=replace(config.batch, global_=rows),
        parallel=alone,
        reference=config.reference | {"changed": ["model.num_layers", "parallel"]},
    )
    validate(proxy)
    return proxy


def cut_layers(config: Config, layers: int) -> Config:
    """Return the config with this many layers, one rank's experts, and no files of weights.

    A hybrid model keeps the proportions of its kinds of layers.
    """
    shape = config.model.config
    changes = {"num_layers": layers}
    if getattr(shape, "layer_pattern", ""):
        changes["layer_pattern"] = mixture(shape.layer_pattern, layers)
    experts = own_experts(config)
    if experts and experts < shape.num_experts:
        changes |= {"num_experts": experts, "n_group": 1, "topk_group": 1}
    model = replace(config.model, config=replace(shape, **changes), path="")
    lora = config.lora and replace(config.lora, path="")
    return replace(config, model=model, lora=lora)


def own_experts(config: Config) -> int:
    """Return the number of experts on one rank, but no fewer than a token selects; 0: no experts."""
    shape = config.model.config
    if not getattr(shape, "num_experts", 0):
        return 0
    return max(shape.num_experts // config.parallel.ep, shape.num_experts_per_tok)


def mixture(pattern: str, layers: int) -> str:
    """Return a pattern of `layers` letters with the proportions of `pattern`, evenly mixed."""
    wanted = Counter(pattern)
    taken = Counter()
    letters = ""
    for place in range(1, layers + 1):
        # next comes the letter that is furthest behind its share
        letter = max(wanted, key=lambda x: wanted[x] * place / len(pattern) - taken[x])
        taken[letter] += 1
        letters += letter
    return letters


def note(config: Config, layers: int | list[int]) -> dict:
    """Return the keys that describe a proxy in its result. layers: one number, or both."""
    keys = {
        "proxy": True,
        "layers": layers,
        "full_layers": config.model.config.num_layers,
        "left_out": LEFT_OUT,
    }
    experts = own_experts(config)
    return keys | {"experts": experts} if experts else keys


def extrapolate(config: Config, small: dict, large: dict) -> dict:
    """Return the whole config's result, by a line through two proxies' seconds per token over FLOPs.

    step_time_s is that of the config's own batch on its own number of GPUs. Raises InputError if the
    larger proxy took no longer than the smaller one.
    """
    layers = [small["layers"], large["layers"]]
    small_flops, large_flops, whole_flops = (
        count_flops(cut_layers(config, n), clean)
        for n in (*layers, config.model.config.num_layers)
    )
    small_time = 1 / small["tokens_per_sec_per_gpu"]
    large_time = 1 / large["tokens_per_sec_per_gpu"]
    slope = (large_time - small_time) / (large_flops - small_flops)
    if slope <= 0:
        raise InputError(
            f"{layers[1]} layers took no longer than {layers[0]}: nothing to extrapolate (use more steps)"
        )
    tokens = 1 / (large_time + slope * (whole_flops - large_flops))
    flops = token_flops(config, visible_share(open_dataset(config)[0]))
    ranks = stated_ranks(config)
    config = placed(config, ranks, large["device"])
    seconds = large["step_time_s"] - small["step_time_s"]
    kept = {"row", "system", "device", "cores", "torch", "matmul_tflops"} & large.keys()
    return {
        **{key: large[key] for key in kept},
        **note(config, layers),
        "mode": "extrapolated",
        "extrapolated_from": large["mode"],
        "world_size": ranks,
        "seconds_per_layer": seconds / (layers[1] - layers[0]),
        "step_time_s": config.batch.global_ * config.batch.seq_len / tokens / ranks,
        **rates(config, tokens, large["matmul_tflops"] * 1e12, *flops),
        "peak_memory_gib": None,
        "reference": config.reference,
        "published_step_time_s": published_step_time(config),
    }
