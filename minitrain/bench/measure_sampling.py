"""Time the sampler on mock prompts.

A step samples batch.global prompts, grpo.group times each, for rollout.max_tokens new tokens. A
prompt has batch.seq_len - rollout.max_tokens tokens. Prompts differ from step to step, so that the
prefix cache finds none of them. Weights are untrained; no response ends early, so the compared
library generates as many tokens.

tokens_per_sec_per_gpu: new tokens over the whole time.
decode_tokens_per_sec_per_gpu: the decoding phase alone. It leaves out the first `rollout.steps`
    tokens of each response, which reach the host together, and the time until then
    (first_tokens_s). Given only if all samples are decoded at once.
decode_mbu: bytes per second that decoding must read (the weights, and each sample's cache) over the
    memory bandwidth. Given only if tensor parallelism spans all ranks. It can exceed 1 if samples of
    a prompt share reads of its cache.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median_high
from typing import NamedTuple

import torch
import torch.distributed as dist

from minitrain.bench.breakdown import profiled
from minitrain.bench.decoding import bytes_read, model_reads
from minitrain.bench.figures import TokenFlops
from minitrain.bench.measure import prepare, progress, result
from minitrain.bench.versus import transformers_model, versus_result
from minitrain.errors import InputError
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.run.launch.start import pick_device, start
from minitrain.run.monitor.flops import clean, flops_per_token
from minitrain.run.monitor.hardware import measure_memory, timed
from minitrain.run.tasks.initial_weights import fill_weights
from minitrain.settings import Config
from minitrain.training.build import build_model


class FirstTokens(NamedTuple):
    """The first tokens that reach the host in a sampling step."""

    # until they arrive
    seconds: float
    # number of tokens; 0 if they are not those of all samples, since not all are decoded at once
    count: int


def measure_sampling(
    config: Config,
    row: str,
    steps: int,
    warmup: int,
    versus: bool,
    profile: bool = False,
    traces: str | None = None,
) -> dict:
    """Sample `warmup` + `steps` times and return the result; each tensor-parallel group does so alone.

    versus: also time transformers' generate, alternating. profile: sample once more and add
    `breakdown_s` of one sampler step, halfway through the responses. traces: folder for the
    profiler's trace, if it is to be kept.
    """
    # as in GRPO, where the sampler has a bf16 copy of weights that train in fp32
    if config.precision in ("bf16", "fp8"):
        config = dataclasses.replace(config, precision="bf16-pure")
    meshes = start(config)
    memory = measure_memory(pick_device(config.device))
    device, matmul = prepare(config)
    model = build_model(config, meshes, fill_weights, trained=False)
    dtype = model.head_weight.dtype
    together = config.batch.global_ * config.grpo.group
    sampler = Sampler(
        model, settings=config.rollout, samples=together, longest=config.batch.seq_len
    )
    firsts = []
    runs = [lambda prompts: firsts.append(sample(sampler, config, prompts))]
    if versus:
        theirs = transformers_model(config, device, dtype)
        runs.append(partial(sample_with_transformers, theirs, config))
    length = config.batch.seq_len - config.rollout.max_tokens
    seconds = []
    for step in progress(warmup + steps, row):
        prompts = make_prompts(config, length, step)
        seconds.append([timed(partial(run, prompts), device) for run in runs])
    outcome = sampling_figures(config, row, device, seconds[warmup:], matmul, length)
    totals = [each[0] for each in seconds[warmup:]]
    outcome |= decoding_figures(config, totals, firsts[warmup:], memory, dtype.itemsize)
    if profile:
        prompts = make_prompts(config, length, warmup + steps)
        outcome |= profiled_halfway(sampler, config, row, prompts, traces)
    return outcome


def check_sampling(config: Config, versus: str | None) -> None:
    """Raise InputError for a config that the sampler, or the library `versus`, cannot run."""
    new = config.rollout.max_tokens
    length = config.batch.seq_len
    problem = ""
    if config.task == "diffusion":
        problem = " samples tokens, not videos (time its training, without --generate)"
    elif versus and config.lora is not None:
        problem = f" --versus {versus} samples whole models, and the config has adapters"
    elif config.parallel.pp > 1:
        problem = f": parallel.pp={config.parallel.pp} is not for sampling (use 1)"
    if problem:
        raise InputError(f"--generate{problem}")
    if length <= new:
        raise InputError(
            f"batch.seq_len={length} must exceed rollout.max_tokens={new}, for prompts of the difference"
        )


def make_prompts(config: Config, length: int, step: int) -> torch.Tensor:
    """Return random tokens [prompts, length] that depend on the step."""
    generator = torch.Generator().manual_seed(step)
    size = config.batch.global_, length
    return torch.randint(config.model.config.vocab_size, size, generator=generator)


@contextmanager
def submitted(sampler: Sampler, config: Config, prompts: torch.Tensor) -> Iterator[list[Sample]]:
    """Submit all prompts and yield their samples; cancel unfinished ones at the end."""
    rollout = config.rollout
    params = SamplingParams(
        rollout.temperature,
        seed=config.seed,
        max_tokens=rollout.max_tokens,
        n=config.grpo.group,
        ignore_eos=True,
    )
    samples = []
    for number, prompt in enumerate(prompts.tolist()):
        samples += sampler.submit(prompt, params, number)
    with sampler.weights.in_use():
        yield samples
    sampler.cancel(*samples)


def sample(sampler: Sampler, config: Config, prompts: torch.Tensor) -> FirstTokens:
    """Sample all prompts to the end."""
    begin = time.perf_counter()
    with submitted(sampler, config, prompts) as samples:
        while not (news := sampler.step()):
            pass
        seconds = time.perf_counter() - begin
        while sampler.busy:
            sampler.step()
    count = sum(len(tokens) for _, tokens in news) if len(news) == len(samples) else 0
    return FirstTokens(seconds, count)


def profiled_halfway(
    sampler: Sampler, config: Config, row: str, prompts: torch.Tensor, traces: str | None
) -> dict[str, dict]:
    """Profile a call of `sampler.step` when the first sample has half of its tokens.

    At least two calls must remain then: one is timed, one profiled. Otherwise warn and return {}.
    """
    new = config.rollout.max_tokens
    before = min(new // 2, new - 2 * sampler.steps)
    if before < 1:
        short = f"{new} tokens are too few for three times {sampler.steps}"
        print(f"warning: {row}: no profile: {short}", file=sys.stderr)
        return {}
    with submitted(sampler, config, prompts) as samples:
        while len(samples[0].produced) < before:
            sampler.step()
        seconds = timed(sampler.step, sampler.device)
        return profiled(row, sampler.step, seconds, sampler.device, traces)


def sample_with_transformers(model, config: Config, prompts: torch.Tensor) -> None:
    """Sample as many tokens of the same prompts by transformers' `generate`."""
    rollout = config.rollout
    prompts = prompts.repeat_interleave(config.grpo.group, 0).to(model.device)
    options = {"min_new_tokens": rollout.max_tokens, "max_new_tokens": rollout.max_tokens}
    options |= {"eos_token_id": None, "pad_token_id": 0, "do_sample": rollout.temperature > 0}
    if rollout.temperature:
        options |= {"temperature": rollout.temperature, "top_k": 0}
    model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)


def sampling_figures(
    config: Config, row: str, device, seconds: list[list[float]], matmul: float, length: int
) -> dict:
    """Return the result from the seconds of each step: our run's, then the other library's if any.

    FLOPs: a prompt is computed once for its group, its continuations once for each sample, and the
    head for new tokens only. A forward pass has a third of the FLOPs of a training step.
    """
    ours = [each[0] for each in seconds]
    prompts = config.batch.global_
    group = config.grpo.group
    new = config.rollout.max_tokens
    produced = prompts * group * new
    tokens = produced / median_high(ours) / config.parallel.tp
    model = config.model.config
    prompt = length * flops_per_token(model, length, clean) / 3
    whole = (length + new) * flops_per_token(model, length + new, clean) / 3
    # no logits are needed at the prompt's tokens
    head = 2 * length * model.hidden_size * model.vocab_size
    flops = (prompt - head + group * (whole - prompt)) / (group * new)
    outcome = result(config, row, device, ours, matmul, TokenFlops(flops, flops), tokens)
    outcome |= {"ratio": None, "prompt_tokens": prompts * length, "new_tokens": produced}
    return outcome | (versus_result("transformers", seconds) if len(seconds[0]) > 1 else {})


def decoding_figures(
    config: Config, totals: list[float], firsts: list[FirstTokens], memory: float, itemsize: int
) -> dict[str, float]:
    """Return the figures of the decoding phase, which follows the first tokens of all samples.

    totals: seconds of each step. firsts: what `sample` returned in each. memory: its bandwidth in
    bytes/s. itemsize: bytes per weight.
    """
    samples = config.batch.global_ * config.grpo.group
    new = config.rollout.max_tokens
    tp = config.parallel.tp
    rates = []
    for total, (first, count) in zip(totals, firsts, strict=True):
        if 0 < count < samples * new:
            rates.append((samples * new - count) / (total - first))
    outcome = {"first_tokens_s": median_high([first for first, _ in firsts])}
    if not rates:
        return outcome
    rate = median_high(rates)
    outcome["decode_tokens_per_sec_per_gpu"] = rate / tp
    # otherwise data- or expert-parallel ranks hold parts of the weights and exchange them
    if dist.get_world_size() == tp:
        model = config.model.config
        context = config.batch.seq_len - new / 2
        read = sum(bytes_read(model_reads(model, itemsize), model, samples, context, tp))
        outcome["decode_mbu"] = read * rate / samples / memory
        outcome["memory_bytes_per_sec"] = memory
    return outcome
