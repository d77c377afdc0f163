"""GRPO over several ranks: one process's updates in every layout, synced weights equal to the bit, one step off."""

from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minitrain import Sampler, SamplingParams, save_pretrained
from minitrain.data.chat.problems import open_problems
from minitrain.grpo.offload import storages
from minitrain.grpo.policy_loop import make_sampler_model
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.grpo.rollouts import RolloutWorker
from minitrain.grpo.weight_sync import Move, WeightSync, plan, shards_of
from minitrain.models.decoder import Decoder
from minitrain.parallel.shards import local_shard
from minitrain.rollout import capacity, compiled, weights
from minitrain.rollout import cpu as cpu_attention
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.run.tasks.rollout_files import read_rollouts
from minitrain.settings import Rollout
from minitrain.training.loop import Trainer
from tests.helpers.grpo import MODEL, TREE, made_up_groups, oddness
from tests.helpers.kill import MEASURED
from tests.helpers.oracle import check_close, initial_weights, snapshot
from tests.helpers.policy_runs import run_policy
from tests.helpers.sampling import Counter, as_on_cuda, kinds_of_layers, make, prompts_of

# ------------------------------------------------------------------------------------------------------------- updates


def learn(tree, folder):
    """A step to warm up, and two updates from old weights and a reference; the change of the parameters that this rank
    knows, and the log."""
    config = configs.from_dict(tree)
    policy = PolicyTrainer(config, start(config), lambda name: nullcontext())
    before = snapshot(policy.model.named_parameters())
    policy.warm_up(open_problems(config)[0])
    for parameter in policy.model.parameters():  # so that the policy is not its own reference
        parameter.data.mul_(1.1)

    policy.keep_reference(Checkpointer(folder, keep=1))
    for parameter in policy.model.parameters():
        parameter.data.mul_(1 / 1.1)
    numbers = policy.learn(made_up_groups(), step=0)
    after = snapshot(policy.model.named_parameters())
    return {name: after[name] - before[name] for name in before}, numbers


@pytest.mark.parametrize(
    ("parallel", "grpo", "model"),
    [
        ({"dp_shard": 2, "tp": 2}, {}, {}),
        ({"dp_replicate": 2, "pp": 2}, {"aggregation": "sequence"}, {}),
        ({"dp_shard": 2, "cp": 2}, {"aggregation": "sequence"}, {}),
        ({"dp_shard": 4}, {}, {}),
        ({"pp": 2, "cp": 2}, {}, {"num_nextn_predict_layers": 1}),
    ],
    ids=str,
)
def test_updates_of_one_process(pool, tmp_path, parallel, grpo, model):
    tree = TREE | {"grpo": TREE["grpo"] | {"warmup_steps": 1, "warmup_lr": 0.5} | grpo}
    tree["model"] = MODEL | model
    (expected, numbers), *_ = pool.run(1, learn, tree, tmp_path / "one")
    results = pool.run(4, learn, tree | {"parallel": parallel}, tmp_path / "many")
    check_close([changes for changes, _ in results], expected, 2e-5, "weights after two updates")
    # all is at work
    assert (
        numbers["clip_fraction"] > 0.1 and numbers["kl"] > 1e-4 and numbers["importance"] < 1.09
    )
    for _, found in results:
        assert found == pytest.approx(numbers, rel=1e-4, abs=1e-6)


# --------------------------------------------------------------------------------------------------------------- refit


def refit(tree, tp):
    """Bring initial weights, laid out as `tree` says, to samplers on `tp` ranks each; all must arrive."""
    config = configs.from_dict(tree)
    meshes = start(config)
    training = range(dist.get_world_size() - config.grpo.generation_ranks)
    trains = dist.get_rank() in training
    samples = not config.grpo.generation_ranks or not trains
    mesh = dist.init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("replica", "tp"))["tp"]
    model = make_sampler_model(config, mesh) if samples else None
    want = partial(shards_of, model) if samples else dict
    for part, _ in want().values():
        part.fill_(float("nan"))
    policy = PolicyTrainer(config, meshes, nullcontext) if trains else None
    send = WeightSync(policy.weights if trains else dict, want)
    if samples:  # as sampling does on CUDA, which moves weights
        with (
            patch.object(weights, "can_join", lambda device: True),
            weights.SamplerWeights(model).in_use(),
        ):
            joined = [m for m in model.modules() if isinstance(m, weights.JoinedLinear)]
        assert bool(joined) == (tp == 1)
    moves = [move for bucket in send.buckets for move in bucket if move.source != move.target]
    for scale in (1, 2):  # twice: the plan is made once, the weights change
        send()
        for name, expected in initial_weights(config).items():
            if samples:
                part, where = want()[name]
                assert torch.equal(part, (scale * expected[where]).to(part.dtype)), name
        for parameter in policy.model.parameters() if trains else []:
            parameter.data.mul_(2)
    return moves


@pytest.mark.parametrize(
    ("model", "parallel", "apart", "tp"),
    [
        ("llama3-8b-tiny", {"dp_shard": 4}, 0, 1),
        ("llama3-8b-tiny", {"dp_shard": 2, "tp": 2}, 0, 2),
        ("llama3-8b-tiny", {"pp": 2, "tp": 2}, 0, 4),
        ("llama3-8b-tiny", {"dp_replicate": 2, "pp": 2}, 0, 1),
        ("llama3-8b-tiny", {"dp_shard": 2}, 2, 2),
        ("mixtral-8x7b-tiny", {"dp_shard": 4, "ep": 2}, 0, 1),
        ("qwen2.5-7b-tiny", {"tp": 2}, 2, 1),
    ],
    ids=str,
)
def test_refit_is_exact(pool, model, parallel, apart, tp):
    tree = TREE | {
        "model": {"name": model},
        "parallel": parallel,
        "grpo": {"lag": 1, "generation_ranks": apart},
    }
    # weights in fp32 then travel in bf16
    tree |= {"precision": "bf16" if model.startswith("qwen") else "fp32"}
    moves = list(chain(*pool.run(4, refit, tree, tp)))
    # its sender and its receiver know it, and no others
    assert moves and {moves.count(move) for move in moves} == {2}


def test_who_has_a_region_sends_none_and_the_others_take_turns():
    part = {"x": (((0, 4),), torch.float32)}
    wishes = [{}, part, part, part]
    moves = {
        move
        for rank in range(4)
        for move in chain(*plan(rank, [part, part, {}, {}], wishes, most=100))
    }
    assert sorted((move.target, move.source) for move in moves) == [(1, 1), (2, 1), (3, 0)]
    halves = [{"x": (((0, 2),), torch.float32)}, {"x": (((2, 4),), torch.float32)}]
    # no empty one
    assert plan(1, halves, [{}, halves[0]], most=100) == [
        [Move("x", 0, 1, ((0, 2),), torch.float32)]
    ]
    for offer in ({"x": (((0, 3),), torch.float32)}, {}):
        with pytest.raises(ValueError, match="rank 1 wants x"):
            plan(0, [offer, {}], [{}, part], most=100)


def sizes_of_buckets(
    offers: list[list[str]], wishes: list[list[str]], most: int
) -> list[list[int]]:
    """How much each rank sends and receives in each bucket, of tensors of 10 elements that some have and some want."""
    box = ((0, 10),), torch.float32
    offers, wishes = ([dict.fromkeys(names, box) for names in each] for each in (offers, wishes))
    plans = [plan(rank, offers, wishes, most) for rank in range(len(wishes))]
    # all ranks have as many, and a move is in the same one at both its ends
    for bucket in zip(*plans, strict=True):
        moves = list(chain(*bucket))
        assert all(moves.count(move) == 1 + (move.source != move.target) for move in moves)
    for buckets in plans:
        names = [move.name for move in chain(*buckets)]
        assert names == sorted(names)
    return [
        [10 * sum(move.source != move.target for move in bucket) for bucket in buckets]
        for buckets in plans
    ]


def test_buckets_are_bounded_for_each_rank():
    """Not on average: all of this goes to one rank, from two, and then from one, to two."""
    names = [f"{i:02}" for i in range(16)]
    assert sizes_of_buckets([names[::2], names[1::2], []], [[], [], names], most=30) == [
        [20, 10, 20, 10, 20, 0],
        [10, 20, 10, 20, 10, 10],
        [30, 30, 30, 30, 30, 10],
    ]
    assert sizes_of_buckets([["a", "b"], [], []], [[], ["a"], ["b"]], most=10) == [
        [10, 10],
        [10, 0],
        [0, 10],
    ]
    # larger than a bucket
    assert sizes_of_buckets([["a", "b"], []], [[], ["a", "b"]], most=5) == [[10, 10]] * 2
    # no rank has two
    assert sizes_of_buckets([["a"], [], ["b"], []], [[], ["a"], [], ["b"]], most=5) == [[10]] * 4
    # copies need no buffer
    assert sizes_of_buckets([names[:7]] * 2, [names[:7]] * 2, most=5) == [[0]] * 2


# ----------------------------------------------------------------------------------------------------- shared samplers


def fill(model, round):
    """Give a model, of any layout, weights that depend on their names and the round, none at a telling value."""
    for name, tensor in model.state_dict().items():
        part, where = local_shard(tensor)
        generator = torch.Generator().manual_seed(len(name) + 1000 * round + ord(name[-1]))
        noise = torch.randn(tensor.shape, generator=generator) * (
            0.3 if tensor.ndim == 1 else 0.08
        )
        part.copy_((noise + name.endswith("norm.weight"))[where])


def sample_twice(model, after_round=lambda: None, beside=None, **settings):
    """Before and after new weights: (tokens, log-probabilities) of each sample, and the sampler."""
    rollout = Rollout(slots=5, page_size=4, pages=12, chunk=9, **settings)
    found, sampler = [], Sampler(model, settings=rollout, draft=beside)
    for round in (0, 1):
        fill(model, round)
        sampler.refresh()
        params = SamplingParams(temperature=0.8, max_tokens=6, n=2)
        # tiny matrices are multiplied as large ones are
        with patch.object(cpu_attention, "MIN_PACKED_ELEMENTS", 0):
            found += [
                (each.tokens, each.logprobs) for each in sampler.generate(prompts_of(), params)
            ]
        after_round()
    return found, sampler


def shared_model(tree):
    """One that the two ranks sample with together."""
    config = configs.from_dict(tree)
    start(config)
    return make_sampler_model(config, dist.init_device_mesh("cpu", (2,)))


def sample_shared(tree):
    found, sampler = sample_twice(shared_model(tree))
    return found, sampler.scheduler.preemptions, len(sampler.weights.packed)


@pytest.mark.parametrize(
    ("model", "ep"),
    [
        ({"name": "gpt3-175b-tiny"}, 1),
        ({"name": "qwen3-30b-a3b-tiny"}, 1),
        ({"name": "deepseek-v3-tiny"}, 2),
        ({"name": "gpt-oss-20b-tiny", "num_key_value_heads": 1}, 2),
        ({"name": "nemotron3-super-120b-a12b-tiny"}, 2),
        ({"name": "qwen3-next-80b-a3b-tiny"}, 2),
    ],
    ids=str,
)
def test_ranks_that_share_a_model_sample_as_one(pool, model, ep):
    """Experts by channels or whole, latents, sinks and windows, states, a head that both ranks have; and no weight of
    the first round is left."""
    tree = TREE | {"model": model, "rollout": {"tp": 2, "ep": ep}}
    model = Decoder(configs.from_dict(tree).model.config).requires_grad_(False)
    expected, _ = sample_twice(model)
    linears = sum(type(module) is torch.nn.Linear for module in model.modules())
    for found, preemptions, packed in pool.run(2, sample_shared, tree):
        # one copy of each matrix, and of a tied head
        assert preemptions > 0 and packed <= linears + 1
        for (tokens, logprobs), (right, theirs) in zip(found, expected, strict=True):
            assert tokens == right and logprobs == pytest.approx(theirs, abs=2e-5)


def sample_shared_with_drafts(tree):
    """Of a model that is whole on every rank, where it is not quite the same: as if it rounded differently."""
    model, draft = shared_model(tree), None
    if not model.config.num_nextn_predict_layers:
        draft = make("qwen3-32b")
        draft.lm_head.weight.add_(
            0.02 * dist.get_rank() * torch.randn(draft.lm_head.weight.shape)
        )
    found, sampler = sample_twice(model, beside=draft, draft="" if draft else "mtp")
    return found, sampler.scheduler.preemptions, dict(sampler.drafter.counts)


@pytest.mark.parametrize(
    ("name", "ep", "depths"),
    [
        ("qwen3-30b-a3b", 1, 0),
        ("nemotron3-super-120b-a12b", 2, 0),
        ("deepseek-v3", 2, 1),
        ("llama3-8b", 1, 1),
    ],
)
def test_ranks_that_share_a_model_verify_the_same_drafts(pool, name, ep, depths):
    """Those of a model beside it, and those of its own layer of multi-token prediction."""
    model = {"name": f"{name}-tiny", "num_nextn_predict_layers": depths}
    tree = TREE | {"model": model, "rollout": {"tp": 2, "ep": ep}}
    model = Decoder(configs.from_dict(tree).model.config).requires_grad_(False)
    expected, _ = sample_twice(model)
    results = pool.run(2, sample_shared_with_drafts, tree)
    for found, preemptions, counts in results:
        assert preemptions > 0 and counts["drafted"] > counts["accepted"] > 0
        for (tokens, logprobs), (right, theirs) in zip(found, expected, strict=True):
            assert tokens == right and logprobs == pytest.approx(theirs, abs=2e-5)
    assert results[0] == results[1]


def collect_counted(tree):
    """A step's groups, and how often the reward function was called on this rank."""
    whole, answers = GrpoTask(configs.from_dict(tree), None), []
    whole.begin()
    whole.loop.worker.reward = lambda response, answer, row: (
        answers.append(answer) or oddness(response, answer, row)
    )
    groups = whole.loop.collect()
    return groups, len(answers)


def test_ranks_that_share_a_sampler_share_what_rewards_cost(pool):
    """A function of one's own may ask another model, or run code, for each of a step's 4 x 4 responses."""
    [(expected, calls)] = pool.run(1, collect_counted, TREE)
    results = pool.run(4, collect_counted, TREE | {"rollout": TREE["rollout"] | {"tp": 2}})
    assert calls == 16 and [calls for _, calls in results] == [4] * 4
    for groups, _ in results:
        assert [[(r.response, r.reward) for r in g] for g in groups] == [
            [(r.response, r.reward) for r in g] for g in expected
        ]


def sample_compiled(tree, on_cuda):
    model, counter, counts = shared_model(tree), Counter(), []
    compiled.compiled_forward.cache_clear()
    with (
        patch.object(torch, "compile", partial(torch.compile, backend=counter)),
        patch.object(
            compiled, "cache_for_compiler", as_on_cuda if on_cuda else compiled.cache_for_compiler
        ),
    ):
        found, _ = sample_twice(model, lambda: counts.append(counter.graphs), compile=True)
    compiled.compiled_forward.cache_clear()
    torch.compiler.reset()
    return found, counts


@pytest.mark.parametrize(
    ("name", "ep", "on_cuda"),
    [("qwen3-30b-a3b", 1, True), ("gpt3-175b", 1, False), ("qwen3-30b-a3b", 2, False)],
)
def test_ranks_that_share_a_model_compile_their_steps(pool, name, ep, on_cuda):
    """With their collectives: up to five graphs in a layer, for three numbers of rows, and none for new weights. But
    not where tokens are sent to experts."""
    tree = TREE | {"model": {"name": f"{name}-tiny"}, "rollout": {"tp": 2, "ep": ep}}
    model = Decoder(configs.from_dict(tree).model.config).requires_grad_(False)
    expected, _ = sample_twice(model)
    for found, (first, second) in pool.run(2, sample_compiled, tree, on_cuda):
        assert (ep == 1) == (first > 0) and first == second <= 5 * 3 * kinds_of_layers(
            model.config
        )
        for (tokens, logprobs), (right, theirs) in zip(found, expected, strict=True):
            assert tokens == right and logprobs == pytest.approx(theirs, abs=2e-5)


def sample_after_one_token(model, compile=False):
    fill(model, 0)
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=9, compile=compile))
    return sampler.generate([[1]], SamplingParams(temperature=0, max_tokens=4))[0].tokens


def sample_after_one_token_shared(tree):
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        compiled.compiled_forward.cache_clear()
        found = sample_after_one_token(shared_model(tree), compile=True)
    compiled.compiled_forward.cache_clear()
    return found


def test_ranks_that_share_a_model_need_no_prompts_step_first(pool):
    """In which hooks would have made each rank's parts of the weights, before compiled steps read them."""
    tree = TREE | {"model": {"name": "qwen3-32b-tiny"}, "rollout": {"tp": 2}}
    expected = sample_after_one_token(
        Decoder(configs.from_dict(tree).model.config).requires_grad_(False)
    )
    assert pool.run(2, sample_after_one_token_shared, tree) == [expected] * 2


def waits_after_sampling(tree):
    model = shared_model(tree)
    for parameter in model.parameters():
        parameter.zero_()
    Sampler(model).generate([[1, 2]], SamplingParams(max_tokens=1))
    with patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)):
        return capacity.waits_for_device(model)


@pytest.mark.parametrize(("ep", "waits"), [(1, False), (2, True)])
def test_steps_that_send_tokens_to_experts_are_not_captured(pool, ep, waits):
    """Known also after a forward pass, during which plain tensors hid the parameters that say so."""
    tree = TREE | {
        "model": {"name": "qwen3-30b-a3b-tiny"},
        "precision": "bf16",
        "rollout": {"tp": 2, "ep": ep},
    }
    assert pool.run(2, waits_after_sampling, tree) == [waits] * 2


# --------------------------------------------------------------------------------------------------------- one step off


LAGGING = TREE | {
    "steps": 4,
    "batch": {"global": 16, "micro": 2, "seq_len": 32},
    "grpo": {
        "prompts": 4,
        "group": 4,
        "mock_digits": 2,
        "lag": 1,
        "importance": "truncate",
        "reward": f"{__name__}:oddness",
    },
}


def test_one_step_off_equals_its_replay_in_one_process(pool, tmp_path):
    """2 ranks that train and 2 that sample: the same responses to the letter, the same weights but for rounding."""
    [(expected, weights)] = pool.run(1, run_policy, LAGGING, tmp_path / "one", [])
    grpo = LAGGING["grpo"] | {"generation_ranks": 2}
    (found, trained), (_, same), *others = pool.run(
        4, run_policy, LAGGING | {"grpo": grpo}, tmp_path / "apart", []
    )
    assert [weights for _, weights in others] == [None, None]
    for numbers, _ in others:  # by which they judge how it went, as all do
        assert [line["loss"] for line in numbers] == [line["loss"] for line in found]
    check_close([trained, same], weights, 1e-5, "weights")
    for one, apart in zip(expected, found, strict=True):
        assert all(one[key] == apart[key] for key in ("reward", "length", "step_tokens"))
        assert apart["token_mult_prob_error"] == pytest.approx(
            one["token_mult_prob_error"], rel=1e-5
        )
    errors = [line["token_mult_prob_error"] for line in expected]
    assert errors[0] < 1 + 1e-5 and min(errors[1:]) > 1 + 1e-3  # of age 0 and 1
    for step in range(1, 5):
        name = f"rollouts/step-{step:08d}.jsonl"
        sides = [read_rollouts(tmp_path / side / name) for side in ("one", "apart")]
        one, apart = (
            [(r.prompt, r.response) for group in groups for r in group] for groups in sides
        )
        assert one == apart
    # none for a step that will not be
    assert len(list((tmp_path / "one/rollouts").iterdir())) == 4


@pytest.mark.parametrize("own", [False, True])
def test_drafts_change_no_response(pool, tmp_path, own):
    """And the log, which a rank that only trains may write, says how many were right. Of a draft model; and of a layer
    of the policy that is trained along."""
    model = MODEL | {"num_nextn_predict_layers": int(own)}
    save_pretrained(Decoder(configs.from_dict({"model": MODEL}).model.config), tmp_path / "draft")
    tree = LAGGING | {"steps": 2, "model": model}
    [(expected, _)] = pool.run(1, run_policy, tree, tmp_path / "plain", [])
    assert not any("draft" in key for line in expected for key in line)
    draft = "mtp" if own else str(tmp_path / "draft")
    drafting = {"max_tokens": 8, "draft": draft, "draft_tokens": 2}
    tree = tree | {"rollout": drafting}
    [(alone, _)] = pool.run(1, run_policy, tree, tmp_path / "alone", [])
    apart = tree | {"grpo": tree["grpo"] | {"generation_ranks": 2}}
    found = pool.run(4, run_policy, apart, tmp_path / "apart", [])[0][0]
    # nothing is sampled while the last step trains
    assert ["draft_acceptance" in line for line in alone] == [True, False]
    one = alone[0]
    assert 0 < one["draft_acceptance"] == found[0]["draft_acceptance"] < 1
    drafted = one["drafted_per_sec"] * one["generation_s"]
    assert drafted == pytest.approx(round(drafted)) and drafted > 100
    rate = one["accepted_per_sec"] / one["drafted_per_sec"]
    assert rate == pytest.approx(one["draft_acceptance"])
    for step in (1, 2):
        sides = [
            read_rollouts(tmp_path / side / f"rollouts/step-{step:08d}.jsonl")
            for side in ("plain", "alone", "apart")
        ]
        plain, *others = ([[r.response for r in group] for group in side] for side in sides)
        assert others == [plain, plain]


def test_a_run_that_begins_anew_samples_anew(tmp_path):
    """Whatever another run, which had no checkpoint yet, has left in its folder."""
    found = []
    for scale in (0.05, 0.06):
        begun = GrpoTask(
            configs.from_dict(LAGGING | {"model": MODEL | {"initializer_range": scale}}), tmp_path
        )
        next(begun.steps(begun.begin()))
        found.append(read_rollouts(begun.rollouts(0)))
    assert found[0] != found[1]


@pytest.mark.parametrize("split", [{}, {"ep": 2}], ids=str)
def test_ranks_that_share_a_sampler_count_each_response_once(pool, tmp_path, split):
    """With ep the policy also trains so, and its experts go from one layout to the other."""
    model = (
        {"model": {"name": "qwen3-30b-a3b-tiny", "vocab_size": 258, "initializer_range": 0.05}}
        if split
        else {}
    )
    tree = LAGGING | {"steps": 1, "grpo": LAGGING["grpo"] | {"lag": 0}} | model
    [(expected, _)] = pool.run(1, run_policy, tree, tmp_path / "one", [])
    tree = tree | {"rollout": TREE["rollout"] | {"tp": 2} | split, "parallel": split}
    (found, _), _ = pool.run(2, run_policy, tree, tmp_path / "two", [])
    assert found[0]["token_mult_prob_error"] < 1 + 1e-4
    assert found[0]["step_tokens"] == expected[0]["step_tokens"]
    one, two = (
        read_rollouts(tmp_path / side / "rollouts/step-00000001.jsonl") for side in ("one", "two")
    )
    assert [[r.response for r in group] for group in one] == [
        [r.response for r in group] for group in two
    ]


@pytest.mark.parametrize("adapters", [{}, {"lora": {"rank": 4}}], ids=str)
def test_resume_is_exact_with_ranks_apart(pool, tmp_path, adapters):
    grpo = LAGGING["grpo"] | {"generation_ranks": 2, "kl": 0.1, "warmup_steps": 1}
    tree = LAGGING | {"grpo": grpo, "optim": {"lr": 1e-3}} | adapters
    at_once, *_ = pool.run(4, run_policy, tree, tmp_path, [2])
    # from step 2, with what step 3 was to train on
    resumed, *_ = pool.run(4, run_policy, tree, tmp_path, [])
    assert [line["step"] for line in resumed[0]] == [3, 4]
    for before, after in zip(at_once[0][2:], resumed[0], strict=True):
        assert all(before[key] == after[key] for key in before if not key.endswith(MEASURED))
    assert all(torch.equal(tensor, resumed[1][name]) for name, tensor in at_once[1].items())
    assert (tmp_path / "reference").exists() == (not adapters)


def test_the_newest_responses_stay(pool, tmp_path):
    """And those on which a run goes on that resumes: after the checkpoint of step 2 those of step 3."""
    tree = LAGGING | {"grpo": LAGGING["grpo"] | {"keep_rollouts": 1}}
    for steps, files in (([], [4]), ([2], [3, 4])):
        folder = tmp_path / str(len(steps))
        folder.joinpath("rollouts").mkdir(parents=True)
        folder.joinpath("rollouts/step-notes.jsonl").touch()  # of nobody's
        [(at_once, weights)] = pool.run(1, run_policy, tree, folder, steps)
        expected = [*(f"step-{number:08d}.jsonl" for number in files), "step-notes.jsonl"]
        assert sorted(file.name for file in folder.joinpath("rollouts").iterdir()) == expected
    [(resumed, again)] = pool.run(1, run_policy, tree, folder, [])
    assert [line["loss"] for line in at_once[2:]] == [line["loss"] for line in resumed]
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def what_is_said(tree):
    whole = GrpoTask(configs.from_dict(tree), None)
    whole.begin()
    return list(whole.about())


def test_a_sampler_beside_an_fp8_trainer_says_that_it_computes_in_bf16(pool):
    line, tree = "precision=fp8: the sampler computes in bf16", TREE | {"precision": "fp8"}
    assert all(
        line in said for said in pool.run(2, what_is_said, tree | {"parallel": {"dp_shard": 2}})
    )
    assert not any(
        line in said for said in pool.run(2, what_is_said, TREE | {"parallel": {"dp_shard": 2}})
    )


@pytest.mark.parametrize("lag", [0, 1])
def test_resume_takes_the_problems_that_come_next(pool, tmp_path, lag):
    """Of steps that needed one round of sampling or several; kept in the checkpoint, and with sampled responses."""
    grpo = LAGGING["grpo"] | {
        "lag": lag,
        "generations": 3,
        "reward": "tests.helpers.policy_runs:of_some",
    }
    tree = LAGGING | {"grpo": grpo, "steps": 5, "optim": {"lr": 1e-3}}
    [(at_once, _)] = pool.run(1, run_policy, tree, tmp_path, [3])
    taken = [0, *(line["problems"] for line in at_once)]
    assert (
        len({after - before for before, after in pairwise(taken)}) > 1 and taken[-1] < 5 * 3 * 4
    )
    responses = [read_rollouts(tmp_path / f"rollouts/step-{step:08d}.jsonl") for step in (4, 5)]
    [(resumed, _)] = pool.run(1, run_policy, tree, tmp_path, [])
    for before, after in zip(at_once[3:], resumed, strict=True):
        assert all(before[key] == after[key] for key in before if not key.endswith(MEASURED))
    assert responses == [
        read_rollouts(tmp_path / f"rollouts/step-{step:08d}.jsonl") for step in (4, 5)
    ]


# -------------------------------------------------------------------------------------------- memory, of one at a time


def run_watched(tree, folder, steps):
    """`run_policy`, and which of the optimizer's, the reference's and the sampler's tensors are there whenever one
    begins to sample, to compute log-probabilities, to train or to save."""
    runs, held, init = [], [], GrpoTask.__init__

    def remember(self, *arguments):
        init(self, *arguments)
        runs.append(self)

    def watched(function):
        def call(*arguments):
            policy, sampler = (
                runs[0].policy,
                runs[0].loop.worker.sampler.model.state_dict().values(),
            )
            parts = {
                "states": policy.states(),
                "reference": policy.reference_weights(),
                "sampler": sampler,
            }
            held.append(
                (
                    function.__name__,
                    *(name for name, tensors in parts.items() if storages(tensors)),
                )
            )
            return function(*arguments)

        return call

    with (
        patch.object(GrpoTask, "__init__", remember),
        patch.object(RolloutWorker, "collect", watched(RolloutWorker.collect)),
        patch.object(PolicyTrainer, "add_log_probs", watched(PolicyTrainer.add_log_probs)),
        patch.object(Trainer, "update", watched(Trainer.update)),
        patch.object(Checkpointer, "save", watched(Checkpointer.save)),
    ):
        return *run_policy(tree, folder, steps), held[1:]  # without the reference's checkpoint


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_and_sampling_leave_each_other_their_memory(pool, tmp_path, asynchronous):
    """Nothing else changes, to the bit; saved and resumed in between, too."""
    tree = LAGGING | {"steps": 3, "optim": {"lr": 1e-3}, "rollout": {"max_tokens": 8, "tp": 2}}
    tree |= {"checkpoint": {"asynchronous": asynchronous}}
    plain, offload = (
        tree | {"grpo": LAGGING["grpo"] | {"lag": 0, "kl": 0.1, "offload": on}}
        for on in (False, True)
    )
    at_once = pool.run(4, run_policy, plain, tmp_path / "plain", [])
    found = pool.run(4, run_watched, offload, tmp_path / "offload", [2])
    resumed = pool.run(4, run_policy, offload, tmp_path / "offload", [])
    # which makes the states
    first = [("collect", "sampler"), ("add_log_probs", "reference"), ("update",)]
    step = [*first[:2], ("update", "states")]
    assert [held for *_, held in found] == [[*first, *step, ("save", "states"), *step]] * 4
    for (expected, right), (numbers, trained, _), (last, again) in zip(
        at_once, found, resumed, strict=True
    ):
        assert [line["step"] for line in last] == [3]
        for one, other in zip(expected + expected[2:], numbers + last, strict=True):
            assert all(one[key] == other[key] for key in one if not key.endswith(MEASURED))
        assert all(
            torch.equal(trained[name], right[name]) and torch.equal(again[name], right[name])
            for name in right
        )


@pytest.mark.parametrize(
    "change",
    [
        {"grpo": {"prompts": 2, "group": 8}},
        {"batch": {"seq_len": 8}},
        {"grpo": {"overlong_buffer": 4}},
        {"rollout": {"temperature": 0.5}},
    ],
    ids=str,
)
def test_responses_kept_from_other_settings_are_sampled_anew(pool, tmp_path, change):
    """Their groups would be of another size than the config says, longer than its rows, or worth something else."""
    pool.run(1, run_policy, LAGGING, tmp_path, [2])
    kept = tmp_path / "rollouts/step-00000003.jsonl"
    before = read_rollouts(kept)
    assert [len(group) for group in before] == [4] * 4
    assert any(len(r.prompt) + len(r.response) > 9 for group in before for r in group)
    [(numbers, _)] = pool.run(
        1,
        run_policy,
        LAGGING | {key: LAGGING[key] | new for key, new in change.items()},
        tmp_path,
        [],
    )
    assert [line["step"] for line in numbers] == [3, 4]
    groups = read_rollouts(kept)
    assert groups != before and [len(group) for group in groups] == (
        [8] * 2 if "prompts" in str(change) else [4] * 4
    )
    assert all(
        len(r.prompt) + len(r.response) <= (9 if "batch" in change else 33)
        for group in groups
        for r in group
    )
    assert "overlong_buffer" not in str(change) or any(
        r.reward < r.score for group in groups for r in group
    )
