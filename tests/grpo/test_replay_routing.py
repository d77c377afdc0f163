"""Router replay: routers perturbed between sampling and training, against plain autograd; layouts; refusals."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from minitrain import Sampler, SamplingParams, train
from minitrain.errors import InputError
from minitrain.grpo.batches import pack_micro_batches, response_example
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.grpo.responses import Response, packed_routes
from minitrain.models.router import Router
from minitrain.models.zoo import empty_model, model_config
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.rollout_files import read_rollouts
from minitrain.settings import Rollout
from minitrain.training.build import initialize
from minitrain.training.log_probs import label_log_probs
from tests.helpers import environments
from tests.helpers.grpo import TREE
from tests.helpers.oracle import check_close, snapshot
from tests.helpers.sampling import make

FAMILIES = [
    "mixtral-8x7b-tiny",
    "deepseek-v3-tiny",
    "gpt-oss-20b-tiny",
    "nemotron3-nano-30b-a3b-tiny",
    "qwen3.5-35b-a3b-tiny",
]
SIZES = {"vocab_size": 258, "initializer_range": 0.2}
select = Router._select


def perturbed(self, scores):
    """Select as a router of much less precision would."""
    generator = torch.Generator().manual_seed(scores.numel())
    noise = torch.randn(scores.shape, generator=generator)
    return select(self, scores + scores.std() * noise)


def make_tree(name: str, **more) -> dict:
    grpo = {"prompts": 2, "group": 4, "mock_digits": 2, "surrogate": "reinforce"}
    optim = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": None}
    return TREE | {
        "model": {"name": name, **SIZES},
        "grpo": grpo | {"replay_routing": True},
        "batch": {"global": 8, "micro": 2, "seq_len": 48},
        "optim": optim,
        **more,
    }


def sample(name: str, **settings) -> list[list[Response]]:
    """Groups from a sampler whose routers are perturbed."""
    shape = model_config(name, **SIZES)
    model = empty_model(shape).to_empty(device="cpu")
    initialize(model, 0)
    sampler = Sampler(model, None, Rollout(page_size=4, **settings))
    sampler.records = True
    prompts = [[7, 8, 9, 10, 11, 5 + n] for n in range(2)]
    params = SamplingParams(max_tokens=9, n=4, seed=1, ignore_eos=True)
    with mock.patch.object(Router, "_select", perturbed):
        found = sampler.generate(prompts, params)
    responses = [
        Response(
            n // 4, prompts[n // 4], each.tokens, each.logprobs, False, *[n % 3.0] * 2, "", ""
        )
        for n, each in enumerate(found)
    ]
    for response, each in zip(responses, found, strict=True):
        assert each.routes.shape[0] == 14 and each.routes.dtype == np.int16
        response.routes = packed_routes(each.routes)
    return [responses[:4], responses[4:]]


def learn(tree: dict, groups: list) -> tuple:
    config = configs.from_dict(tree)
    policy = PolicyTrainer(config, start(config), lambda name: nullcontext())
    before = snapshot(policy.model.named_parameters())
    numbers = policy.learn(groups, step=0)
    after = snapshot(policy.model.named_parameters())
    return {name: after[name] - before[name] for name in before}, numbers


def naive_gradients(tree: dict, groups: list) -> dict:
    """Of each sequence alone, with routers that are told their experts; advantages by their definition."""
    config = configs.from_dict(tree)
    model = empty_model(config.model.config).to_empty(device="cpu")
    initialize(model, config.seed)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    total, count = 0.0, 0
    for group in groups:
        rewards = torch.tensor([each.reward for each in group], dtype=torch.float64)
        for n, each in enumerate(group):
            others = torch.cat([rewards[:n], rewards[n + 1 :]])
            advantage = ((rewards[n] - others.mean()) / (rewards.std() + 1e-6)).item()
            experts = torch.from_numpy(each.experts(config)).long()
            parts = experts.unflatten(1, (len(routers), -1)).unbind(1)
            with mock.patch.object(Router, "_select", lambda self, scores: self.told):
                for router, told in zip(routers, parts, strict=True):
                    router.told = told
                tokens = torch.tensor([each.prompt + each.response])
                logits = model(tokens[:, :-1])[0, -len(each.response) :]
            own = logits.log_softmax(-1).gather(-1, tokens[0, -len(each.response) :, None])
            total = total - advantage * own.sum()
            count += len(each.response)
    (total / count).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ratio_on_policy_is_one_and_gradients_are_those_of_the_replayed_experts(name):
    """Decoded two steps at once, from prompts that share a page."""
    groups = sample(name, steps=2)
    tree = make_tree(name)
    changes, numbers = learn(tree, groups)
    assert numbers["token_mult_prob_error"] == pytest.approx(1, abs=2e-5)
    gradients = naive_gradients(tree, groups)
    expected = {name: -0.1 * gradients.get(name, torch.zeros(())) for name in changes}
    expected = {name: x.expand_as(changes[name]) for name, x in expected.items()}
    check_close([changes], expected, 2e-4, "weights")
    # without replay the policy is another one than what was sampled from
    other = learn(tree | {"grpo": tree["grpo"] | {"replay_routing": False}}, groups)[1]
    assert other["token_mult_prob_error"] > 1.01


def test_turns_of_an_environment_are_replayed():
    """What was said in between, too: the log-probabilities of all drawn tokens are the sampler's."""
    moe = partial(make, "mixtral-8x7b", num_layers=2)
    with mock.patch.object(environments, "make", lambda name, **fields: moe(**fields)):
        worker, problems = environments.talking_worker(environments.Scripted)
    worker.sampler.records = True
    with mock.patch.object(Router, "_select", perturbed), torch.no_grad():
        groups = worker.collect(problems, 0)
    shape = worker.sampler.model.config
    grpo = replace(worker.config.grpo, replay_routing=True)
    config = replace(worker.config, grpo=grpo, model=replace(worker.config.model, config=shape))
    responses = [response for group in groups for response in group]
    assert max(response.turns for response in responses) > 1
    batches = pack_micro_batches(
        [response_example(r, 0.0, config) for r in responses], config, 0, 1
    )
    for batch in batches:
        with torch.no_grad():
            found = label_log_probs(worker.sampler.model, batch)
        torch.testing.assert_close(found, batch["sampled"], atol=1e-4, rtol=0)


def test_layouts_learn_as_one_process(pool):
    """Experts over ranks, sequences over ranks, everything computed twice; two updates. Pages are few, so that samples
    were preempted."""
    name = FAMILIES[0]
    groups = sample(name, pages=12)
    tree = make_tree(name, batch={"global": 4, "micro": 1, "seq_len": 48})
    changes, numbers = pool.run(1, learn, tree, groups)[0]
    for more in (
        {"parallel": {"dp_shard": 2, "ep": 2}},
        {"parallel": {"cp": 2}, "recompute": "full"},
    ):
        results = pool.run(2, learn, tree | more, groups)
        check_close([result[0] for result in results], changes, 5e-5, "weights")
        assert results[0][1] == pytest.approx(numbers, rel=1e-4, abs=1e-6)


def test_a_run_keeps_the_experts_and_tells_their_memory(tmp_path, capsys):
    """One step off and resumed, so that responses come from their file, and those of step 3 from a model that has
    trained."""
    tree = make_tree(FAMILIES[0], data={"template": "plain"}, rollout={"max_tokens": 8})
    tree["grpo"] = tree["grpo"] | {"lag": 1}
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    for steps in (3, 4):
        words = [f"out_dir={tmp_path}/out", f"steps={steps}", "checkpoint.every=1"]
        train.main(["--config", str(tmp_path / "x.yaml"), *words])
    config = configs.from_dict(tree)
    layers = config.model.config.num_layers
    assert f"{2 * 2 * layers:,} bytes of experts per token" in " ".join(
        capsys.readouterr().out.split()
    )
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    for group in read_rollouts(tmp_path / "out/rollouts/step-00000004.jsonl"):
        for response in group:
            experts = response.experts(config)
            assert experts.shape == (len(response.prompt + response.response) - 1, 2 * layers)
            assert experts.min() == 0 and experts.max() < config.model.config.num_experts


@pytest.mark.parametrize(
    "words, told",
    [
        ({"model": TREE["model"]}, "needs a model with experts"),
        ({"parallel": {"tp": 2}}, "parallel.tp=2: ranks do not know"),
        ({"parallel": {"pp": 2}}, "parallel.pp=2: ranks do not know"),
        ({"rollout": {"max_tokens": 8, "tp": 2}}, "rollout.tp=2: ranks do not know"),
        ({"compile": True}, "has not been tried with compile=true"),
        ({"rollout": {"compile": True}}, "has not been tried with rollout.compile=true"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words, told):
    with pytest.raises(InputError, match=told):
        configs.from_dict(make_tree(FAMILIES[0]) | words)
