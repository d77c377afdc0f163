"""The tasks, a line each: what a task learns by, what data it opens, and what else it takes.

To add one, write a file with its objective (training/objectives.py says what that is), where there
is none a file with its dataset (training/packing.py), and add a line. tests/training/test_task_table.py
then takes a step with it. Only a task that is run has its files imported.
"""

from typing import NamedTuple


class TaskKind(NamedTuple):
    """What a task is made of. Functions are named as package.module:name."""

    # (config) -> Objective
    objective: str
    # (config) -> the training dataset, and the held-out one or None
    data: str
    # it learns from chats: data.kind=jsonl, or mock; data.packed is read
    chats: bool = False
    # its replies can be compared with those held out (validation.exact_match)
    replies: bool = False
    # data.sources: several datasets, mixed
    sources: bool = False
    # distill.teacher
    teachers: bool = False
    # multi-token prediction beside its loss
    mtp: bool = False


NEXT_TOKEN = "minitrain.training.objectives:next_token"
TEXTS = "minitrain.data.text.text_rows:open_texts"
CHATS = "minitrain.data.chat.sft:open_chats"
PAIRS = "minitrain.data.chat.preferences:open_pairs"
LATENTS = "minitrain.data.video.latents:open_latents"

TASKS = {
    "pretrain": TaskKind(NEXT_TOKEN, TEXTS, sources=True, teachers=True, mtp=True),
    "sft": TaskKind(
        NEXT_TOKEN, CHATS, chats=True, replies=True, sources=True, teachers=True, mtp=True
    ),
    "diffusion": TaskKind("minitrain.training.flow:flow_matching", LATENTS),
    "lora": TaskKind(
        NEXT_TOKEN, CHATS, chats=True, replies=True, sources=True, teachers=True, mtp=True
    ),
    # a run is run/tasks/grpo_task.py's, with an objective and data of its own; this is what the
    # simulator traces of it
    "grpo": TaskKind(NEXT_TOKEN, TEXTS, teachers=True, mtp=True),
    "dpo": TaskKind("minitrain.training.dpo:preferences", PAIRS, chats=True, replies=True),
    "reward": TaskKind("minitrain.training.reward:scores", PAIRS, chats=True),
}
