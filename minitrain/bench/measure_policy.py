"""Time GRPO steps as the published table does.

That is the whole step, with its phases, and the tokens of prompts and responses.

Without trained weights there is nothing that ends a response: all get the published mean length,
and prompts that of the published tokens per step. So the sampler's work is right on average, but
without the wait for a step's longest response. Rewards are those of random text; a step with no
signal costs the same.
"""

import sys
from dataclasses import replace
from statistics import median_high as median

import torch.distributed as dist

from minitrain.bench.measure import prepare, result
from minitrain.grpo.policy_loop import PHASES
from minitrain.run.monitor.flops import policy_flops
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.settings import Config


def measure_policy(config: Config, row: str, steps: int, warmup: int) -> dict:
    """Run `warmup` + `steps` GRPO steps and return one result row; all ranks call it."""
    # a step off policy, the last one samples nothing
    last = config.grpo.lag
    config = replace(published_lengths(config), steps=warmup + steps + last)
    device, matmul = prepare(config)
    run = GrpoTask(config, folder=None)
    lines = []
    for line in run.steps(run.begin()):
        lines.append(line)
        # at once: steps take long, and a later one may fail
        if dist.get_rank() == 0:
            phases = ", ".join(f"{phase} {line[f'{phase}_s']:.3g} s" for phase in PHASES)
            told = f"{row}: step {line['step']}: {line['step_time_s']:.3g} s ({phases})"
            print(told, file=sys.stderr, flush=True)
    lines = lines[warmup : warmup + steps]
    times = [line["step_time_s"] for line in lines]
    tokens = median([line["tokens_per_sec"] for line in lines]) / dist.get_world_size()
    flops = policy_flops(config)(lines[0]["step_tokens"])
    return result(config, row, device, times, matmul, (flops, flops), tokens) | {
        "response_tokens": median([line["length"] for line in lines]),
        "age": config.grpo.lag,
        "generation_ranks": config.grpo.generation_ranks or dist.get_world_size(),
        **{f"{phase}_s": median([line[f"{phase}_s"] for line in lines]) for phase in PHASES},
    }


def published_lengths(config: Config) -> Config:
    """Return a published row's config with prompts and responses as long as the table's on average.

    Responses are as long as a `rollout.max_tokens` that the command line changed. Other configs stay.
    """
    row = config.reference
    grpo = config.grpo
    rollout = config.rollout
    if "mean_response" not in row:
        return config
    responses = row.get("responses", grpo.prompts * grpo.group)
    tokens = row["tokens_per_sec_per_gpu"] * row["gpus"] * row["step_time_s"] / responses
    # a prompt ends with a token of the template
    prompt = max(1, round(tokens - row["mean_response"]) - 1)
    if "rollout.max_tokens" not in row.get("changed", ()):
        rollout = replace(rollout, max_tokens=round(row["mean_response"]))
    grpo = replace(grpo, mock_digits=prompt)
    return replace(config, rollout=rollout, grpo=grpo)
