"""State every setting by its YAML key; run/config/load.py reads them, run/config/checks.py checks."""

import math
from dataclasses import dataclass

# not as `field`: a key of the data has that name
from dataclasses import field as setting
from typing import Any, Literal

from minitrain.tasks import TASKS

# limits of adapters
MAX_LORA_RANK = 1 << 16
MAX_LORA_ALPHA = 10**9
# above any ratio of probabilities (e^20, see grpo/objective.py), below what fp32 holds
MAX_RATIO = 10**9


def number(
    default: float,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return the field of a number with limits, included (least, most) or excluded (above, below)."""
    limits = {"least": least, "above": above, "most": most, "below": below}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return setting(default=default, metadata=given)


@dataclass
class Model:
    """The model: `model: NAME`, `model: FOLDER`, or a mapping of the fields below."""

    name: str = ""  # name of a model of the zoo, which gets random weights
    path: str = ""  # folder in Hugging Face layout, whose weights training starts from
    config: Any = None  # a DecoderConfig, or a WanConfig if the task is diffusion


@dataclass
class Source:
    """One of several data sources that are mixed. Unset fields default to those of `data`."""

    path: str | list[str] = ""  # files, folders or globs
    weight: float = 1.0  # share of the rows, relative to the sum of all weights
    name: str = ""  # names its loss in metrics.jsonl, loss/NAME; default: the path
    # kind of its files; default: data.kind
    kind: Literal["text", "jsonl", "tokens"] | None = None
    field: str | None = None  # key that holds the text; default: data.field
    teacher: str = ""  # whose distributions are learned on it; default: distill.teacher

    @property
    def label(self) -> str:
        return self.name or str(self.path)


@dataclass
class Data:
    """The training data: see data/text/text_rows.py; for diffusion, data/video/latents.py and examples/shapes.py."""

    # what the data is; mock: random tokens, for benchmarks; shapes: a toy world of videos
    kind: Literal["mock", "text", "jsonl", "tokens", "latents", "shapes"] = "mock"
    path: str | list[str] = ""  # files, folders or globs; {stdlib} is Python's own library
    # several sources in place of `path`, mixed by weight, such as [{path: a, weight: 0.7}, {path:
    # b, weight: 0.3}]
    sources: list[Source] = setting(default_factory=list)
    # glob patterns of the files to leave out, matched against whole paths and their ends
    exclude: list[str] = setting(default_factory=list)
    # frames, height and width of mock latents
    size: list[int] = setting(default_factory=lambda: [24, 104, 60])
    # key of the text in jsonl, parquet and arrow files; those of chats are found by themselves
    field: str = "text"
    # chat template of fine-tuning: how chats become text
    template: Literal["auto", "llama3", "chatml", "plain"] = "auto"
    # what fine-tuning does with chats longer than batch.seq_len
    over_long: Literal["truncate", "drop"] = "truncate"
    # whether chats share rows; null: they do. Mock chats that do are as long as SQuAD's
    packed: bool | None = None
    # "bytes", a tokenizer.json, or a folder that holds one; unset, that of the folder that training
    # starts from, if it has one; for kind=tokens it is only saved with the model
    tokenizer: str = "bytes"
    # type of the tokens in raw .bin files (.npy files say theirs)
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    # id that ends a document in token files; null: each file is one document
    document_end: int | None = None
    # how pretraining fills rows: cut documents where a row ends, or pad rows, so that no document
    # is cut that fits one
    packing: Literal["cut", "whole"] = "cut"
    # folder for the tokens of text and jsonl files to pretrain on, which need not fit in memory
    cache: str = ""
    # what happens at lines, files or rows of tokens that cannot be used
    on_error: Literal["error", "skip"] = "error"
    text_tokens: int = number(512, 1, 1 << 20)  # length to which the texts of videos are padded
    # share of the documents or videos that is held out
    validation: float = number(0.0, 0, below=1)
    validation_path: str | list[str] = ""  # files to hold out instead, of the same kind


@dataclass
class Batch:
    """Batch sizes. For diffusion a sequence is a video, in patches."""

    global_: int = number(8, 1, 1 << 24)  # sequences per optimizer step, over all ranks
    micro: int = number(8, 1)  # sequences per rank and forward pass
    seq_len: int = number(1024, 1, 1 << 30)  # tokens per sequence, or most patches of a video


@dataclass
class Parallel:
    """Layout of the ranks, of which there are dp_replicate x dp_shard x cp x tp x pp.

    dp_shard=-1 takes all ranks that the other dimensions leave.
    """

    dp_replicate: int = number(1, 1)  # copies of the parameters, each trained on different rows
    dp_shard: int = -1  # shards of the parameters, each rank trained on different rows
    tp: int = number(1, 1)  # tensor and sequence parallel: splits heads, MLP channels, vocabulary
    cp: int = number(1, 1)  # context parallel: splits the sequence of each row
    pp: int = number(1, 1)  # pipeline parallel: splits the layers
    # expert parallel: splits the experts over ranks of dp_shard x cp x tp, which ep must divide
    ep: int = number(1, 1)
    # true (ZeRO-3): a block's weights are freed after each use, and its gradients are reduced
    # after every micro-batch. false (ZeRO-2): both happen once per step. In a pipeline, gradients
    # are always reduced once per step, and true frees the weights of all but the next three
    # stages. null: false where a rank holds the whole model, true elsewhere
    reshard_after_forward: bool | None = None
    # type in which gradients are summed over ranks; for micro-batches, see precision
    reduce: Literal["fp32", "bf16"] = "fp32"
    prefetch: int = number(1, 0)  # how many blocks ahead FSDP gathers weights
    # how context-parallel ranks exchange keys and values
    context: Literal["allgather", "ulysses"] = "allgather"
    # order of the pipeline's micro-batches: see parallel/pipeline.py
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
    # layers of each stage, where embedding and head count as one each; null: as even as possible
    layers_per_stage: list[int] | None = None
    # number of layers that the head counts as when stages are balanced
    head_layers: int = number(1, 1)


@dataclass
class Optim:
    """The optimizer and its learning-rate schedule: see training/optim.py."""

    # sgd has no momentum; muon updates the matrices in blocks, and AdamW the rest
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float = number(3e-4, 0)  # the highest learning rate of the schedule
    betas: list[float] = setting(default_factory=lambda: [0.9, 0.95])  # decay of AdamW's moments
    eps: float = 1e-8  # term that AdamW adds to the denominator
    weight_decay: float = number(0.1, 0)  # decoupled decay of matrices, scaled by lr
    clip: float | None = 1.0  # largest norm of the gradient; null: no limit
    # number of steps in a row without a finite loss and gradient norm that end the run
    max_skipped: int = number(10, 1)
    states: Literal["fp32", "bf16"] = "fp32"  # type of AdamW's moments
    # round weights and states that are stored in bf16 stochastically; Muon's weights need it there
    stochastic_rounding: bool = False
    offload: bool = False  # keep AdamW's moments on the host, and update there
    # decay of the weights' moving average (training/ema.py); 0: no average
    ema: float = number(0.0, 0, below=1)
    ema_warmup: bool = False  # use a smaller decay of the average in the first steps
    newton_schulz: Literal["bf16", "fp32"] = "bf16"  # type of Muon's matrix products
    # shape of the learning rate after the warm-up; wsd: constant, then linear over the last steps
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    # share of the steps, at the end, in which wsd lowers the learning rate
    decay: float = number(0.1, 0, 1)
    warmup: int = number(0, 0)  # number of first steps, in which the learning rate rises
    # learning rate of the last step as a share of lr, if at least two steps follow the warm-up
    final_lr: float = number(0.0, 0, 1)


@dataclass
class Fp8:
    """FP8 matrix products, with precision=fp8: see models/fp8.py."""

    # which numbers share a scale: all of a tensor, a row, 1 x 128 of activations with 128 x 128 of
    # weights (as DeepSeek-V3), or 1 x 32 (MXFP8); models/fp8_forms.py says what multiplies them
    form: Literal["tensor", "row", "block", "mx"] = "tensor"
    # which products are accumulated with fewer bits on Hopper
    fast_accumulation: Literal["none", "forward", "all"] = "none"
    # use FP8 for routed experts too; with form=tensor where each rank holds one of them
    # (parallel.ep = their number)
    experts: bool = False
    # keep a transposed copy of the weights, so that micro-batches need not transpose them; it
    # takes a byte for each weight that the rank holds once FSDP has gathered them
    keep_transposed: bool = False


@dataclass
class Validation:
    """Validation on what is held out, while training and after the last step."""

    every: int = number(0, 0)  # steps between two validations; 0: never
    batches: int = number(8, 1)  # number of held-out batches, each of batch.global sequences
    # number of held-out chats that are answered at the end and compared
    exact_match: int = number(0, 0)


@dataclass
class Checkpoint:
    """Checkpoints, while training and after the last step."""

    every: int = number(0, 0)  # steps between two checkpoints; 0: only by time and at the end
    minutes: float = number(10.0, 0)  # minutes between two checkpoints; 0: not by time
    keep: int = number(2, 1)  # how many of the newest checkpoints stay on disk
    # write and keep that of the best validation too: minitrain export --step best makes a model
    best: bool = False
    asynchronous: bool = False  # go on training while a checkpoint is written
    resume: bool = True  # continue from the newest complete checkpoint under out_dir, if any


@dataclass
class Metrics:
    """Reports besides metrics.jsonl: see run/monitor/health.py and run/monitor/metrics.py."""

    # report losses this many deviations above the recent median, with their batch; 0: report none
    spike: float = number(6.0, 0)
    # write to out_dir/tensorboard, too; needs the package tensorboard
    tensorboard: bool = False
    # your own package.module:function, called on rank 0 with the dict of each step's numbers
    logger: str = ""


@dataclass
class Profile:
    """Records of operations and memory in out_dir/profile: see run/monitor/profiling.py."""

    # [first, last] step whose operations are recorded
    steps: list[int] = setting(default_factory=list)
    # record all allocations up to the last of these steps, or to the end; CUDA only
    memory: bool = False


@dataclass
class Rollout:
    """Sampling of responses: see rollout/."""

    temperature: float = number(1.0, 0)  # divides the logits; 0: the likeliest token
    max_tokens: int = number(128, 1, 1 << 30)  # most tokens of a response
    tp: int = number(1, 1)  # number of ranks that share a sampler's model, with task=grpo
    # what these ranks hold: whole experts if set to rollout.tp, channels of all experts if 1
    ep: int = number(1, 1)
    slots: int = number(256, 1, 1 << 20)  # most samples that are decoded at once
    page_size: int = number(128, 1, 1 << 20)  # tokens per page; on CUDA a multiple of 128
    pages: int = number(0, 0, 1 << 24)  # pages of the pool; 0: as many as fit into `memory`
    # share of the memory that is free when the pool is made
    memory: float = number(0.5, above=0, most=1)
    chunk: int = number(2048, 1, 1 << 30)  # most prompt tokens that are computed at once
    # decoding steps after which the host looks at the tokens; 0: 16 on CUDA, 1 on the CPU
    steps: int = number(0, 0, 1 << 20)
    # compile the blocks of decoding steps and, unless ranks share the model, the choice of tokens
    compile: bool = False
    # what guesses tokens (rollout/drafting.py): the folder of a smaller model of the same
    # vocabulary, or mtp, the model's layer of multi-token prediction
    draft: str = ""
    draft_tokens: int = number(3, 1, 64)  # how many tokens it guesses at once


@dataclass
class GRPO:
    """Reinforcement learning on groups of samples, by default NeMo RL's GRPO: see grpo/objective.py.

    A step samples `group` responses to each of `prompts` prompts (see `rollout`), and updates the
    weights once for every batch.global of them.
    """

    prompts: int = number(16, 1, 1 << 24)  # prompts per step
    group: int = number(8, 1, 1 << 24)  # responses to each prompt
    # exact, math, math_verify (symbolic, slower; pip install -e '.[math]'), your own function as
    # package.module:name (see grpo/rewards.py), or the folder of a reward model, as task=reward makes
    reward: str = "exact"
    # what replies are sent to in place of a reward, package.module:Class (see grpo/environments.py)
    environment: str = ""
    turns: int = number(8, 1, 1 << 16)  # most replies of a sample to its environment
    # most seconds of a sample's environment, all its calls together
    environment_seconds: float = number(60.0, 0.001, 1e6)
    # an environment that fails, or takes longer, ends the run, or its sample with the reward 0
    environment_failure: Literal["stop", "zero"] = "stop"
    # seconds that decoding waits for answers, until one takes longer: then others go on meanwhile
    environment_wait: float = number(0.1, 0, 1e6)
    # key of the prompt in data.path's lines; default: a usual one (data/chat/read_problems.py)
    prompt_key: str = ""
    answer_key: str = ""  # key of the answer, with which the reward compares; default: likewise
    mock_digits: int = number(4, 1, 1000)  # length of the texts to reverse, with data.kind=mock
    # what is subtracted from a reward: the mean of its group, with or without itself
    baseline: Literal["group", "leave_one_out"] = "leave_one_out"
    std_scaling: bool = True  # divide advantages by the standard deviation of their group
    # ratio of probabilities, now and when the step began: for each token, or a mean over its
    # response
    ratio: Literal["token", "sequence"] = "token"
    # how the loss limits the ratio: see grpo/objective.py
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    clip_low: float = number(0.2, 0, MAX_RATIO)  # the ratio's lower limit is 1 - clip_low
    clip_high: float = number(0.2, 0, MAX_RATIO)  # the ratio's upper limit is 1 + clip_high
    # caps the loss of tokens with negative advantage at this multiple of |A|; null: no cap
    dual_clip: float | None = None
    # what has equal weight in a step's mean loss: each token (token, constant), or each response
    aggregation: Literal["token", "sequence", "constant"] = "token"
    # weight of the KL divergence from the initial policy; with adapters, from the base model
    kl: float = number(0.0, 0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # Schulman's estimator of it
    # correction for what differs between sampler and trainer: move a token's weight to the limit
    # that it exceeds (truncate), or leave out the token (mask) or its response (sequence-mask)
    importance: Literal["none", "truncate", "mask", "sequence-mask"] = "none"
    # lower limit of the importance weights: below it a weight is raised to it, or left out (mask)
    importance_low: float = number(0.0, 0, MAX_RATIO)
    # upper limit of the importance weights: above it a weight is lowered to it, or left out (mask);
    # 1e9 is above any
    importance_high: float = number(2.0, 0, MAX_RATIO)
    # most rounds of sampling per step; above 1, groups without a signal are replaced (DAPO)
    generations: int = number(1, 1, 1000)
    # number of tokens before a response would be cut off, over which the reward falls
    overlong_buffer: int = number(0, 0)
    overlong_penalty: float = number(1.0, 0)  # by how much the reward falls over these tokens
    overlong_filter: bool = False  # leave truncated responses out of the loss
    # train with the experts that the sampler's routers chose, token by token (R3, Ma et al. 2025): else
    # rounding makes others of them, and the policy another one than what was sampled from
    replay_routing: bool = False
    # age of the sampler's weights in steps; from 1 on, sampling and training can overlap
    lag: int = number(0, 0, 1 << 16)
    # while a step's responses are sampled, begin those of the next `lag` steps, which go on with new
    # weights between two decoding steps: nobody waits for the longest. `lag` is then the most age
    in_flight: bool = False
    # what they go on with: keys and values computed again with the new weights, or those they have
    in_flight_cache: Literal["recompute", "keep"] = "recompute"
    # number of ranks, the last ones, that only sample while the others only train (needs lag of 1
    # or more); 0: all do both
    generation_ranks: int = number(0, 0)
    keep_cache: bool = False  # keep the sampler's KV cache while its rank trains
    # free what sampling, log-probabilities and training do not use in turn (grpo/offload.py)
    offload: bool = False
    # steps of supervised training on the answers, before the first step of GRPO
    warmup_steps: int = number(0, 0, 1 << 20)
    warmup_lr: float = number(1e-3, 0)  # learning rate of these steps
    eval_samples: int = number(8, 1, 1 << 20)  # samples per held-out prompt, for pass@k
    # number of newest steps whose responses stay in out_dir/rollouts; 0: all
    keep_rollouts: int = number(100, 0)


@dataclass
class DPO:
    """Learning from pairs of replies: see training/dpo.py."""

    beta: float = number(0.1, 1e-6)  # strength of the pull to the initial model
    # DPO's log-sigmoid, or IPO's squared distance to a margin
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    # use the mean of a reply's log-probabilities over its tokens in place of their sum
    length_normalized: bool = False


@dataclass
class Distill:
    """Learning from a teacher: see training/distillation.py, and for task=grpo grpo/objective.py."""

    # folder of a model of the same vocabulary, which teaches; base: the model without its adapters;
    # unset, there is none
    teacher: str = ""
    # how the student's distribution is compared with the teacher's: KL(teacher || student),
    # KL(student || teacher), or the Jensen-Shannon divergence
    divergence: Literal["forward", "reverse", "js"] = "forward"
    beta: float = number(0.5, 0.001, 0.999)  # share of the teacher in the mixture of js
    # divides the logits of both; with task=grpo those of the teacher alone
    temperature: float = number(1.0, 0.01, 1000)


DECODER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WAN_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
TARGETS = DECODER_TARGETS + WAN_TARGETS


@dataclass
class Lora:
    """Low-rank adapters; with them, whatever the task, only they are trained.

    Dropout of the adapters' input (pre) is that of peft. Dropout of their update (post), the
    default of NeMo AutoModel, needs no second copy of the input.
    """

    rank: int = number(16, 1, MAX_LORA_RANK)  # rank of the matrices A and B
    alpha: float = number(32.0, above=0, most=MAX_LORA_ALPHA)  # scales the update by alpha / rank
    # share of the channels that adapters drop in training; which channels depends on the number of
    # ranks, so a run that continues on another number of them draws others
    dropout: float = number(0.0, 0, below=1)
    # what is dropped: channels of the adapters' input (pre), or of their update (post)
    dropout_position: Literal["pre", "post"] = "pre"
    rslora: bool = False  # scale the update by alpha / sqrt(rank) instead
    # names of the Linears that get adapters, or the ends of these names
    targets: list[str] = setting(default_factory=lambda: list(TARGETS))
    # type in which A and B are stored; they compute in the type of their input
    dtype: Literal["fp32", "bf16"] = "fp32"
    # how the frozen matrices of the blocks are stored: in the type that computes, in FP8 with a
    # scale for 128 x 128, or in 4 bits (QLoRA's NF4 with double quantization); computed back for
    # each product (models/frozen.py)
    base: Literal["bf16", "fp8", "nf4"] = "bf16"
    # adapters to start from: a folder in PEFT's format or a file of Wan's adapters
    # (formats/peft.py); their rank, alpha, rslora and targets replace those given here
    path: str = ""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# frozen, so that it can be a key of the caches in training/sigmas.py
@dataclass(frozen=True)
class Diffusion:
    """How sigmas are drawn, and how losses are weighted by them.

    sampling draws u between 0 and 1. uniform: evenly. logit_normal: sigmoid(mean + std * normal).
    mode: more often at both ends if mode_scale > 0 (both Esser et al. 2024, section 3.1). mixed:
    uniform for uniform_share of the samples, logit_normal for the rest.
    shift makes sigma = shift u / (1 + (shift - 1) u) of it.
    weighting, of a sample's loss. linear: 1 + shift sigma. bell: exp(-2 (sigma - 1/2)^2) less its
    minimum, scaled to mean 1 over evenly spaced u (DiffSynth). sigma_sqrt: sigma^-2, and cosmap:
    2 / (pi (1 - 2 sigma + 2 sigma^2)), both of Stable Diffusion 3 (diffusers).
    """

    # distribution of u, from which sigmas are made: see above
    sampling: Literal["uniform", "logit_normal", "mode", "mixed"] = "uniform"
    mean: float = 0.0  # mean of the normal in logit_normal and mixed
    std: float = 1.0  # standard deviation of the normal in logit_normal and mixed
    mode_scale: float = 1.29  # weight of both ends in mode
    uniform_share: float = 0.1  # share of the samples that mixed draws uniformly
    shift: float = 3.0  # moves sigmas; above 1, to more noise, as larger videos need
    sigma_min: float = 0.0  # the distribution of sigmas is truncated to [sigma_min, sigma_max]
    sigma_max: float = 1.0  # the distribution of sigmas is truncated to [sigma_min, sigma_max]
    # weight of a sample's loss, by its sigma: see above
    weighting: Literal["none", "linear", "bell", "sigma_sqrt", "cosmap"] = "none"
    # what has equal weight in a step's loss: each video, or each element of all videos
    reduction: Literal["sample", "element"] = "sample"
    # share of the samples that lose their text, as classifier-free guidance needs (Ho & Salimans
    # 2022)
    text_dropout: float = 0.1


@dataclass
class Config:
    """A run."""

    model: Model = setting(default_factory=Model)
    # how the model is trained; lora is sft with adapters (see `lora`), reward makes a model that
    # scores replies (training/reward.py)
    task: Literal[*TASKS] = "pretrain"
    steps: int = number(100, 1)  # updates of the weights
    epochs: float = number(0.0, 0)  # passes over the data; above 0, they replace `steps`
    seed: int = number(0, 0)  # seed of weights, order of the data and dropout
    out_dir: str = "out/run"  # folder for checkpoints, metrics and the result
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to run; auto: a GPU if there is one
    data: Data = setting(default_factory=Data)
    batch: Batch = setting(default_factory=Batch)
    parallel: Parallel = setting(default_factory=Parallel)
    # types that weights are stored and computed in. bf16: stored in fp32, computed in bf16. fp8:
    # as bf16, with the blocks' matrix products in FP8. bf16-pure: stored and computed in bf16.
    # Its gradients are bf16, too, and rounding their sum over 64 micro-batches costs 0.8 %, as
    # much as products in bf16 do. With parallel.reshard_after_forward=false or replicas, two
    # ranks or more sum them in the type of parallel.reduce
    precision: Literal["fp32", "bf16", "bf16-pure", "fp8"] = "fp32"
    fp8: Fp8 = setting(default_factory=Fp8)
    optim: Optim = setting(default_factory=Optim)
    # low-rank adapters; if they are set, only they are trained, whatever the task
    lora: Lora | None = None
    diffusion: Diffusion = setting(default_factory=Diffusion)
    rollout: Rollout = setting(default_factory=Rollout)
    grpo: GRPO = setting(default_factory=GRPO)
    dpo: DPO = setting(default_factory=DPO)
    distill: Distill = setting(default_factory=Distill)
    # weight of the loss of multi-token prediction, of models that have it (training/mtp_loss.py);
    # 0: its layers stay as they are
    mtp_weight: float = number(0.1, 0, 1000)
    compile: bool = False  # compile the model with torch.compile, block by block
    recompute: (  # what blocks recompute, n: every n-th all, or offload (parallel/recompute.py)
        Literal["none", "full", "attention", "selective", "offload", "full-offload"] | int
    ) = "none"
    validation: Validation = setting(default_factory=Validation)
    checkpoint: Checkpoint = setting(default_factory=Checkpoint)
    metrics: Metrics = setting(default_factory=Metrics)
    profile: Profile = setting(default_factory=Profile)
    deterministic: bool = False  # make runs bitwise reproducible (see run/launch/start.py)
    # use cuDNN's attention; false: FlashAttention and FlexAttention, where cuDNN's kernels are wrong
    # (reported for some B200)
    cudnn_attention: bool = True
    # seconds that a rank waits for the others in a collective before it gives up
    timeout_s: float = number(600.0, 1, 1000000)
    reference: dict = setting(default_factory=dict)  # published figures for this config

    @property
    def teachers(self) -> list[str]:
        """Return the teacher of each source, or of all data; none if there is no distillation."""
        given = [source.teacher or self.distill.teacher for source in self.data.sources]
        given = given or [self.distill.teacher]
        return given if any(given) else []
