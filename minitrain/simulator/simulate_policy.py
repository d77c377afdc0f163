"""Predict a GRPO step on another machine: `--simulate` for rows of task=grpo.

    sampling    one decoding step per token. It takes the host's time, then reads from memory the
                weights (only experts that its tokens select) and the caches of all unfinished
                samples, at the share of the bandwidth that decoding kernels reach, and all-reduces
                over tensor-parallel ranks. Response lengths are log-normal with the published mean,
                cut off at the limit, so that the longest samples decode almost alone. If there are
                more samples than rollout.slots, rounds of that many follow each other. With drafts
                in `reference`, a step computes them, too, and a layer for each, and yields as many
                tokens as their acceptance says. With turns, replies lengthen the caches, and each
                sample waits for them while others go on. With grpo.in_flight, the samples of
                grpo.lag further steps are decoded at the same time, so none is alone. Published
                runs one step off are not known to begin the next step's samples: as if they did,
                three of five would be predicted 17 to 65 % too fast
    log-probs   one forward pass of the old policy if there is more than one update, and one of the
                reference
    training    the simulated optimizer step, with fully packed rows
    refit       every sampler receives its share of the weights, in bf16, over the slowest link
                between the ranks; with grpo.offload, optimizer states and the reference move to the
                host and back

With separate GPUs for sampling, samplers and trainers run at the same time, and a step takes as long
as the slower of them. Left out: rewards, prefill, and the memory of KV caches, which use what is
left.

The stack of a published run has further costs: see `Stack`. How much of `far_step` a draft and its
verification add is not known: they add nothing here, so a pass takes 1.08 times as long with a draft.
NeMo RL publishes DeepSeek-V3 as 1.18 and 1.24 times as fast with one, on policy and one step off. Of all
drafts 0.48 and 0.42 would have to be right for that; if 0.8 are, a pass takes 1.31 to 1.36 times as long.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from torch import Tensor

from minitrain.bench.decoding import Reads, bytes_read, model_reads
from minitrain.bench.figures import rates
from minitrain.bench.measure_policy import published_lengths
from minitrain.grpo.batches import enough_for_pipeline
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.zoo import empty_model
from minitrain.run.config.ranks import row_ranks, stated_ranks
from minitrain.run.monitor.flops import policy_flops
from minitrain.settings import GRPO, Config, Data
from minitrain.simulator.simulate import TWICE, Simulation
from minitrain.simulator.timeline import System, peak_rate
from minitrain.training.footprint import state_bytes

# standard deviation of the logarithm of response lengths: assumed, and decode_* of nemo-rl are fitted with it
LENGTH_SPREAD = 0.8


@dataclass(frozen=True)
class Stack:
    """Costs of a published run beyond kernels and messages; systems.yaml documents the fields."""

    gather: float
    tensor: float
    offload: float
    wake: float
    prepare: float
    far_step: float


@dataclass
class Rollouts:
    """The number and lengths of a step's samples."""

    responses: int
    # tokens of each prompt
    prompt: int
    # tokens of a response that are sampled, on average and at most
    mean: int
    limit: int
    # tokens in it that are replies of an environment, on average, and the seconds that these take
    replies: float
    waits: float

    @property
    def tokens(self) -> float:
        """Return the tokens of all prompts and responses."""
        return self.responses * (self.prompt + self.mean + self.replies)


def policy_figures(
    config: Config, system: System, simulation: Simulation, stack: Stack | None
) -> dict:
    """Return the figures that involve time. stack: that of a published run; None for ours."""
    phases = phase_seconds(config, system, simulation, stack)
    tokens = rollouts_of(config).tokens
    rate = tokens / phases["step_time_s"] / stated_ranks(config)
    flops = policy_flops(config)(tokens)
    return phases | rates(config, rate, peak_rate(config, system), flops, flops)


def rollouts_of(config: Config) -> Rollouts:
    lengths = published_lengths(config)
    responses = config.grpo.prompts * config.grpo.group
    prompt = lengths.grpo.mock_digits + 1
    row = config.reference
    between = row.get("turns", 1) - 1
    return Rollouts(
        responses,
        prompt,
        mean=lengths.rollout.max_tokens,
        limit=config.rollout.max_tokens,
        replies=between * row.get("reply_tokens", 0),
        waits=between * row.get("environment_s", 0.0),
    )


def phase_seconds(
    config: Config, system: System, simulation: Simulation, stack: Stack | None
) -> dict[str, float]:
    """Return the seconds of each phase, and of the step. stack: see policy_figures."""
    updates = updates_of(config)
    training = updates * simulation.step
    # forward passes for log-probabilities; published stacks always run both
    passes = 2 if stack else (updates > 1) + (config.grpo.kl > 0)
    seconds = {
        "generation_s": generation_seconds(config, system, stack),
        "logprobs_s": passes * forward_share(config) * training,
        "training_s": training,
        "refit_s": refit_seconds(config, system, stack),
    }
    sampler = seconds["generation_s"]
    trainer = seconds["logprobs_s"] + seconds["training_s"]
    step = max(sampler, trainer) if config.grpo.generation_ranks else sampler + trainer
    return {
        "step_time_s": step + seconds["refit_s"] + (stack.prepare if stack else 0.0),
        **seconds,
    }


def memory_besides_steps(config: Config, peak: dict[str, int]) -> dict[str, int]:
    """Return the bytes, by kind, that a training rank holds besides those of an optimizer step.

    reference: the reference model, sharded like the policy. sampler: the sampler's copy of the model,
    on ranks that also sample, unless they share the policy's own weights. With offload, both count
    only as far as they exceed what training frees.
    """
    sampler = 0
    shared = stated_ranks(config) == config.rollout.tp == 1
    if not (shared or config.grpo.generation_ranks):
        count = sum(p.numel() for p in empty_model(config.model.config).parameters())
        sampler = count * (4 if config.precision == "fp32" else 2) // config.rollout.tp
    reference = peak["parameters"] if config.grpo.kl and not config.lora else 0
    if config.grpo.offload:
        training = sum(peak.values()) - peak["parameters"]
        reference, sampler = (
            max(0, reference - training),
            max(0, sampler - max(training, reference)),
        )
    return {"reference": reference, "sampler": sampler}


# --- training


def training_config(config: Config) -> Config:
    """Return the config of one optimizer step of GRPO, on its share of the rollouts.

    It is language modeling on mock tokens, whose step has the same operators.
    """
    rows = row_ranks(config) * config.batch.micro
    packs = math.ceil(
        rollouts_of(config).tokens / updates_of(config) / config.batch.seq_len / rows
    )
    batch = replace(config.batch, global_=enough_for_pipeline(config.parallel, packs) * rows)
    return replace(config, task="pretrain", batch=batch, data=Data(), grpo=GRPO())


def updates_of(config: Config) -> int:
    """Return the number of optimizer steps per GRPO step."""
    return max(1, config.grpo.prompts * config.grpo.group // config.batch.global_)


def forward_share(config: Config) -> float:
    """Return a forward pass's share of the time of a training step.

    Training computes three products per weight, or two if the weight is frozen; a forward pass
    computes one. Recomputing the forward pass adds one to training.
    """
    return 1 / ((2 if config.lora else 3) + (config.recompute in TWICE))


# --- sampling


def generation_seconds(config: Config, system: System, stack: Stack | None) -> float:
    """Return the seconds in which every sampler finishes a step's share, summed over decoding steps."""
    tp = config.rollout.tp
    gpus = config.grpo.generation_ranks or stated_ranks(config)
    rollouts = rollouts_of(config)
    model = config.model.config
    reads = model_reads(model)
    samples = rollouts.responses * tp / gpus
    location = log_normal_location(rollouts.mean, rollouts.limit)
    # rounds of at most rollout.slots samples; published samplers decode all at once
    turns = 1 if stack else math.ceil(samples / config.rollout.slots)
    step = max(1, rollouts.limit // 256)
    drafts = config.reference.get("drafts", 0)
    # tokens of a pass: drafts count until one is wrong
    accepted = sum(config.reference.get("acceptance", 0.0) ** i for i in range(drafts + 1))
    far = stack.far_step if stack and tp > system.domain else 0.0
    # samples that are unfinished at a position, and their context
    unfinished = []
    for position in range(0, rollouts.limit, step):
        left = samples / turns * share_longer(position, location)
        # all samples have ended
        if left < 0.5 and position:
            break
        replies = rollouts.replies * min(1.0, position / rollouts.mean)
        unfinished.append((left, rollouts.prompt + position + replies))
    # steps whose samples are decoded at the same time, each further than the one that began after it
    begun = 1 + (config.grpo.lag if config.grpo.in_flight and not stack else 0)
    apart = math.ceil(len(unfinished) / begun)
    seconds = rollouts.waits / begun
    for n in range(apart):
        together = unfinished[n::apart]
        left = sum(count for count, _ in together)
        context = sum(count * tokens for count, tokens in together) / left
        left = max(left, 1.0)
        pass_seconds = decoding_seconds(system, model, reads, left, context, tp, drafts + 1)
        if drafts:
            pass_seconds += drafts * draft_seconds(system, model, left, context, tp)
        seconds += turns * step / accepted * (pass_seconds + far)
    return seconds


def draft_seconds(
    system: System, model: DecoderConfig, samples: float, context: float, tp: int
) -> float:
    """Return the seconds of a draft by a layer of multi-token prediction, in the step of the model.

    Its projection of hidden states and embeddings is left out.
    """
    layer = replace(model, num_layers=1, layer_pattern="", first_k_dense_replace=0)
    prepared = replace(system, decode_step=0.0)
    return decoding_seconds(prepared, layer, model_reads(layer), samples, context, tp)


def decoding_seconds(
    system: System,
    model: DecoderConfig,
    reads: Reads,
    samples: float,
    context: float,
    tp: int,
    together: int = 1,
) -> float:
    """Return the seconds of a decoding step of `samples` with `context` cached tokens each.

    together: see `bytes_read`.
    """
    weights, caches = bytes_read(reads, model, samples, context, tp, together)
    # within an NVLink domain an all-reduce is a single kernel, with half of the latency
    exchange = system.latency / 2 if tp <= system.domain else system.far_latency
    exchanges = 2 * model.num_layers * exchange if tp > 1 else 0.0
    reading = weights / system.decode_weights + caches / system.decode_caches
    return reading / system.memory + exchanges + system.decode_step


def log_normal_location(mean: float, limit: int) -> float:
    """Return the location of the log-normal whose mean is `mean` when cut off at `limit`."""
    points = [limit * (i + 0.5) / 512 for i in range(512)]
    low = 0.0
    high = math.log(limit) + 3
    for _ in range(60):
        middle = (low + high) / 2
        too_short = sum(share_longer(x, middle) for x in points) * limit / 512 < mean
        low, high = (middle, high) if too_short else (low, middle)
    return (low + high) / 2


def share_longer(length: float, location: float) -> float:
    """Return the share of responses that are longer than `length`, without the limit."""
    return NormalDist(-location, LENGTH_SPREAD).cdf(-math.log(max(length, 1e-9)))


# --- refit


def refit_seconds(config: Config, system: System, stack: Stack | None) -> float:
    """Return the seconds until each GPU of a sampler has received 1 / tp of the merged weights.

    They are sent over the network, unless all GPUs share an NVLink domain. A published stack gathers
    all weights on every GPU. If its GPUs also sample, it then passes the weights on tensor by tensor,
    and moves optimizer states off the GPU and back.
    """
    parameters = list(empty_model(config.model.config).named_parameters())
    gpus = stated_ranks(config)
    count = sum(p.numel() for _, p in parameters)
    if stack is None:
        bandwidth = system.nvlink if gpus <= system.domain else system.network
        weights = 2 * count / config.rollout.tp / bandwidth
        return weights + offload_seconds(config, system, parameters) / gpus
    gathering = 2 * count / stack.gather
    if config.grpo.generation_ranks:
        return gathering
    tensors = sum(len(p) if ".experts." in name and p.dim() == 3 else 1 for name, p in parameters)
    return gathering + tensors * stack.tensor + stack.wake + 12 * count / gpus / stack.offload


def offload_seconds(
    config: Config, system: System, parameters: list[tuple[str, Tensor]]
) -> float:
    """Return the seconds in which one GPU would move all optimizer states and the reference.

    They move to the host and back. parameters: the model's, by name.
    """
    # states of adapters are small
    if not config.grpo.offload or config.lora:
        return 0.0
    reference = 0
    if config.grpo.kl:
        reference = 2 if config.precision == "bf16-pure" else 4
    size = state_bytes(parameters, config.optim)
    size += reference * sum(parameter.numel() for _, parameter in parameters)
    return 2 * size / system.host_link
