"""Environments that say what can be foreseen, and a tiny policy that talks to them."""

import asyncio
import time
from functools import partial

from minitrain import Sampler
from minitrain.data.chat.chat_templates import built_in
from minitrain.data.chat.dialogs import ChatDialog
from minitrain.data.chat.problems import open_problems
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.grpo.environments import EnvironmentFactory
from minitrain.grpo.episode_runner import EpisodeRunner
from minitrain.grpo.rewards import exact
from minitrain.grpo.rollouts import RolloutWorker
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.settings import Rollout
from tests.helpers.grpo import TREE, oddness
from tests.helpers.sampling import make

# a policy without training ends one reply in six
ENDS = (257, *range(42))
TALK = TREE | {
    "batch": {"global": 12, "micro": 2, "seq_len": 64},
    "rollout": {"max_tokens": 40},
    "grpo": {"prompts": 3, "group": 4, "mock_digits": 2, "environment_wait": 60.0},
}


class Scripted:
    """Answers each of three replies with its number and length, and rewards them."""

    def reset(self, row):
        self.row = row
        self.replies = 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, response):
        self.replies += 1
        return self.said(response), oddness(response, "", {}), self.replies == 3

    def said(self, response):
        return [{"role": "user", "content": f"{self.replies}: {len(response)}"}]


class OneTurn(Scripted):
    """A reward function by another name."""

    def step(self, response):
        return [], oddness(response, "", {}), True


class Slow(Scripted):
    """Takes its time, another one for each reply."""

    def step(self, response):
        time.sleep(0.01 * (len(response) % 4))
        return super().step(response)


class Awaited(Scripted):
    """Waits in a loop that all share, with what belongs to it."""

    async def reset(self, row):
        self.lock = asyncio.Lock()
        await asyncio.sleep(0.001)
        return super().reset(row)

    async def step(self, response):
        async with self.lock:
            await asyncio.sleep(0.01 * (len(response) % 4))
        return super().step(response)


class Different(Scripted):
    """Begins each sample in another way, as nothing in the row says."""

    made = 0

    def __init__(self):
        # the samples of a problem come two by two
        self.number = Different.made // 2
        Different.made += 1

    def reset(self, row):
        begun = super().reset(row)
        return [{"role": "system", "content": "?" * (self.number % 3)}, *begun]


def talking_worker(environment, rollout: Rollout | None = None, max_tokens=40, **grpo):
    """A RolloutWorker whose samples talk to environments made by `environment`, and its problems."""
    name = f"{__name__}:{environment.__name__}" if environment else ""
    grpo = TALK["grpo"] | {"environment": name} | grpo
    config = configs.from_dict(TALK | {"grpo": grpo, "rollout": {"max_tokens": max_tokens}})
    problems, _, tokenizer, _ = open_problems(config)
    # replicas talk to each other even if there is one
    start(config)
    model = make("llama3-8b", vocab_size=258)
    sampler = Sampler(model, tokenizer, rollout or Rollout(slots=16, page_size=4, pages=300))
    dialog = partial(ChatDialog, built_in("plain"), ByteTokenizer())
    worker = RolloutWorker(config, sampler, tokenizer, ENDS, exact, 0, 1, None)
    if environment:
        factory = EnvironmentFactory(environment, dialog)
        worker.episodes = EpisodeRunner(config, factory, sampler, worker.longest)
    return worker, problems
