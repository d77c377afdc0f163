"""Train a model from a config to its export, as python -m minitrain.train does."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count, filterfalse
from pathlib import Path

import torch.distributed as dist

from minitrain.data.sources import has_tokenizer
from minitrain.data.tokenizer import check_same_ids
from minitrain.errors import as_input_error, located
from minitrain.formats.config_hf import export_fault, not_trained_with
from minitrain.formats.hf import find_weights
from minitrain.models.decoder_config import check_vocabulary
from minitrain.parallel.agreement import lead
from minitrain.run.checkpoint.checkpointer import saved_despite_errors
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.checkpoint.fingerprint import check_continuation
from minitrain.run.config.checks import validate
from minitrain.run.config.config_yaml import to_yaml
from minitrain.run.config.environment import rank, world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import to_dict
from minitrain.run.config.unread import unread
from minitrain.run.launch.failures import record_flights, recorded
from minitrain.run.launch.lock import locked
from minitrain.run.launch.start import pick_device
from minitrain.run.monitor.metrics import MetricsLog
from minitrain.run.monitor.progress import opening
from minitrain.run.tasks.exports import check_free_of_others, with_ids_of_data
from minitrain.run.tasks.initial_weights import teacher_config
from minitrain.run.tasks.rows_task import RowsTask, open_rows
from minitrain.run.tasks.task import Task, run_task
from minitrain.settings import Config
from minitrain.training.build import fp8_experts
from minitrain.training.distillation import BASE
from minitrain.training.optim import warmup_steps
from minitrain.user_code import load_function


def train(config: Config) -> None:
    """Train as the config says; continue from the newest checkpoint in out_dir, if there is one."""
    check_layout(config, world_size())
    config = with_ids_of_data(config)
    if config.model.path or (config.lora and config.lora.path):
        check_sources(config)
    for teacher in dict.fromkeys(config.teachers):
        check_teacher(config, teacher)
    folder = Path(config.out_dir)
    check_free_of_others(config, folder)
    device = pick_device(config.device)
    if rank() == 0:
        print(opening(config, world_size(), device), flush=True)
    # report mistakes in a user's code and data before a folder is made, and even while another run
    # holds the lock
    logger = load_logger(config)
    make_task = open_task(config)
    with as_input_error(f"out_dir={config.out_dir!r} cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        record_flights(folder)
    with locked(folder, leads=rank() == 0), recorded(folder):
        task = make_task(folder)
        task.begin()
        with closing(open_log(task, logger)) as log, saved_despite_errors(task.wait):
            run_task(task, log, device)


def load_logger(config: Config) -> Callable[[dict], None] | None:
    """Import the user's metrics.logger; None if there is none. Raises InputError."""
    name = config.metrics.logger
    if not name:
        return None
    return load_function(f"metrics.logger={name!r}", name, {"numbers": {}})


def open_task(config: Config) -> Callable[[Path], Task]:
    """Open a run's data; return a function that makes its task in a folder. Raises InputError."""
    if config.task == "grpo":
        from minitrain.run.tasks.grpo_task import GrpoTask, open_policy_data

        return partial(GrpoTask, config, opened=open_policy_data(config))
    return partial(RowsTask, open_rows(config))


def check_sources(config: Config) -> None:
    """Raise InputError if the model to start from is incomplete, or has another tokenizer."""
    from minitrain.formats.hf import read_config
    from minitrain.rollout.drafting import MTP, SAME_IDS, check_draft

    path = config.model.path
    if path:
        # report missing weights before memory is allocated
        find_weights(config.model.config, path)
    for source in filter(None, (path, config.lora and config.lora.path)):
        if has_tokenizer(config):
            check_same_ids(config.data.tokenizer, source, "data.tokenizer=")
    draft = config.task == "grpo" and config.rollout.draft
    if draft:
        with located(f"rollout.draft={draft}"):
            shape = MTP if draft == MTP else read_config(draft)
            check_draft(config.model.config, shape)
            if shape != MTP:
                find_weights(shape, draft)
                check_same_ids(config.data.tokenizer, draft, "", SAME_IDS)


def check_teacher(config: Config, folder: str) -> None:
    """Raise InputError for a teacher that is missing, or cannot teach this model in this layout."""
    if folder == BASE:
        return
    with located(f"distill.teacher={folder}"):
        teacher = teacher_config(config, folder)
        check_vocabulary(config.model.config, teacher.model.config, "teacher")
        validate(teacher, of_shape=True)
        check_layout(teacher, world_size())
        find_weights(teacher.model.config, folder)
        if has_tokenizer(config):
            check_same_ids(config.data.tokenizer, folder, "", "a teacher of the same tokenizer")


def open_log(task: Task, logger: Callable[[dict], None] | None) -> MetricsLog:
    """Open the log of a run that continues after step `task.first`, and print notes on the run.

    logger: the user's, see `load_logger`. Also writes config.yaml and fingerprint.json. Raises
    InputError if a run that continues has other data. All ranks call it.
    """
    config = task.config
    folder = task.folder
    first = task.first
    file = folder / "fingerprint.json"
    notes = lead(None, check_continuation, file, config, task.files, first > 0)
    if dist.get_rank() == 0:
        write_durably(folder / "config.yaml", to_yaml(to_dict(config)))
        if not first:
            notes += keep_earlier(folder)
    log = MetricsLog(folder / "metrics.jsonl", config.steps, first, task.bytes_per_token)
    if log.enabled and config.metrics.tensorboard:
        from minitrain.run.monitor.tensorboard import Board

        log.add(Board(folder, first))
    if logger:
        log.add(logger)
    if first:
        notes.append(f"resumed from step {first}")
    if first >= config.steps:
        notes.append("no step is left to do (for more: steps=N; to begin anew: another out_dir)")
    for note in notes_on_settings(config, first) + notes:
        log.say(note)
    return log


def notes_on_settings(config: Config, first: int) -> list[str]:
    """Return notes on effects of these settings that may surprise. first: steps that are done."""
    shape = config.model.config
    notes = list(unread(config))
    if config.model.path and config.task != "diffusion":
        from minitrain.formats.layouts_hf import fp8_note

        notes += fp8_note(config)
    if config.lora:
        from minitrain.formats.peft import other_dropout, unreadable_note

        notes += unreadable_note(shape, config.lora) + other_dropout(config.lora)
    warmup = warmup_steps(config.steps, config.optim)
    if warmup < config.optim.warmup:
        notes.append(
            f"optim.warmup={config.optim.warmup} is longer than steps={config.steps}: {warmup} steps warm up"
        )
    if config.fp8.experts and not fp8_experts(config):
        notes.append(
            f"note: experts stay in bf16: fp8.experts=true needs parallel.ep={shape.num_experts}, one on each rank"
        )
    if first:
        return notes
    is_decoder = config.task != "diffusion"
    if is_decoder and not config.lora and (fault := export_fault(shape)):
        notes.append(f"note: {fault}: it will be saved for minitrain alone, not for transformers")
    if not config.model.path and (config.lora or config.task in ("sft", "grpo", "dpo", "reward")):
        notes.append("note: what is fine-tuned are random weights (model=FOLDER names others)")
    if is_decoder and shape.extra_config and (left_out := ", ".join(not_trained_with(shape))):
        notes.append(f"note: config.json says {left_out}, which training here is without")
    return notes


def keep_earlier(folder: Path) -> list[str]:
    """Rename files that an earlier run without a checkpoint has left in `folder`; return notes."""
    notes = []
    for path in (folder / "metrics.jsonl", folder / "rollouts"):
        if path.exists() and path.stat().st_size:
            numbered = (path.with_stem(f"{path.stem}-{n}") for n in count(1))
            kept = path.rename(next(filterfalse(Path.exists, numbered)))
            notes.append(
                f"note: an earlier run left no checkpoint to continue from; its {path.name} is now {kept}"
            )
    if weights := sorted(file.name for file in folder.glob("*.safetensors")):
        notes.append(
            f"note: the result of this run will replace {', '.join(weights)} in {folder}"
        )
    return notes
