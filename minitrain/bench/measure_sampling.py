"""Time the sampler on mock prompts: batch.global of them, grpo.group samples each, rollout.max_tokens new tokens.

Prompts have the rest of batch.seq_len, and are new at every step, so that none is found in a cache. Weights are those
of the seed; no response ends early, and both libraries make the same number of tokens.
"""

from statistics import median_high as median

import torch

from minitrain.bench.flops import clean, flops_per_token
from minitrain.bench.hardware import timed
from minitrain.bench.measure import prepare, progress, result
from minitrain.bench.versus import transformers_model, versus_result
from minitrain.config import Config
from minitrain.errors import InputError
from minitrain.parallel.mesh import start
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.training.build import build_model


def measure_sampling(config: Config, row: str, steps: int, warmup: int, versus: bool) -> dict:
    """Sample `warmup` + `steps` times and return one result row; all ranks call it, each for itself but for tp's.

    tokens_per_sec_per_gpu counts new tokens. versus: in turns with transformers' generate.
    """
    length = config.batch.seq_len - config.rollout.max_tokens
    if length < 1:
        raise InputError(
            f"batch.seq_len={config.batch.seq_len} must exceed rollout.max_tokens={config.rollout.max_tokens}, "
            f"for prompts of the difference"
        )
    meshes = start(config)
    device, matmul = prepare(config)
    sampler = Sampler(build_model(config, meshes), settings=config.rollout)
    runs = [lambda prompts: sample(sampler, config, prompts)]
    if versus:
        theirs = transformers_model(config, device)
        runs.append(lambda prompts: sample_with_transformers(theirs, config, prompts))
    seconds = []
    for step in progress(warmup + steps, row):
        generator = torch.Generator().manual_seed(step)
        shape = config.batch.global_, length
        prompts = torch.randint(config.model.config.vocab_size, shape, generator=generator)
        seconds.append([timed(lambda run=run, prompts=prompts: run(prompts), device) for run in runs])
    return figures(config, row, device, seconds[warmup:], matmul, length)


def sample(sampler: Sampler, config: Config, prompts: torch.Tensor) -> None:
    rollout = config.rollout
    params = SamplingParams(rollout.temperature, max_tokens=rollout.max_tokens, n=config.grpo.group, seed=config.seed)
    sampler.generate(prompts.tolist(), params)


def sample_with_transformers(model, config: Config, prompts: torch.Tensor) -> None:
    rollout, drawn = config.rollout, {"do_sample": False}
    if rollout.temperature:
        drawn = {"do_sample": True, "temperature": rollout.temperature, "top_k": 0}
    prompts = prompts.repeat_interleave(config.grpo.group, 0).to(model.device)
    count = {"min_new_tokens": rollout.max_tokens, "max_new_tokens": rollout.max_tokens}
    mask = torch.ones_like(prompts)
    model.generate(prompts, attention_mask=mask, eos_token_id=None, pad_token_id=0, **count, **drawn)


def figures(config: Config, row: str, device, seconds: list[list[float]], matmul: float, length: int) -> dict:
    """A prompt is computed once for its group; a forward pass is a third of what a training step computes."""
    ours, prompts, new = [each[0] for each in seconds], config.batch.global_, config.rollout.max_tokens
    produced = prompts * config.grpo.group * new
    tokens = produced / median(ours) / config.parallel.tp
    forward = flops_per_token(config.model.config, length + new, clean) / 3
    flops = forward * (prompts * length + produced) / produced
    outcome = result(config, row, device, ours, matmul, tokens, flops, flops) | {
        "ratio": None,
        "prompt_tokens": prompts * length,
        "new_tokens": produced,
    }
    return outcome | (versus_result("transformers", seconds) if len(seconds[0]) > 1 else {})
