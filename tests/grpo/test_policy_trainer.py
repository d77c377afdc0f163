"""Updates against plain autograd on unpacked sequences; the two metrics that catch a stale sampler; adapters."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minitrain.data.chat.problems import open_problems
from minitrain.errors import InputError
from minitrain.grpo.advantages import advantages
from minitrain.grpo.batches import (
    enough_for_pipeline,
    pack_micro_batches,
    reply_example,
    response_example,
)
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.grpo.responses import rewards
from minitrain.models.lora import adapter_names, merge_adapters, merged_weight, without_adapters
from minitrain.models.router import Router
from minitrain.parallel.shards import to_local
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.settings import Parallel
from minitrain.training.loop import forward_backward
from minitrain.training.loss import IGNORE
from tests.helpers.grpo import TREE, made_up_groups
from tests.helpers.oracle import check_close, snapshot

PLAIN = TREE | {
    "grpo": {"prompts": 4, "group": 4, "mock_digits": 2, "clip_low": 0.05, "clip_high": 0.1},
    "rollout": TREE["rollout"] | {"temperature": 0.8},
}


def make_policy_trainer(tree):
    config = configs.from_dict(tree)
    return PolicyTrainer(config, start(config), lambda name: nullcontext())


def log_probs(model, prompt, response, temperature=1.0):
    """Of a response alone, from the logits of the whole vocabulary."""
    tokens = torch.tensor([prompt + response])
    distribution = (model(tokens[:, :-1]) / temperature).log_softmax(-1)
    return distribution.gather(-1, tokens[:, 1:, None])[0, -len(response) :, 0]


def descend(model, loss, lr):
    """Plain SGD with gradients clipped to a norm of 1."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    scale = min(1, 1.0 / torch.stack([g.norm() for g in gradients]).norm().item())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= lr * scale * gradient


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_updates_equal_autograd_on_single_sequences(aggregation):
    """Two updates of 8 responses each, clipped against the weights before both; some responses are filtered. One way
    of adding up also pays for divergence from other weights."""
    scaled, kl = aggregation != "sequence", 0.5 if aggregation == "token" else 0.0
    grpo = PLAIN["grpo"] | {
        "aggregation": aggregation,
        "std_scaling": scaled,
        "overlong_filter": True,
        "kl": kl,
    }
    policy = make_policy_trainer(PLAIN | {"grpo": grpo})
    groups, model = made_up_groups(), policy.model
    groups[1][2].truncated = groups[3][0].truncated = True
    values = advantages(rewards(groups), "leave_one_out", scaled).flatten().tolist()
    responses = [response for group in groups for response in group]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        reference = [
            log_probs(model, response.prompt, response.response, 0.8) for response in responses
        ]
        if kl:
            policy.keep_reference(None)
        for parameter in model.parameters():
            parameter.div_(1.1)
        old = [
            log_probs(model, response.prompt, response.response, 0.8) for response in responses
        ]
    begun, losses = snapshot(model.named_parameters()), []
    for update in (range(8), range(8, 16)):
        total, tokens, sequences = 0.0, 0, 0
        for i in (i for i in update if not responses[i].truncated):
            now = log_probs(model, responses[i].prompt, responses[i].response, 0.8)
            ratio, gap = (now - old[i]).exp(), reference[i] - now
            terms = -torch.minimum(ratio * values[i], ratio.clamp(0.95, 1.1) * values[i])
            terms = terms + kl * ratio * (gap.exp() - 1 - gap)
            total = total + (terms.mean() if aggregation == "sequence" else terms.sum())
            tokens, sequences = tokens + len(terms), sequences + 1
        count = {"token": tokens, "sequence": sequences, "constant": sequences * 8}[aggregation]
        losses.append((total / count).item())
        descend(model, total / count, policy.config.optim.lr)
    expected = {
        name: tensor - begun[name] for name, tensor in snapshot(model.named_parameters()).items()
    }
    model.load_state_dict(begun)
    numbers = policy.learn(groups, step=0)
    changes = {
        name: tensor - begun[name] for name, tensor in snapshot(model.named_parameters()).items()
    }
    # a change of 1e-3 to a norm's weight, which is about 1, is stored with a relative error of 6e-5
    check_close([changes], expected, 6e-5, "weights after two updates")
    assert numbers["clip_fraction"] > 0.1 and numbers["loss"] == pytest.approx(
        sum(losses) / 2, abs=1e-6
    )


def test_one_update_asks_for_no_log_probabilities_before_it():
    """Its own are those of the weights that the step began with."""
    policy = make_policy_trainer(PLAIN | {"batch": PLAIN["batch"] | {"global": 16}})
    policy.add_log_probs = None
    assert policy.learn(made_up_groups(), step=0)["clip_fraction"] == 0


def test_all_updates_of_a_step_have_its_learning_rate():
    policy = make_policy_trainer(PLAIN | {"optim": PLAIN["optim"] | {"warmup": 4}})
    policy.learn(made_up_groups(), step=1)
    assert policy.trainer.optimizer.param_groups[0]["lr"] == 2 / 4


def test_warm_up_learns_the_answers():
    policy = make_policy_trainer(
        TREE | {"grpo": {"warmup_steps": 30, "warmup_lr": 0.5, "mock_digits": 1}}
    )
    assert policy.warm_up(open_problems(policy.config)[0]) < 3  # it begins at log 258 = 5.6


def test_warm_up_equals_autograd_on_single_replies():
    """Two steps, on other problems each, with a learning rate of their own and the mean over the replies' tokens."""
    policy = make_policy_trainer(
        TREE | {"grpo": {"warmup_steps": 2, "warmup_lr": 0.3, "mock_digits": 4}}
    )
    problems, model = open_problems(policy.config)[0], policy.model
    begun = snapshot(model.named_parameters())
    for first in (0, 8):
        chosen = problems.take(first, 8)
        terms = torch.cat(
            [-log_probs(model, problem.prompt, problem.reply) for problem in chosen]
        )
        descend(model, terms.mean(), 0.3)
    expected = {
        name: tensor - begun[name] for name, tensor in snapshot(model.named_parameters()).items()
    }
    model.load_state_dict(begun)
    assert policy.warm_up(problems) == pytest.approx(terms.mean().item(), rel=1e-5)
    changes = {
        name: tensor - begun[name] for name, tensor in snapshot(model.named_parameters()).items()
    }
    check_close([changes], expected, 6e-5, "weights after two steps")


def test_warm_up_balances_experts_as_other_steps_do():
    """Oracle: the load, counted from what the routers return. None of it is left to GRPO's first update."""
    model = {"name": "deepseek-v3-tiny", "num_layers": 2, "vocab_size": 258}
    tree = TREE | {"model": model | {"bias_update_speed": 0.1}}
    policy = make_policy_trainer(tree | {"grpo": {"warmup_steps": 1, "mock_digits": 4}})
    routers = [module for module in policy.model.modules() if isinstance(module, Router)]
    loads = {router: torch.zeros(router.num_experts) for router in routers}
    before = {router: router.e_score_correction_bias.clone() for router in routers}

    def count(router, inputs, output):
        kept = output[0][inputs[1].flatten() >= 0].flatten()
        loads[router] += torch.bincount(kept, minlength=router.num_experts)

    for router in routers:
        router.register_forward_hook(count)
    policy.warm_up(open_problems(policy.config)[0])
    assert routers
    for router, load in loads.items():
        assert router.load is None and load.unique().numel() > 1
        expected = before[router] + 0.1 * torch.sign(load.mean() - load)
        assert torch.equal(router.e_score_correction_bias, expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_an_update_does_not_wait_for_the_device(aggregation):
    """On a device whose numbers nobody can ask for."""
    policy = make_policy_trainer(PLAIN | {"grpo": PLAIN["grpo"] | {"aggregation": aggregation}})
    policy.device = nowhere = torch.device("meta")
    responses = [response for group in made_up_groups() for response in group]
    batches = policy.batches(
        [response_example(response, 1.0, policy.config) for response in responses]
    )
    loss = forward_backward(
        policy.model.to(nowhere), policy.trainer.objective, batches, policy.meshes, nowhere
    )
    assert loss.device == nowhere and len(batches) > 1
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()


@pytest.mark.parametrize("keep_cache", [False, True])
def test_evaluation_leaves_no_trace(keep_cache):
    """The next step finds the sampler as a run does that resumes there: prompts are computed alike, to the bit."""
    grpo = {
        "prompts": 2,
        "group": 4,
        "mock_digits": 12,
        "keep_cache": keep_cache,
        "eval_samples": 2,
    }
    tree = PLAIN | {"grpo": grpo, "rollout": {"max_tokens": 4, "page_size": 4, "pages": 60}}
    run = GrpoTask(configs.from_dict(tree), folder=None)
    run.loop.evaluate()
    scheduler = run.loop.worker.sampler.scheduler
    assert (scheduler is not None) == keep_cache
    assert scheduler is None or not scheduler.pages.page_of


# ------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_response_is_in_one_row_of_one_rank(ranks):
    """Ranks get equally many rows; those that nothing is left for are empty, fewer than there are ranks."""
    config = configs.from_dict(PLAIN)
    responses = [response for group in made_up_groups() for response in group]
    samples = [
        response_example(response, i + 1.0, config) for i, response in enumerate(responses)
    ]
    batches = [pack_micro_batches(samples, config, rank, ranks) for rank in range(ranks)]
    assert len({len(each) for each in batches}) == 1
    seen, empty = [], []
    for batch in (batch for each in batches for batch in each):
        assert batch["tokens"].shape == (1, 32)
        empty.append(bool((batch["document_ids"] == -1).all()))
        for number in batch["document_ids"].unique():
            here = (batch["document_ids"] == number) & (batch["labels"] != IGNORE)
            if here.any():
                index = int(batch["advantages"][here][0]) - 1
                seen.append(index)
                assert batch["labels"][here].tolist() == responses[index].response
                assert batch["sampled"][here].tolist() == pytest.approx(
                    responses[index].log_probs
                )
                assert batch["starts"][here].tolist() == [1.0] + [0.0] * (
                    len(responses[index].response) - 1
                )
        assert torch.equal(batch["document_ids"] == -1, filling(batch))
    assert sorted(seen) == list(range(16))
    assert sum(empty) == -empty.count(False) % ranks


def filling(batch):
    """bool [rows, seq]: what stands after a row's last label; no response is without one, nor ends without one."""
    return (batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) == 0


def test_reply_sample():
    sample = reply_example([5, 6, 7], [8, 9])
    assert sample["tokens"].tolist() == [5, 6, 7, 8]
    assert sample["labels"].tolist() == [IGNORE, IGNORE, 8, 9]


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        ("1F1B", {1: 4, 4: 4, 5: 5}),
        ("DualPipeV", {1: 8, 9: 9}),
        ("Interleaved1F1B", {1: 1, 5: 5, 8: 8, 9: 10}),
        ("GPipe", {1: 1}),
    ],
)
def test_pipelines_get_the_micro_batches_that_they_need(schedule, counts):
    parallel = Parallel(pp=4, schedule=schedule)
    assert {count: enough_for_pipeline(parallel, count) for count in counts} == counts
    assert enough_for_pipeline(replace(parallel, pp=1), 3) == 3


# ------------------------------------------------------------------------------------------------------- stale weights


def test_a_stale_sampler_is_caught(tmp_path):
    """The weights move between sampling and training, as if a weight sync had been forgotten."""
    run = GrpoTask(configs.from_dict(PLAIN), tmp_path)
    run.begin()
    groups = run.loop.collect()
    fresh = run.policy.learn(groups, step=0)
    assert fresh["token_mult_prob_error"] < 1 + 1e-4 and abs(fresh["generation_kl_error"]) < 1e-6
    run.loop.update_sampler()
    groups = run.loop.collect()
    with torch.no_grad():
        for parameter in run.policy.model.parameters():
            parameter.mul_(1.05)
    stale = run.policy.learn(groups, step=1)
    assert stale["token_mult_prob_error"] > 1.01 and stale["generation_kl_error"] > 1e-4


# ------------------------------------------------------------------------------------------------------------- adapters


def make_adapted(tmp_path):
    policy = make_policy_trainer(
        PLAIN | {"lora": {"rank": 4, "alpha": 8}, "grpo": PLAIN["grpo"] | {"kl": 0.1}}
    )
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return policy


def test_the_reference_is_the_model_without_adapters(tmp_path):
    policy = make_adapted(tmp_path)
    base = make_policy_trainer(PLAIN)
    base.model.load_state_dict(policy.model.state_dict(), strict=False)
    config = policy.config
    responses = [response for group in made_up_groups() for response in group]
    batches = policy.batches([response_example(response, 0.0, config) for response in responses])
    with without_adapters(policy.model):
        policy.add_log_probs("reference", policy.model, batches)
    base.add_log_probs("expected", base.model, batches)
    policy.add_log_probs("adapted", policy.model, batches)
    for batch in batches:
        torch.testing.assert_close(batch["reference"], batch["expected"])
        assert (batch["adapted"] - batch["expected"]).abs().max() > 0.01
    with mock.patch.object(policy.trainer, "update", wraps=policy.trainer.update) as update:
        assert policy.learn(made_up_groups(), step=0)["kl"] > 1e-3
    updates = [call.args[0] for call in update.call_args_list]
    assert len(updates) == 2
    for batch in chain(*updates):
        base.add_log_probs("expected", base.model, [batch])
        torch.testing.assert_close(batch["reference"], batch["expected"])


def test_adapters_are_back_after_an_error(tmp_path):
    policy = make_adapted(tmp_path)
    linear = policy.model.model.layers["0"].self_attn.q_proj
    x = torch.randn(3, linear.in_features)
    adapted = linear(x)
    with pytest.raises(KeyError), without_adapters(policy.model):
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight), rtol=0, atol=0)
        raise KeyError
    torch.testing.assert_close(linear(x), adapted, rtol=0, atol=0)
    assert (adapted - F.linear(x, linear.weight)).abs().max() > 0.01
    assert policy.config.lora.scale == 2


def test_refits_send_merged_weights(tmp_path):
    policy = make_adapted(tmp_path)
    sent = {name: part.clone() for name, (part, _) in policy.weights().items()}
    merge_adapters(policy.model)
    expected = dict(policy.model.state_dict())
    assert set(sent) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor)


def test_a_refit_sends_changes_below_the_precision_of_bf16():
    """On average over the weights: rounded to the nearest, most would stay as they are without adapters."""
    policy = make_policy_trainer(PLAIN | {"precision": "bf16", "lora": {"rank": 4, "alpha": 8}})
    state, generator = policy.model.state_dict(), torch.Generator().manual_seed(0)
    sent, products, squares = {}, torch.zeros(2), 0.0
    for name in [name for name in state if name.endswith("proj.weight")]:
        weight, (a, b) = (
            to_local(state[name]),
            (to_local(state[adapter]) for adapter in adapter_names(name)),
        )
        change = 2 * b.normal_(std=1e-5, generator=generator) @ a
        sent[name], _ = policy.weights()[name]
        for i, rounded in enumerate(
            [sent[name], merged_weight(weight, a, b, policy.config.lora)]
        ):
            assert rounded.dtype == torch.bfloat16
            products[i] += ((rounded.float() - weight.float()) * change).sum()
        squares += change.square().sum()
    ours, nearest = (products / squares).tolist()
    assert ours == pytest.approx(1, abs=0.1) and nearest < 0.5
    again = policy.weights()
    assert all(torch.equal(part, again[name][0]) for name, part in sent.items())


def test_the_reference_is_on_disk_before_anything_is_trained(tmp_path):
    policy, kept = make_policy_trainer(TREE), Checkpointer(tmp_path, keep=1, asynchronous=True)
    policy.keep_reference(kept)
    assert kept.pending is None and kept.latest() == 0


def test_a_resumed_run_needs_the_reference_that_it_began_with(tmp_path):
    """Weights that have been trained already are no reference."""
    with pytest.raises(
        InputError, match=r"grpo.kl=0.1: the run that is resumed has kept no reference in"
    ):
        make_policy_trainer(TREE).keep_reference(Checkpointer(tmp_path, keep=1), resumed=True)
