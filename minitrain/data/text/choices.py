"""Read questions with choices, in the form of lm-evaluation-harness (0.4.13) without examples.

    set        keys of a line                                    text that a model reads; choices
    HellaSwag  activity_label, ctx_a, ctx_b, endings, label      the text; each ending
    ARC        question, choices {text, label}, answerKey        "Question: ...\\nAnswer:"; each text
    MMLU       question, choices, answer, and perhaps subject    the choices, lettered; each letter

Zellers et al. 2019, Clark et al. 2018, Hendrycks et al. 2021. A space is put before each choice.
"""

import re
from typing import NamedTuple

import numpy as np

from minitrain.data.records import text_of
from minitrain.data.sample import Sample
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError
from minitrain.training.loss import IGNORE

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Question(NamedTuple):
    """A text, its possible continuations, and the number of the right one."""

    text: str
    choices: list[str]
    # index of the right choice, from 0
    answer: int


def read_choices(record: dict) -> Question:
    """Return the question of a line. Raises InputError for other lines, and for a wrong answer."""
    if "endings" in record:
        question = read_hellaswag(record)
    elif "choices" in record and "answerKey" in record:
        question = read_arc(record)
    elif "choices" in record:
        question = read_mmlu(record)
    else:
        raise InputError(
            "neither 'endings' (as HellaSwag's lines), nor 'choices' with 'answerKey' (ARC) or 'answer' (MMLU)"
        )
    if not 0 <= question.answer < len(question.choices):
        raise InputError(
            f"the answer {question.answer} is none of {len(question.choices)} choices, which count from 0"
        )
    if not all(question.choices):
        raise InputError("a choice is empty")
    return question


def read_hellaswag(record: dict) -> Question:
    label, *parts = (text_of(record, key) for key in ("activity_label", "ctx_a", "ctx_b"))
    text = without_marks(f"{label}: {parts[0]} {parts[1].capitalize()}")
    return Question(
        text, list(map(without_marks, texts_of(record, "endings"))), number_of(record, "label")
    )


def without_marks(text: str) -> str:
    """Return a text without WikiHow's markup, such as [step]."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def read_arc(record: dict) -> Question:
    choices = record["choices"]
    if not isinstance(choices, dict):
        raise InputError("'choices' must be an object of 'text' and 'label', as in ARC")
    labels = texts_of(choices, "label")
    texts = texts_of(choices, "text")
    right = text_of(record, "answerKey")
    if right not in labels or len(labels) != len(texts):
        raise InputError(
            f"'answerKey' {right!r} is none of the labels {labels} of {len(texts)} texts"
        )
    return Question(
        f"Question: {text_of(record, 'question')}\nAnswer:", texts, labels.index(right)
    )


def read_mmlu(record: dict) -> Question:
    texts = texts_of(record, "choices")
    letters = LETTERS[: len(texts)]
    lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True)]
    asked = "\n".join([text_of(record, "question").strip(), *lines, "Answer:"])
    if record.get("subject"):
        subject = text_of(record, "subject").replace("_", " ")
        about = "The following are multiple choice questions (with answers) about"
        asked = f"{about} {subject}.\n\n{asked}"
    return Question(asked, list(letters), number_of(record, "answer", letters))


def texts_of(record: dict, key: str) -> list[str]:
    texts = record.get(key)
    if (
        not isinstance(texts, list)
        or len(texts) < 2
        or not all(isinstance(x, str) for x in texts)
    ):
        raise InputError(f"{key!r} must be a list of two texts or more")
    return texts


def number_of(record: dict, key: str, letters: str = "") -> int:
    """Return a key's number, which may be written as text or, if `letters` are given, as one of them."""
    value = record.get(key)
    if isinstance(value, str) and len(value) == 1 and value in letters:
        return letters.index(value)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if type(value) is not int:
        raise InputError(f"{key!r} is {value!r}: give the number of the right choice, from 0")
    return value


def encode_choices(question: Question, tokenizer: Tokenizer, seq_len: int) -> list[Sample]:
    """Return a sample for each choice; only the choice's tokens have labels.

    Samples that are too long lose their beginning.
    """
    samples = []
    asked = question.text.rstrip()
    rest = question.text[len(asked) :]
    context = tokenizer.encode(asked)
    for choice in question.choices:
        whole = tokenizer.encode(f"{asked}{rest} {choice}")
        # a token that spans the border counts as the text's
        count = len(whole) - len(context)
        if count < 1:
            raise InputError(f"the choice {choice!r} has no token of its own")
        ids = np.array([*tokenizer.beginning_ids, *whole][-seq_len - 1 :], np.int64)
        labels = ids[1:].copy()
        labels[:-count] = IGNORE
        samples.append(Sample(ids[:-1], labels))
    return samples
