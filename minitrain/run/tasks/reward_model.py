"""A model as the reward of GRPO: grpo.reward=FOLDER, as task=reward or transformers writes it."""

import torch

from minitrain.data.chat.chat_tokenizer import load_tokenizer
from minitrain.data.chat.chats import encode_chat
from minitrain.data.chat.problems import answered
from minitrain.data.chat.read_problems import read_question
from minitrain.data.chat.read_tools import read_shown
from minitrain.errors import InputError
from minitrain.formats.hf import load_pretrained
from minitrain.grpo.rewards import Reward


def reward_model(folder: str, device: torch.device | None = None, prompt_key: str = "") -> Reward:
    """Return a function that scores responses by the model in a folder.

    It scores the chat of the row's prompt (see `read_question`) and the response, by the folder's
    tokenizer and chat template. Each rank that rewards has the model, and runs one response at a
    time. Raises InputError for a folder that holds no reward model.
    """
    model = load_pretrained(folder, device=device)
    if model.config.num_labels != 1:
        raise InputError(f"grpo.reward={folder} is no reward model (one of num_labels=1)")
    tokenizer = load_tokenizer(folder)

    @torch.inference_mode()
    def score(response: str, answer: str, row: dict) -> float:
        """Return the score of a response. Raises InputError for a chat longer than the model's."""
        chat, _ = answered(read_question(row, prompt_key)[0], response)
        tokens, _ = encode_chat(chat, tokenizer.template, tokenizer, read_shown(row))
        if len(tokens) > model.config.max_position_embeddings:
            raise InputError(f"a chat of {len(tokens)} tokens is longer than the reward model's")
        return model(torch.tensor(tokens, device=device)[None])[0, -1].item()

    return score
