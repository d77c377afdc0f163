"""Any config at toy width on this machine: the same parallel layout, with two ranks wherever it has
more.

`shrink` makes the small config: the model's tiny twin, every parallel dimension above 1 at 2, a
batch and a sequence that still fill them. `run_shrunk` starts a gloo process per rank and measures
it there, so a layout for a thousand GPUs runs on a laptop before it runs for money. What it shows
is that the layout works, not how fast it is. Left out: compilation, real data, and uneven pipeline
splits, whose lengths are those of the real model.
"""

import dataclasses
import json
import multiprocessing
import os
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from tqdm import tqdm

from minitrain.bench.measure import measure
from minitrain.bench.measure_policy import measure_policy
from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.wan import WanConfig
from minitrain.models.zoo import TINY_WAN, tiny
from minitrain.run.config_checks import validate
from minitrain.run.launch import start
from minitrain.run.parallel_checks import check_layout, stated_ranks, training_ranks
from minitrain.settings import Batch, Config, Data, Model, Parallel, Validation

# frames, height, width of latents, in patches of (1, 2, 2)
VIDEO = [2, 8, 16]
VIDEO_TOKENS = 64
SEQ_LEN = 128  # at most, and a multiple of 8: two context ranks want four parts, two tensor ranks two of each


def shrink(config: Config) -> Config:
    """The config's small twin, with all its settings that are not sizes. Raises InputError for a
    wrong layout.
    """
    parallel = shrink_parallel(config)
    rows = parallel.dp_replicate * parallel.dp_shard
    micro = min(config.batch.micro, 2)
    batch = Batch(
        global_=rows * micro * shrunk_micro_batches(config, parallel),
        micro=micro,
        seq_len=VIDEO_TOKENS
        if config.task == "diffusion"
        else min(SEQ_LEN, max(8, config.batch.seq_len // 8 * 8)),
    )
    small = dataclasses.replace(
        config,
        model=Model(config=shrink_model(config.model.config, parallel)),
        data=Data(size=VIDEO, text_tokens=8),
        lora=config.lora
        and dataclasses.replace(config.lora, path=""),  # files hold the real model's
        device="cpu",
        batch=batch,
        parallel=parallel,
        compile=False,
        validation=Validation(),
        reference={
            k: v for k, v in config.reference.items() if v != "nemo_squad"
        },  # a convention for real packs only
    )
    if config.task == "grpo":
        small = shrink_rollouts(small)
    validate(small)
    check_layout(small, stated_ranks(small))
    return small


def shrink_parallel(config: Config) -> Parallel:
    """Two ranks in every dimension that has more than one, and two stages per rank if there are
    more.

    Where several ranks have the same experts, and share their parameters, two of them do.
    """
    p = config.parallel
    sizes = {
        name: min(getattr(p, name), 2) for name in ("dp_replicate", "tp", "cp", "pp", "vp", "ep")
    }
    real = real_shards(config)
    shards = min(real, 2)
    if 1 < p.ep < real * p.cp * p.tp:
        shards = max(shards, 4 // (sizes["cp"] * sizes["tp"]))
    return dataclasses.replace(p, **sizes, dp_shard=shards, layers_per_stage=None, async_tp=False)


def shrink_model(shape: DecoderConfig | WanConfig, parallel: Parallel) -> DecoderConfig | WanConfig:
    """Its tiny twin, with two layers or more for each pipeline stage."""
    if isinstance(shape, WanConfig):
        return dataclasses.replace(shape, **TINY_WAN)
    layers = max(4, 2 * parallel.pp * parallel.vp)
    return DecoderConfig(**tiny(dataclasses.asdict(shape), layers))


def shrink_rollouts(config: Config) -> Config:
    """Pairs of short responses to short prompts, one optimizer step's worth, whatever the row's
    lengths; if some ranks only sample, as many as train."""
    shared = {"tp": min(config.rollout.tp, 2), "ep": min(config.rollout.ep, 2)}
    rollout = dataclasses.replace(
        config.rollout, **shared, max_tokens=8, slots=8, page_size=16, pages=0, compile=False
    )
    grpo = dataclasses.replace(
        config.grpo,
        prompts=config.batch.global_,
        group=2,
        mock_digits=min(config.grpo.mock_digits, 3),
        overlong_buffer=min(config.grpo.overlong_buffer, 8),
        generation_ranks=training_ranks(config) if config.grpo.generation_ranks else 0,
        warmup_steps=min(config.grpo.warmup_steps, 1),
    )
    reference = {key: value for key, value in config.reference.items() if key != "mean_response"}
    return dataclasses.replace(config, rollout=rollout, grpo=grpo, reference=reference)


def shrunk_micro_batches(config: Config, small: Parallel) -> int:
    """How many a rank of the small layout takes per step: at most 4, or at most 4 per pipeline
    rank.

    Below that, as many as the real one; in a pipeline, as many per pipeline rank, and at least one
    per stage.
    """
    batch = config.batch
    p = config.parallel
    real = max(1, batch.global_ // (batch.micro * p.dp_replicate * real_shards(config)))
    per_rank = min(max(1, real // p.pp), 4)
    return max(small.pp * per_rank, small.pp * small.vp)


def real_shards(config: Config) -> int:
    """Return dp_shard; an open one fills the GPUs of the table, or else is taken for 2."""
    p = config.parallel
    if p.dp_shard == -1 and "gpus" not in config.reference:
        return 2
    return training_ranks(config) // (p.dp_replicate * p.tp * p.cp * p.pp)


# ------------------------------------------------------------------------------------------------------------- running


def run_shrunk(config: Config, row: str, steps: int, warmup: int) -> dict:
    """Measure a shrunk config on as many gloo processes as it has ranks; returns rank 0's result
    row.

    Raises InputError for what a rank found wrong with the config, and RuntimeError when a rank
    died: the others are then ended too.
    """
    ranks = stated_ranks(config)
    multiprocessing.set_forkserver_preload([__name__])  # one process imports torch, not each rank
    with tempfile.TemporaryDirectory(prefix="minitrain-shrink-") as folder:
        try:
            arguments = (ranks, Path(folder), config, row, steps, warmup)
            torch.multiprocessing.start_processes(
                work, arguments, nprocs=ranks, start_method="forkserver"
            )
        except (
            torch.multiprocessing.ProcessExitedException,
            torch.multiprocessing.ProcessRaisedException,
        ) as error:
            for complaint in Path(folder).glob("error-*"):
                raise InputError(complaint.read_text(encoding="utf-8")) from None
            raise RuntimeError(
                f"{row}: rank {error.error_index} of {ranks} failed: {error}"
            ) from None
        return json.loads(Path(folder, "result").read_text(encoding="utf-8"))


def work(
    rank: int, ranks: int, folder: Path, config: Config, row: str, steps: int, warmup: int
) -> None:
    """One rank's process, from start to end."""
    torch.set_num_threads(1)
    tqdm.set_lock(
        threading.RLock()
    )  # its own is shared between processes, and complains when one ends by _exit
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
    os._exit(0)  # the interpreter's own teardown sometimes aborts after FSDP has run on gloo
