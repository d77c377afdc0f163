"""A stand-in for a config whose model does not fit here: `bench.py --config ROW --proxy 4,8`, on
one rank.

It has the full width, fewer layers, and of the experts those that one rank of the config owns, at
least as many as a token chooses, so that a token costs in a layer what it costs in the whole. All
parallel dimensions are 1, the micro-batch stays, and of many micro-batches per step few are run.
From two numbers of layers follows the time of the
whole: seconds grow with the layers' FLOPs, which is with their number where all are alike.

Left out: all communication, a pipeline's bubble, uneven experts; the optimizer's share is larger
than in the whole, as fewer tokens pay for it.
"""

import dataclasses
from collections import Counter

from minitrain.bench.measure import (
    placed,
    published_step_time,
    rates,
    token_flops,
)
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.run.config_checks import validate
from minitrain.run.flops import clean, count_flops, visible_share
from minitrain.run.parallel_checks import check_layout, micro_batches, stated_ranks
from minitrain.settings import Config

MICRO_BATCHES = 8  # per step, at most
LEFT_OUT = "communication, the pipeline's bubble, uneven experts, most micro-batches of a step"
ALONE = dict(
    dp_replicate=1,
    dp_shard=1,
    tp=1,
    cp=1,
    pp=1,
    ep=1,
    vp=1,
    schedule="1F1B",
    layers_per_stage=None,
    head_layers=1,
    async_tp=False,
)


def parse_counts(word: str) -> list[int]:
    """One or two numbers of layers. Raises InputError."""
    counts = [int(part) for part in word.split(",") if part.isdecimal()]
    rising = sorted(set(counts)) == counts and all(counts)
    if len(counts) != len(word.split(",")) or len(counts) not in (1, 2) or not rising:
        raise InputError(
            f"--proxy={word} must be a number of layers, or two that rise (such as 4,8)"
        )
    return counts


def make_proxy(config: Config, layers: int) -> Config:
    """The config's stand-in with so many layers. Raises InputError for what has none."""
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
            f"--proxy={layers} is not a multiple of recompute={every}, which takes every {every}th block"
        )
    if config.fp8.experts and whole.num_experts == config.parallel.ep:
        raise InputError(
            "--proxy: one expert per rank, in FP8, has no stand-in on one rank (use fp8.experts=false)"
        )
    check_layout(config, stated_ranks(config))
    rows = config.batch.micro * min(MICRO_BATCHES, micro_batches(config))
    proxy = dataclasses.replace(
        cut(config, layers),
        batch=dataclasses.replace(config.batch, global_=rows),
        parallel=dataclasses.replace(config.parallel, **ALONE),
        reference=config.reference | {"changed": ["model.num_layers", "parallel"]},
    )
    validate(proxy)
    return proxy


def cut(config: Config, layers: int) -> Config:
    """The config with so many layers, and with one rank's experts; its weights are those of no
    file.
    """
    shape = fewer_layers(own_experts(config.model.config, config.parallel.ep), layers)
    lora = config.lora and dataclasses.replace(config.lora, path="")
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, config=shape, path=""), lora=lora
    )


def own_experts(shape, ep: int):
    """With the experts of one of `ep` ranks, but no fewer than a token chooses."""
    experts = getattr(shape, "num_experts", 0)
    own = max(experts // ep, shape.num_experts_per_tok) if experts else 0
    if own == experts:
        return shape
    return dataclasses.replace(shape, num_experts=own, n_group=1, topk_group=1)


def fewer_layers(shape, layers: int):
    """With the first `layers`; of a hybrid, with its kinds of layers in the same proportions, in an
    even mixture.
    """
    if not getattr(shape, "layer_pattern", ""):
        return dataclasses.replace(shape, num_layers=layers)
    return dataclasses.replace(
        shape, num_layers=layers, layer_pattern=mixture(shape.layer_pattern, layers)
    )


def mixture(pattern: str, layers: int) -> str:
    """A pattern of so many letters: at each place the letter that is the furthest behind its share
    so far.
    """
    shares = Counter(pattern)
    taken = Counter()
    letters = ""
    for place in range(1, layers + 1):
        letter = max(shares, key=lambda x: shares[x] * place / len(pattern) - taken[x])
        taken[letter] += 1
        letters += letter
    return letters


def note(config: Config, layers: int | list[int]) -> dict:
    """What a proxy's result says about it."""
    experts = getattr(own_experts(config.model.config, config.parallel.ep), "num_experts", 0)
    return {
        "proxy": True,
        "layers": layers,
        "full_layers": config.model.config.num_layers,
        "left_out": LEFT_OUT,
    } | ({"experts": experts} if experts else {})


def extrapolate(config: Config, small: dict, large: dict) -> dict:
    """The whole config's result row from those of two proxies of it: a straight line through their
    seconds per token.

    step_time_s is that of the config's own batch and GPUs. Raises InputError if more layers took no
    more time.
    """
    layers = [small["layers"], large["layers"]]
    costs = [count_flops(cut(config, n), clean) for n in (*layers, config.model.config.num_layers)]
    times = [1 / result["tokens_per_sec_per_gpu"] for result in (small, large)]
    slope = (times[1] - times[0]) / (costs[1] - costs[0])
    if slope <= 0:
        raise InputError(
            f"{layers[1]} layers took no longer than {layers[0]}: nothing to extrapolate (use more steps)"
        )
    tokens = 1 / (times[1] + slope * (costs[2] - costs[1]))
    flops = token_flops(config, visible_share(open_dataset(config)[0]))
    ranks = stated_ranks(config)
    config = placed(config, ranks, large["device"])
    same = ("row", "system", "device", "cores", "torch", "matmul_tflops")
    return {
        **{key: large[key] for key in same if key in large},
        **note(config, layers),
        "mode": "extrapolated",
        "extrapolated_from": large["mode"],
        "world_size": ranks,
        "seconds_per_layer": (large["step_time_s"] - small["step_time_s"])
        / (layers[1] - layers[0]),
        "step_time_s": config.batch.global_ * config.batch.seq_len / tokens / ranks,
        **rates(config, tokens, large["matmul_tflops"] * 1e12, *flops),
        "peak_memory_gib": None,
        "reference": config.reference,
        "published_step_time_s": published_step_time(config),
    }
