"""Refuse the keys of chats that other programs read and this one does not.

Left alone, the model would not see, or would learn, something other than the line says. Any other
key that is not in data/chat/keys.py is ignored.
"""

from collections.abc import Sequence
from typing import Any

from minitrain.errors import InputError

# what templates and other trainers show to the model, or have it say
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "files", "attachments")
UNREAD_IN_LINE = (*MEDIA, "functions", "available_tools", "tool_definitions")
UNREAD_BESIDE_PROMPT = (
    *UNREAD_IN_LINE,
    "history",
    "document",
    "contexts",
    "passages",
    "passage",
    "paragraph",
    "article",
    "background",
    "knowledge",
    "evidence",
    "references",
    "premise",
    "schema",
    "table",
    "choices",
    "options",
)
UNREAD_BESIDE_MESSAGES = (*UNREAD_IN_LINE, "context")
UNREAD_IN_MESSAGE = (
    *MEDIA,
    "function_call",
    "function_calls",
    "functions",
    "tools",
    "tool_plan",
    "tool_results",
    "documents",
    "context",
    "refusal",
    "reasoning_details",
    "channel",
    "recipient",
)
# what masks in another way than keys.py knows, by token, by role or the other way round: the first
# where they hold anything, the others where they hold 0 or false
MASKS = (
    "mask",
    "masked",
    "is_masked",
    "mask_history",
    "assistant_mask",
    "assistant_masks",
    "assistant_tokens_mask",
    "completion_mask",
    "response_mask",
    "ignore",
    "skip",
    "no_loss",
    "train_detail",
    "train_on_input",
    "train_on_inputs",
    "train_on_prompt",
    "token_weights",
    "rejected",
    "rejected_response",
    "rejected_messages",
)
MASKS_WHERE_0 = (
    "is_trainable",
    "train_on_turn",
    "training",
    "supervised",
    "loss",
    "calculate_loss",
    "step_loss_mask",
    "step_mask",
    "token_weight",
)


def refuse_unread(record: dict, keys: Sequence[str], place: str) -> None:
    """Raise InputError for what the model should see or say, and would not."""
    for key in keys:
        if record.get(key):
            raise InputError(f"{key!r} is not supported (write it into {place}, or remove it)")


def masks(key: str, value: Any) -> bool:
    """Return True if a key says that something is not learned, in another way than `is_learned` reads."""
    if key in MASKS:
        return bool(value)
    values = value if isinstance(value, list) else [value]
    # a loss of 0.0 is a score
    is_score = key == "loss" and isinstance(value, float)
    return key in MASKS_WHERE_0 and 0 in values and not is_score
