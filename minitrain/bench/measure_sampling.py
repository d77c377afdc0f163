"""Time the sampler on mock prompts: batch.global of them, grpo.group samples each,
rollout.max_tokens new tokens.

Prompts have the rest of batch.seq_len, and are new at every step, so that none is found in a cache.
Weights are those of the seed; no response ends early, and both libraries make the same number of
tokens.

tokens_per_sec_per_gpu counts new tokens over all of the time. Where all samples are decoded at
once, decode_tokens_per_sec_per_gpu counts those that follow the first of each response
(`rollout.steps` of them, which reach the host together) over the time that follows first_tokens_s.
decode_mbu is the share of the memory's rate at which decoding reads what it must, weights and each
sample's cache, for a sampler that has all ranks. It can be above 1 where samples share what they
read of their prompt.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median_high as median

import torch
import torch.distributed as dist

from minitrain.bench.breakdown import profiled
from minitrain.bench.decoding import bytes_read, model_reads
from minitrain.bench.measure import prepare, progress, result
from minitrain.bench.versus import transformers_model, versus_result
from minitrain.errors import InputError
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.run.flops import clean, flops_per_token
from minitrain.run.hardware import measure_memory, timed
from minitrain.run.launch import fill_weights, pick_device, start
from minitrain.settings import Config
from minitrain.training.build import build_model


def measure_sampling(
    config: Config,
    row: str,
    steps: int,
    warmup: int,
    versus: bool,
    profile: bool = False,
    traces: str | None = None,
) -> dict:
    """Sample `warmup` + `steps` times and return one result row; all ranks call it, each for itself
    but for tp's.

    versus: in turns with transformers' generate. profile: sample once more, for `breakdown_s` of
    one call of the sampler's `step`, halfway through the responses; its trace goes to the folder
    `traces`, if that is given.
    """
    length = config.batch.seq_len - config.rollout.max_tokens
    if config.precision in (
        "bf16",
        "fp8",
    ):  # GRPO's samplers have a copy in bf16 of weights that train in fp32
        config = dataclasses.replace(config, precision="bf16-pure")
    meshes = start(config)
    memory = measure_memory(pick_device(config.device))
    device, matmul = prepare(config)
    together = config.batch.global_ * config.grpo.group
    model = build_model(config, meshes, partial(fill_weights, config), trained=False)
    longest = config.batch.seq_len
    sampler = Sampler(model, settings=config.rollout, samples=together, longest=longest)
    firsts = []
    runs = [lambda prompts: firsts.append(sample(sampler, config, prompts))]
    if versus:
        theirs = transformers_model(
            config, device, torch.float32 if config.precision == "fp32" else torch.bfloat16
        )
        runs.append(partial(sample_with_transformers, theirs, config))
    seconds = []
    for step in progress(warmup + steps, row):
        prompts = make_prompts(config, length, step)
        seconds.append([timed(partial(run, prompts), device) for run in runs])
    outcome = figures(config, row, device, seconds[warmup:], matmul, length)
    totals = [each[0] for each in seconds[warmup:]]
    size = sampler.model.head_weight.dtype.itemsize
    outcome |= decoding_figures(config, totals, firsts[warmup:], memory, size)
    if profile:
        outcome |= profiled_halfway(
            sampler, config, row, make_prompts(config, length, warmup + steps), traces
        )
    return outcome


def check_sampling(config: Config, versus: str | None) -> None:
    """Raises InputError for a config that the sampler cannot run, or the library that it is
    compared with.
    """
    if config.task == "diffusion":
        raise InputError(
            "--generate samples tokens, not videos (time its training, without --generate)"
        )
    if versus and config.lora is not None:
        raise InputError(
            f"--generate --versus {versus} samples whole models, and the config has adapters"
        )
    if config.parallel.pp > 1:
        raise InputError(
            f"--generate: parallel.pp={config.parallel.pp} is not for sampling (use 1)"
        )
    if config.batch.seq_len <= config.rollout.max_tokens:
        raise InputError(
            f"batch.seq_len={config.batch.seq_len} must exceed rollout.max_tokens={config.rollout.max_tokens}, "
            f"for prompts of the difference"
        )


def make_prompts(config: Config, length: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(
        config.model.config.vocab_size, (config.batch.global_, length), generator=generator
    )


@contextmanager
def submitted(sampler: Sampler, config: Config, prompts: torch.Tensor) -> Iterator[list[Sample]]:
    """The samples of all prompts, while the sampler can take many steps; those that have not ended
    then are dropped.
    """
    rollout = config.rollout
    count = dict(max_tokens=rollout.max_tokens, n=config.grpo.group, ignore_eos=True)
    params = SamplingParams(rollout.temperature, seed=config.seed, **count)
    samples = [
        x
        for number, prompt in enumerate(prompts.tolist())
        for x in sampler.submit(prompt, params, number)
    ]
    with sampler.weights.in_use():
        yield samples
    sampler.cancel(*samples)


def sample(sampler: Sampler, config: Config, prompts: torch.Tensor) -> tuple[float, int]:
    """Sample to the end. Returns after how many seconds there were first tokens of all samples, and
    how many; none if not all are decoded at once."""
    begin = time.perf_counter()
    with submitted(sampler, config, prompts) as samples:
        while not (news := sampler.step()):
            pass
        first = time.perf_counter() - begin
        while sampler.busy:
            sampler.step()
    return first, sum(len(tokens) for _, tokens in news) if len(news) == len(samples) else 0


def profiled_halfway(
    sampler: Sampler, config: Config, row: str, prompts: torch.Tensor, traces: str | None
) -> dict[str, dict]:
    """See `profiled`: of a call of `step` when the first sample has half of its tokens, or two
    calls before its end.
    """
    new = config.rollout.max_tokens
    before = min(new // 2, new - 2 * sampler.steps)
    if before < 1:
        print(
            f"warning: {row}: no profile: {new} tokens are too few for three times {sampler.steps}",
            file=sys.stderr,
        )
        return {}
    with submitted(sampler, config, prompts) as samples:
        while len(samples[0].produced) < before:
            sampler.step()
        return profiled(
            row, sampler.step, timed(sampler.step, sampler.device), sampler.device, traces
        )


def sample_with_transformers(model, config: Config, prompts: torch.Tensor) -> None:
    rollout = config.rollout
    drawn = {"do_sample": False}
    if rollout.temperature:
        drawn = {"do_sample": True, "temperature": rollout.temperature, "top_k": 0}
    prompts = prompts.repeat_interleave(config.grpo.group, 0).to(model.device)
    count = {"min_new_tokens": rollout.max_tokens, "max_new_tokens": rollout.max_tokens}
    mask = torch.ones_like(prompts)
    model.generate(
        prompts, attention_mask=mask, eos_token_id=None, pad_token_id=0, **count, **drawn
    )


def figures(
    config: Config, row: str, device, seconds: list[list[float]], matmul: float, length: int
) -> dict:
    """A prompt is computed once for its group, and what follows it once for each sample, but the
    head once for each new token alone; a forward pass is a third of what a training step
    computes."""
    ours = [each[0] for each in seconds]
    prompts = config.batch.global_
    group = config.grpo.group
    new = config.rollout.max_tokens
    produced = prompts * group * new
    tokens = produced / median(ours) / config.parallel.tp
    model = config.model.config
    prompt, whole = (n * flops_per_token(model, n, clean) / 3 for n in (length, length + new))
    head = (
        2 * length * model.hidden_size * model.vocab_size
    )  # of the prompt's tokens, which nobody asks for
    flops = (prompt - head + group * (whole - prompt)) / (group * new)
    outcome = result(config, row, device, ours, matmul, tokens, flops, flops) | {
        "ratio": None,
        "prompt_tokens": prompts * length,
        "new_tokens": produced,
    }
    return outcome | (versus_result("transformers", seconds) if len(seconds[0]) > 1 else {})


def decoding_figures(
    config: Config,
    totals: list[float],
    firsts: list[tuple[float, int]],
    memory: float,
    itemsize: int,
) -> dict[str, float]:
    """Of what comes after the first tokens of all samples, if anything does.

    totals: seconds. firsts: what `sample` returned. memory: bytes/s; itemsize: bytes of a weight.
    """
    samples = config.batch.global_ * config.grpo.group
    new = config.rollout.max_tokens
    rates = [
        (samples * new - count) / (total - first)
        for total, (first, count) in zip(totals, firsts, strict=True)
        if 0 < count < samples * new
    ]
    outcome = {"first_tokens_s": median([first for first, _ in firsts])}
    if not rates:
        return outcome
    model = config.model.config
    tp = config.parallel.tp
    outcome["decode_tokens_per_sec_per_gpu"] = median(rates) / tp
    if dist.get_world_size() == tp:  # others would have parts of the weights, and exchange them
        read = sum(
            bytes_read(
                model_reads(model, itemsize), model, samples, config.batch.seq_len - new / 2, tp
            )
        )
        outcome |= {
            "decode_mbu": read * median(rates) / samples / memory,
            "memory_bytes_per_sec": memory,
        }
    return outcome
