"""Measure how often a model's likeliest reply is exactly the held-out one."""

import math
from statistics import fmean

from minitrain.models.decoder import Decoder
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams


def exact_match(model: Decoder, questions: list[tuple[list[int], list[int]]]) -> float:
    """Return the share of (prompt, reply) pairs whose reply is exactly what greedy decoding generates.

    Of pairs that `within_positions` leaves out, nothing is known. NaN if none remains.
    """
    questions = within_positions(model, questions)
    if not questions:
        return math.nan
    params = [
        SamplingParams(temperature=0, max_tokens=len(reply), ignore_eos=True)
        for _, reply in questions
    ]
    longest = max(len(prompt) + len(reply) for prompt, reply in questions)
    sampler = Sampler(model, samples=len(questions), longest=longest)
    answers = sampler.generate([prompt for prompt, _ in questions], params)
    return fmean(
        answer.tokens == reply for answer, (_, reply) in zip(answers, questions, strict=True)
    )


def within_positions(
    model: Decoder, questions: list[tuple[list[int], list[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Return the pairs that do not exceed the model's positions, as a chat that fills a row may."""
    most = model.config.max_position_embeddings
    return [pair for pair in questions if len(pair[0]) + len(pair[1]) <= most]
