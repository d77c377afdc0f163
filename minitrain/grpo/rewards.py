"""Reward functions, which score responses.

`exact`, `math` and `math_verify` are built in; a config may name any other `Reward` as
`package.module:name`, or the folder of a reward model (run/tasks/reward_model.py). What it remembers
is its process's own: every rank that rewards has one, and sees its own share of the responses. It is
kept in checkpoints, for each rank, if the reward has state_dict() and load_state_dict(state), of
what JSON can hold; evaluations leave it as it was. The weights of a reward that is a Module are not
kept.
"""

import importlib.util
import json
from typing import Any, Protocol

from torch.nn import Module

from minitrain.errors import InputError
from minitrain.grpo.math_answers import same_answer
from minitrain.user_code import call, load_function


class Reward(Protocol):
    """A function of a response's text, the right answer, and the problem's whole line of data."""

    def __call__(self, response: str, answer: str, row: dict) -> float: ...


def exact(response: str, answer: str, row: dict) -> float:
    """Return 1 if the response is the answer, but for white space around it."""
    return float(response.strip() == answer.strip())


def math(response: str, answer: str, row: dict) -> float:
    """Return 1 if the response's final answer equals the right one (math_answers.py)."""
    return float(same_answer(response, answer))


def math_verify(response: str, answer: str, row: dict) -> float:
    r"""Return 1 if Hugging Face's math-verify finds the answers equal, symbolically with sympy.

    It drops \text{...} behind a number, whatever it says: 5\text{ million} is 5 to it. It waits up
    to 5 s for each of three parts (Kydlicek 2025, github.com/huggingface/Math-Verify).
    """
    from math_verify import parse, verify

    # the answer as GSM8K marks it, or as it stands
    right = (
        answer if "\\boxed" in answer else rf"\boxed{{{answer.rpartition('####')[2].strip()}}}"
    )
    return float(verify(parse(right), parse(response)))


def overlong(tokens: int, longest: int, buffer: int, penalty: float) -> float:
    """Return DAPO's penalty: 0 up to longest - buffer tokens, then linear to -penalty."""
    return -penalty * min(max(tokens - longest + buffer, 0) / buffer, 1) if buffer else 0.0


def keeps_state(reward: Reward) -> bool:
    """Return whether a reward has a state to keep in checkpoints."""
    has_both = hasattr(reward, "state_dict") and hasattr(reward, "load_state_dict")
    return has_both and not isinstance(reward, Module)


def reward_state(reward: Reward, name: str) -> Any:
    """Return a copy of the state of the reward `name`, as a checkpoint gives it back.

    Raises InputError if JSON would not give back what it is.
    """
    state = call(f"grpo.reward={name}", "in state_dict()", reward.state_dict)
    try:
        copy = json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError):
        copy = None
    if copy is None or copy != state:
        raise InputError(
            f"grpo.reward={name}: state_dict() must return what JSON gives back unchanged, such as "
            f"lists, numbers and a dict with texts as keys, not {str(state)[:80]}"
        )
    return copy


BUILT_IN = {"exact": exact, "math": math, "math_verify": math_verify}


def load_reward(name: str) -> Reward:
    """Return the one BUILT_IN, or the function at `package.module:name`, else raise InputError."""
    if name == "math_verify" and importlib.util.find_spec(name) is None:
        raise InputError("grpo.reward=math_verify needs a package: pip install -e '.[math]'")
    if name in BUILT_IN:
        return BUILT_IN[name]
    example = {"response": "response", "answer": "answer", "row": {}}
    return load_function(
        f"grpo.reward={name!r}",
        name,
        example,
        f"{', '.join(BUILT_IN)}, a reward model's folder or ",
    )
