"""Run any config's parallel layout at toy width on this machine.

`shrink` makes the small config: the model's tiny twin, every parallel dimension above 1 set to 2,
and a batch and sequence that just fill them. `run_shrunk` runs it on one gloo process per rank, so
that a layout for a thousand GPUs can be tried on a laptop before it costs money. This shows that the
layout works, not how fast it is. Left out: compilation, real data, and uneven pipeline splits, whose
numbers of layers fit the real model only.
"""

import json
import multiprocessing
import os
import tempfile
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from tqdm import tqdm

from minitrain.bench.measure import measure
from minitrain.bench.measure_policy import measure_policy
from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.wan import WanConfig
from minitrain.models.zoo import TINY_WAN, tiny
from minitrain.run.config.checks import validate
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.ranks import stated_ranks, training_ranks
from minitrain.run.launch.start import start
from minitrain.settings import Batch, Config, Data, Model, Parallel, Validation

# frames, height, width of latents; patches of (1, 2, 2) make VIDEO_TOKENS of them
SMALL_VIDEO = [2, 8, 16]
VIDEO_TOKENS = 64
# the longest sequence. All lengths are multiples of 8, because two context-parallel ranks split a
# sequence into four chunks, and two tensor-parallel ranks halve each
SEQ_LEN = 128


def shrink(config: Config) -> Config:
    """Return the config with small sizes and all other settings. Raises InputError for its layout."""
    parallel = shrink_parallel(config)
    micro = min(config.batch.micro, 2)
    rows = parallel.dp_replicate * parallel.dp_shard * micro
    length = VIDEO_TOKENS
    if config.task != "diffusion":
        length = min(SEQ_LEN, max(8, config.batch.seq_len // 8 * 8))
    reference = dict(config.reference)
    # this convention counts attention of real packed documents
    if reference.get("convention") == "nemo_squad":
        del reference["convention"]
    small = replace(
        config,
        model=Model(config=shrink_model(config.model.config, parallel)),
        data=Data(size=SMALL_VIDEO, text_tokens=8),
        # its file would hold the real model's adapters
        lora=config.lora and replace(config.lora, path=""),
        device="cpu",
        batch=Batch(rows * shrunk_micro_batches(config, parallel), micro, length),
        parallel=parallel,
        compile=False,
        validation=Validation(),
        reference=reference,
    )
    if config.task == "grpo":
        small = shrink_rollouts(small)
    validate(small)
    check_layout(small, stated_ranks(small))
    return small


def at_most(section, **limits: int) -> dict[str, int]:
    """Return the named settings of a section, each capped at its limit."""
    return {name: min(getattr(section, name), limit) for name, limit in limits.items()}


def shrink_parallel(config: Config) -> Parallel:
    """Return the layout with at most two ranks per dimension and two pipeline stages per rank.

    If FSDP shards each expert over several ranks, the small layout shards it over two.
    """
    p = config.parallel
    sizes = at_most(p, dp_replicate=2, tp=2, cp=2, pp=2, vp=2, ep=2)
    real = real_shards(config)
    shards = min(real, 2)
    if 1 < p.ep < real * p.cp * p.tp:
        shards = max(shards, 4 // (sizes["cp"] * sizes["tp"]))
    return replace(p, **sizes, dp_shard=shards, layers_per_stage=None)


def shrink_model(
    shape: DecoderConfig | WanConfig, parallel: Parallel
) -> DecoderConfig | WanConfig:
    """Return the model's tiny twin, with at least two layers per pipeline stage."""
    if isinstance(shape, WanConfig):
        return replace(shape, **TINY_WAN)
    layers = max(4, 2 * parallel.pp * parallel.vp)
    return DecoderConfig(**tiny(asdict(shape), layers))


def shrink_rollouts(config: Config) -> Config:
    """Return the config with two short responses per short prompt, enough for one optimizer step.

    If some ranks of the config only sample, as many ranks of the small one sample as train.
    """
    rollout = replace(
        config.rollout,
        **at_most(config.rollout, tp=2, ep=2),
        max_tokens=8,
        slots=8,
        page_size=16,
        pages=0,
        compile=False,
    )
    grpo = replace(
        config.grpo,
        **at_most(config.grpo, mock_digits=3, overlong_buffer=8, warmup_steps=1),
        prompts=config.batch.global_,
        group=2,
        generation_ranks=training_ranks(config) if config.grpo.generation_ranks else 0,
    )
    reference = {key: value for key, value in config.reference.items() if key != "mean_response"}
    return replace(config, rollout=rollout, grpo=grpo, reference=reference)


def shrunk_micro_batches(config: Config, small: Parallel) -> int:
    """Return the micro-batches per step of a rank of the small layout.

    Each pipeline rank has as many as in the real layout, but at most 4 and at least one per stage.
    """
    batch = config.batch
    p = config.parallel
    real = batch.global_ // (batch.micro * p.dp_replicate * real_shards(config))
    per_rank = min(max(1, real // p.pp), 4)
    return small.pp * max(per_rank, small.vp)


def real_shards(config: Config) -> int:
    """Return dp_shard; if it is -1, the value that fills the published GPUs, or 2 without any."""
    p = config.parallel
    if p.dp_shard == -1 and "gpus" not in config.reference:
        return 2
    return training_ranks(config) // (p.dp_replicate * p.tp * p.cp * p.pp)


# --- running


def run_shrunk(config: Config, row: str, steps: int, warmup: int) -> dict:
    """Measure a shrunk config on one gloo process per rank; return rank 0's result.

    Raises InputError if a rank rejected the config. Raises RuntimeError if a rank failed otherwise;
    all other ranks are ended then.
    """
    ranks = stated_ranks(config)
    # torch is imported once, before the ranks are forked
    multiprocessing.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory(prefix="minitrain-shrink-") as folder:
        arguments = (ranks, Path(folder), config, row, steps, warmup)
        try:
            start_processes(run_rank, arguments, nprocs=ranks, start_method="forkserver")
        except (ProcessExitedException, ProcessRaisedException) as error:
            for complaint in Path(folder).glob("error-*"):
                raise InputError(complaint.read_text(encoding="utf-8")) from None
            what = f"{row}: rank {error.error_index} of {ranks} failed: {error}"
            raise RuntimeError(what) from None
        return json.loads(Path(folder, "result").read_text(encoding="utf-8"))


def run_rank(
    rank: int, ranks: int, folder: Path, config: Config, row: str, steps: int, warmup: int
) -> None:
    """Run one rank's process, from start to end."""
    torch.set_num_threads(1)
    # tqdm's default lock is shared between processes and warns when one ends by _exit
    tqdm.set_lock(threading.RLock())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    try:
        if config.task == "grpo":
            result = measure_policy(config, row, steps, warmup)
        else:
            result = measure(config, row, start(config), steps, warmup)
    except InputError as error:
        (folder / f"error-{rank}").write_text(str(error), encoding="utf-8")
        os._exit(2)
    if rank == 0:
        small = result | {"mode": "shrunk", "ratio": None, "published_step_time_s": None}
        (folder / "result").write_text(json.dumps(small), encoding="utf-8")
    dist.barrier()
    # the interpreter's own teardown sometimes aborts after FSDP has run on gloo
    os._exit(0)
