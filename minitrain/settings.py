"""State every setting by its YAML key; run/config/load.py reads them, run/config/checks.py checks."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

LARGEST_RANK = 1 << 16  # of adapters
LARGEST_ALPHA = 10**9
# above any ratio of probabilities (e^20, see grpo/objective.py), below what fp32 holds
RATIO = 10**9


def number(default: float, least: float, most: float = 2**63 - 1) -> Any:
    """Return the field of a setting that must lie between `least` and `most`."""
    return field(default=default, metadata={"least": least, "most": most})


@dataclass
class Model:
    """The model: `model: NAME`, `model: FOLDER`, or a mapping of the fields below."""

    name: str = ""  # of the zoo, with random weights
    path: str = ""  # a folder in Hugging Face layout, whose weights training starts from
    config: Any = None  # a DecoderConfig, or a WanConfig if the task is diffusion


@dataclass
class Source:
    """One of the data's sources that are mixed. What it leaves out is as in `data`."""

    path: str | list[str] = ""  # files, folders or globs
    weight: float = 1.0  # rows are taken by it, in any unit: shares are of the sum
    name: str = ""  # metrics.jsonl has its loss as loss/NAME; default: the path
    kind: Literal["text", "jsonl", "tokens"] | None = None  # default: data.kind
    field: str | None = None  # default: data.field

    @property
    def label(self) -> str:
        return self.name or str(self.path)


@dataclass
class Data:
    """The training data: see data/text/text_rows.py; for diffusion, data/video/latents.py and examples/shapes.py."""

    # mock: random tokens, for benchmarks; shapes: a toy world of videos
    kind: Literal["mock", "text", "jsonl", "tokens", "latents", "shapes"] = "mock"
    path: str | list[str] = ""  # files, folders or globs; {stdlib} is Python's own library
    # in place of path: several, mixed by weight, as [{path: a, weight: 0.7}, {path: b, weight: 0.3}]
    sources: list[Source] = field(default_factory=list)
    # glob patterns of paths to leave out, or of their ends
    exclude: list[str] = field(default_factory=list)
    # mock latents: frames, height, width
    size: list[int] = field(default_factory=lambda: [24, 104, 60])
    # jsonl, parquet, arrow: the key that holds the text; chats are looked for (data/chat/chats.py)
    field: str = "text"
    # fine-tuning: how chats become text
    template: Literal["auto", "llama3", "chatml", "plain"] = "auto"
    # fine-tuning: chats longer than batch.seq_len
    over_long: Literal["truncate", "drop"] = "truncate"
    packed: bool | None = None  # do chats share rows; None: they do; mock chats: as SQuAD's
    # or a tokenizer.json, or a folder that holds one; tokens: what to save with the model
    tokenizer: str = "bytes"
    # tokens: of raw .bin files (.npy files know theirs)
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    # tokens: the id that ends a document; None: one document per file
    document_end: int | None = None
    # pretraining: cut documents where a row ends, or pad rows so that none that fits one is cut
    packing: Literal["cut", "whole"] = "cut"
    # text, jsonl to pretrain on: a folder for their tokens, which then need not fit in memory
    cache: str = ""
    # at lines, files or rows of tokens that cannot be used
    on_error: Literal["error", "skip"] = "error"
    text_tokens: int = number(512, 1, 1 << 20)  # latents: texts are padded to this many tokens
    validation: float = 0.0  # the share of documents, or of videos, held out
    validation_path: str | list[str] = ""  # or these files, of the same kind


@dataclass
class Batch:
    """Batch sizes. For diffusion a sequence is a video, in patches."""

    global_: int = number(8, 1, 1 << 24)  # sequences per optimizer step, over all ranks
    micro: int = number(8, 1)  # sequences per rank and forward pass
    seq_len: int = number(1024, 1, 1 << 30)  # tokens of a sequence, or most patches of a video


@dataclass
class Parallel:
    """Layout of the ranks, whose number is dp_replicate x dp_shard x cp x tp x pp.

    dp_shard=-1 takes all ranks that the others leave.
    """

    dp_replicate: int = number(1, 1)  # copies of the parameters, each trained on different rows
    dp_shard: int = -1  # shards of the parameters, each rank trained on different rows
    tp: int = number(1, 1)  # tensor and sequence parallel: heads, MLP channels, vocabulary
    cp: int = number(1, 1)  # context parallel: each row's sequence
    pp: int = number(1, 1)  # pipeline parallel: layers
    # expert parallel: experts, over ranks that are counted already; divides dp_shard x cp x tp
    ep: int = number(1, 1)
    # true (ZeRO-3): free a block's weights after each use, reduce gradients after every
    # micro-batch; false (ZeRO-2): both once per step. In a pipeline gradients are reduced once;
    # true frees weights of all but the next three stages. None: true, but where a rank has the
    # whole model, whose weights in bf16 it would only copy anew
    reshard_after_forward: bool | None = None
    # type of gradients while ranks are summed; micro-batches: see precision
    reduce: Literal["fp32", "bf16"] = "fp32"
    prefetch: int = number(1, 0)  # how many blocks ahead to gather
    # how context-parallel ranks exchange keys and values
    context: Literal["allgather", "ulysses"] = "allgather"
    # of pipeline stages: see parallel/pipeline.py
    schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    vp: int = number(1, 1)  # pipeline stages per rank
    # embedding and head count as a layer each; default: as even as possible
    layers_per_stage: list[int] | None = None
    # where stages are as even as possible, the head counts as so many layers
    head_layers: int = number(1, 1)


@dataclass
class Optim:
    """The optimizer and its learning-rate schedule: see training/optim.py."""

    # sgd: without momentum; muon: of the matrices in blocks, AdamW for the rest
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = number(3e-4, 0)  # the highest of the schedule
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = number(0.1, 0)  # of matrices, times lr
    clip: float | None = 1.0  # largest norm of the gradient; null: none
    # this many steps in a row without a finite loss and gradient norm end the run
    max_skipped: int = number(10, 1)
    states: Literal["fp32", "bf16"] = "fp32"  # of AdamW's moments
    # of the weights and states that are stored in bf16; Muon's weights need it there
    stochastic_rounding: bool = False
    ema: float = number(0.0, 0, 1)  # decay of the weights' average (training/ema.py); 0: none
    ema_warmup: bool = False  # a smaller decay in the first steps
    newton_schulz: Literal["bf16", "fp32"] = "bf16"  # type of Muon's matrix products
    # after the warm-up; wsd: constant, then linear over the last steps
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    decay: float = 0.1  # of wsd: the share of steps, at the end, in which the rate falls
    warmup: int = number(0, 0)  # first steps, in which the rate rises
    final_lr: float = 0.0  # as a share of lr, reached at the last step, if two follow the warm-up


@dataclass
class Fp8:
    """FP8 matrix products, with precision=fp8: see models/fp8.py."""

    # which products Hopper sums with fewer bits
    fast_accumulation: Literal["none", "forward", "all"] = "none"
    # routed experts too, where a rank has one of them (parallel.ep = their number)
    experts: bool = False
    # weights are kept transposed, too, a byte for each of a rank's, unsharded: spares transposing
    # for each micro-batch
    keep_transposed: bool = False


@dataclass
class Validation:
    """Validation on what is held out, while training and after the last step."""

    every: int = number(0, 0)  # steps; 0: never
    batches: int = number(8, 1)  # held-out batches of batch.global
    # held-out chats that are answered at the end and compared; 0: none
    exact_match: int = number(0, 0)


@dataclass
class Checkpoint:
    """Checkpoints, while training and after the last step."""

    every: int = number(0, 0)  # steps; 0: only by time and at the end
    minutes: float = number(10.0, 0)  # after the one before; 0: not by time
    keep: int = number(2, 1)  # the newest ones that stay on disk
    asynchronous: bool = False  # training goes on while one is written
    resume: bool = True  # from the newest complete checkpoint under out_dir, if there is one


@dataclass
class Metrics:
    """Reports besides metrics.jsonl: see run/monitor/health.py and run/monitor/metrics.py."""

    # report losses this many deviations above the recent median, with their batch; 0: none
    spike: float = number(6.0, 0)
    tensorboard: bool = False  # to out_dir/tensorboard; needs the package tensorboard
    # package.module:function of one's own, called with the dict of each step's numbers, on rank 0
    logger: str = ""


@dataclass
class Profile:
    """Records of operations and memory in out_dir/profile: see run/monitor/profiling.py."""

    steps: list[int] = field(default_factory=list)  # [first, last]: the operations of these steps
    memory: bool = False  # CUDA only: all allocations, up to the last of these steps or the end


@dataclass
class Rollout:
    """Sampling of responses: see rollout/."""

    temperature: float = number(1.0, 0)  # of sampling
    max_tokens: int = number(128, 1, 1 << 30)  # of a response
    tp: int = number(1, 1)  # task=grpo: ranks that share a sampler's model
    # task=grpo: set to rollout.tp, it gives these ranks whole experts, not channels of all
    ep: int = number(1, 1)
    slots: int = number(256, 1, 1 << 20)  # samples that are decoded at once, at most
    page_size: int = number(128, 1, 1 << 20)  # tokens; on CUDA a multiple of 128
    pages: int = number(0, 0, 1 << 24)  # in the pool; 0: as many as fit into `memory`
    memory: float = 0.5  # a share of what is free when the pool is made
    chunk: int = number(2048, 1, 1 << 30)  # prompt tokens that are computed at once
    # decoding steps between two looks at their tokens; 0: 16 on CUDA, 1 on the CPU
    steps: int = number(0, 0, 1 << 20)
    # the blocks of decoding steps and, unless ranks share the model, the choice of tokens
    compile: bool = False


@dataclass
class GRPO:
    """Reinforcement learning on groups of samples, by default NeMo RL's GRPO: see grpo/objective.py.

    A step samples `group` responses to each of `prompts` prompts (see `rollout`), and updates the
    weights once for every batch.global of them.
    """

    prompts: int = number(16, 1, 1 << 24)  # problems per step
    group: int = number(8, 1, 1 << 24)  # responses to each of them
    # exact, math, math_verify (symbolic, slower; pip install 'minitrain[math]'), or a function of
    # one's own as package.module:name (see grpo/rewards.py)
    reward: str = "exact"
    # of the lines of data.path; default: the first usual name in a line (data/chat/problems.py)
    prompt_key: str = ""
    answer_key: str = ""  # of the lines of data.path, too: what the reward compares with
    mock_digits: int = number(4, 1, 1000)  # data.kind=mock: length of the texts to reverse
    # taken off a reward: the mean of its group, with or without itself
    baseline: Literal["group", "leave_one_out"] = "leave_one_out"
    std_scaling: bool = True  # divide advantages by the standard deviation of their group
    # of probabilities now and when the step began, for each token or as a mean over its response
    ratio: Literal["token", "sequence"] = "token"
    # what limits that ratio: see grpo/objective.py
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    clip_low: float = number(0.2, 0, RATIO)  # the ratio's limits are 1 - clip_low ...
    clip_high: float = number(0.2, 0, RATIO)  # ... and 1 + clip_high
    # where advantages are negative, the loss is at most so many times them; null: no limit
    dual_clip: float | None = None
    # what counts alike in a step's mean loss: tokens, or responses
    aggregation: Literal["token", "sequence", "constant"] = "token"
    # weight of the divergence from the initial policy; with adapters, from the base model
    kl: float = number(0.0, 0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of that divergence (Schulman's k1, k2, k3)
    # correct for what differs between sampler and trainer: limit a token's weight, or leave it out
    importance: Literal["none", "truncate", "mask", "sequence-mask"] = "none"
    # below it a weight is raised to it, or with mask left out
    importance_low: float = number(0.0, 0, RATIO)
    # above it a weight is lowered to it, or with mask left out; 1e9 is above any
    importance_high: float = number(2.0, 0, RATIO)
    # above 1: groups without a signal are replaced, in up to so many rounds of sampling (DAPO)
    generations: int = number(1, 1, 1000)
    # the last tokens before a response would be cut off, over which the reward falls
    overlong_buffer: int = number(0, 0)
    overlong_penalty: float = number(1.0, 0)  # by this much
    overlong_filter: bool = False  # leave truncated responses out of the loss
    # 1: sample with weights one step old, so that sampling and training can overlap
    lag: Literal[0, 1] = 0
    # the last ranks only sample, the others only train (needs lag=1); 0: all do both
    generation_ranks: int = number(0, 0)
    keep_cache: bool = False  # keep the sampler's KV cache while its rank trains
    # sampling, log-probabilities and training leave each other their memory (grpo/offload.py)
    offload: bool = False
    # of supervised training on the answers, before the first step
    warmup_steps: int = number(0, 0, 1 << 20)
    warmup_lr: float = number(1e-3, 0)  # the learning rate of that
    eval_samples: int = number(8, 1, 1 << 20)  # per held-out prompt, for pass@k
    # steps whose responses stay in out_dir/rollouts, the newest ones; 0: all
    keep_rollouts: int = number(100, 0)


@dataclass
class DPO:
    """Learning from pairs of replies: see training/dpo.py."""

    beta: float = number(0.1, 1e-6)  # higher: the model stays closer to the one it starts from
    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # DPO's, or IPO's square around a margin
    length_normalized: bool = False  # log-probabilities are means over a reply's tokens


DECODER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WAN_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
TARGETS = DECODER_TARGETS + WAN_TARGETS


@dataclass
class Lora:
    """Low-rank adapters; with them, whatever the task, only they are trained.

    Dropout of the adapters' input (pre) is as in peft, of their update (post) as NeMo AutoModel has
    it by default: that keeps no second copy of the input.
    """

    rank: int = number(16, 1, LARGEST_RANK)  # of the matrices A and B
    alpha: float = number(32.0, 0, LARGEST_ALPHA)  # updates are scaled by alpha / rank
    # the share of channels that adapters do not see, in training; which, depends on the ranks: a run
    # that continues on another number of them draws others
    dropout: float = 0.0
    dropout_position: Literal["pre", "post"] = "pre"  # of the adapters' input, or of their update
    rslora: bool = False  # by alpha / sqrt(rank)
    # names of Linears, or the ends of them
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    # of A and B as they are stored; they compute in the type of their input
    dtype: Literal["fp32", "bf16"] = "fp32"
    # what to start from, a folder in PEFT's format or a file of Wan's adapters (formats/peft.py),
    # whose rank, alpha, rslora and targets then hold
    path: str = ""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Diffusion:
    """Drawing and weighing of sigmas.

    sampling, of u between 0 and 1: uniform; logit_normal, sigmoid(mean + std * normal); mode, heavy
    at both ends if mode_scale > 0 (both Esser et al. 2024, section 3.1); mixed, logit_normal but
    for a uniform_share of the samples.
    shift: then sigma = shift u / (1 + (shift - 1) u), more noise for larger videos.
    weighting: none; linear, 1 + shift sigma; bell, exp(-2 (sigma - 1/2)^2) less its minimum, of
    mean 1 over evenly spaced u (DiffSynth); sigma_sqrt, sigma^-2, and cosmap, 2 / (pi (1 - 2 sigma +
    2 sigma^2)), of Stable Diffusion 3 (diffusers).
    """

    # the distribution of u, from which sigmas are made: see above
    sampling: Literal["uniform", "logit_normal", "mode", "mixed"] = "uniform"
    mean: float = 0.0  # of logit_normal and mixed
    std: float = 1.0  # of logit_normal and mixed
    mode_scale: float = 1.29  # of mode
    uniform_share: float = 0.1  # of mixed
    shift: float = 3.0  # above 1: more noise, as larger videos need
    sigma_min: float = 0.0  # only sigmas of at least this are drawn ...
    # ... and at most this, as often one beside the other as without limits
    sigma_max: float = 1.0
    # of a sample's loss, by its sigma
    weighting: Literal["none", "linear", "bell", "sigma_sqrt", "cosmap"] = "none"
    # what counts alike in a step: each video, or each element, so a video by its size
    reduction: Literal["sample", "element"] = "sample"
    # the share without their text, which classifier-free guidance needs (Ho & Salimans 2022)
    text_dropout: float = 0.1


@dataclass
class Config:
    """A run."""

    model: Model = field(default_factory=Model)
    # how it is trained, and on what
    task: Literal["pretrain", "sft", "diffusion", "lora", "grpo", "dpo"] = "pretrain"
    steps: int = number(100, 1)  # updates of the weights
    epochs: float = number(0.0, 0)  # above 0, in place of steps: passes over the data
    seed: int = number(0, 0, 2**63 - 1)  # of weights, order of the data and dropout
    out_dir: str = "out/run"  # for checkpoints, metrics and the result
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    parallel: Parallel = field(default_factory=Parallel)
    # bf16: fp32 weights, computed with in bf16; fp8: the same, with the blocks' matrix products in
    # FP8; bf16-pure: also stored in bf16, as are gradients: rounding their sum over 64
    # micro-batches costs 0.8 %, as much as bf16's products do, unless
    # parallel.reshard_after_forward=false or replicas let two ranks or more add them up in
    # parallel.reduce
    precision: Literal["fp32", "bf16", "bf16-pure", "fp8"] = "fp32"
    fp8: Fp8 = field(default_factory=Fp8)
    optim: Optim = field(default_factory=Optim)
    # with it, whatever the task, only adapters are trained; task=lora is sft with them
    lora: Lora | None = None
    diffusion: Diffusion = field(default_factory=Diffusion)
    rollout: Rollout = field(default_factory=Rollout)
    grpo: GRPO = field(default_factory=GRPO)
    dpo: DPO = field(default_factory=DPO)
    compile: bool = False  # torch.compile, block by block
    # of activations, none or a block every n: see parallel/recompute.py
    recompute: Literal["none", "full", "attention", "selective"] | int = "none"
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    deterministic: bool = False  # bitwise reproducible: see run/launch/start.py
    # false: FlashAttention and FlexAttention where cuDNN's kernels are wrong (reported for some B200)
    cudnn_attention: bool = True
    # how long a rank waits for the others in a collective before it gives up
    timeout_s: float = number(600.0, 1, 1000000)
    reference: dict = field(default_factory=dict)  # published figures of the same row
