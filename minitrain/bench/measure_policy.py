"""Time GRPO steps as the published table does.

A step's time includes all its phases, and its tokens are those of prompts and responses.

Untrained weights would not end their responses, so every response has the published mean length, and
prompts are as long as the published tokens per step require. The sampler's work is then right on
average, but no rank waits for an unusually long response. Rewards are those of random text; a step
whose groups all have equal rewards takes the same time.
"""

import sys
from dataclasses import replace
from statistics import median_high

import torch.distributed as dist

from minitrain.bench.figures import TokenFlops
from minitrain.bench.measure import announce_time, prepare, result
from minitrain.grpo.policy_loop import PHASES
from minitrain.run.monitor.flops import policy_flops
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.settings import Config


def measure_policy(config: Config, row: str, steps: int, warmup: int) -> dict:
    """Run `warmup` + `steps` GRPO steps and return their result; all ranks call it."""
    # sampling runs `lag` steps ahead, so the last `lag` steps sample nothing: run more, drop them
    last = config.grpo.lag
    config = replace(published_lengths(config), steps=warmup + steps + last)
    device, matmul = prepare(config)
    # the template adds one token to a prompt
    length = config.grpo.mock_digits + 1 + config.rollout.max_tokens
    tokens = config.grpo.prompts * config.grpo.group * length
    announce_time(config, row, device, matmul, tokens * policy_flops(config)(tokens))
    run = GrpoTask(config, folder=None)
    lines = []
    for line in run.steps(run.begin()):
        lines.append(line)
        # shown right away, because steps take long and a later one may fail
        if dist.get_rank() == 0:
            phases = ", ".join(f"{phase} {line[f'{phase}_s']:.3g} s" for phase in PHASES)
            message = f"{row}: step {line['step']}: {line['step_time_s']:.3g} s ({phases})"
            print(message, file=sys.stderr, flush=True)
    lines = lines[warmup : warmup + steps]
    times = [line["step_time_s"] for line in lines]
    tokens = median_high([line["tokens_per_sec"] for line in lines]) / dist.get_world_size()
    flops = policy_flops(config)(lines[0]["step_tokens"])
    both = TokenFlops(flops, flops)
    return result(config, row, device, times, matmul, both, tokens) | {
        "response_tokens": median_high([line["length"] for line in lines]),
        "age": config.grpo.lag,
        "generation_ranks": config.grpo.generation_ranks or dist.get_world_size(),
        **{f"{phase}_s": median_high([line[f"{phase}_s"] for line in lines]) for phase in PHASES},
    }


def published_lengths(config: Config) -> Config:
    """Return a published row's config with all prompts and responses of the table's mean lengths.

    A `rollout.max_tokens` changed on the command line sets the responses' length instead. A config
    without published lengths is returned unchanged.
    """
    row = config.reference
    grpo = config.grpo
    rollout = config.rollout
    if "mean_response" not in row:
        return config
    responses = row.get("responses", grpo.prompts * grpo.group)
    tokens = row["tokens_per_sec_per_gpu"] * row["gpus"] * row["step_time_s"] / responses
    replies = (row.get("turns", 1) - 1) * row.get("reply_tokens", 0)
    # the template adds one token to a prompt
    prompt = max(1, round(tokens - row["mean_response"] - replies) - 1)
    if "rollout.max_tokens" not in row.get("changed", ()):
        rollout = replace(rollout, max_tokens=round(row["mean_response"]))
    grpo = replace(grpo, mock_digits=prompt)
    return replace(config, rollout=rollout, grpo=grpo)
