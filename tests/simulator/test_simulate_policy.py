"""The simulated GRPO step: lengths against their closed form, decoding steps counted by hand."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from minitrain.bench.decoding import Reads, model_reads
from minitrain.bench.rows import CONFIGS
from minitrain.data.datasets import open_dataset
from minitrain.models.zoo import empty_model, model_config
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import from_dict, load
from minitrain.run.config.ranks import stated_ranks
from minitrain.simulator.simulate import Simulation
from minitrain.simulator.simulate_policy import (
    LENGTH_SPREAD,
    Stack,
    decoding_seconds,
    forward_share,
    generation_seconds,
    log_normal_location,
    memory_besides_steps,
    phase_seconds,
    refit_seconds,
    rollouts_of,
    training_config,
)
from tests.helpers.simulator import POLICY, SECOND, policy

READS = Reads(shared=1000, expert=100, token=0.5, heads=8)  # in each of 4 layers


def mean_of_cut_off(location: float, limit: float) -> float:
    """Of a log-normal whose values beyond the limit become the limit."""
    normal, cut = NormalDist(), (math.log(limit) - location) / LENGTH_SPREAD
    below = math.exp(location + LENGTH_SPREAD**2 / 2) * normal.cdf(cut - LENGTH_SPREAD)
    return below + limit * (1 - normal.cdf(cut))


@pytest.mark.parametrize("mean, limit", [(745, 1536), (3158, 4096), (100, 8192)])
def test_lengths_have_the_published_mean(mean, limit):
    assert mean_of_cut_off(log_normal_location(mean, limit), limit) == pytest.approx(
        mean, rel=2e-3
    )


def test_a_decoding_step_reads_weights_and_caches():
    """A byte takes a second. Of 8 experts, of which a token chooses 2, three tokens miss each with (3/4)^3."""
    dense, experts = model_config("llama3-8b-tiny"), model_config("mixtral-8x7b-tiny")
    assert (
        decoding_seconds(SECOND, dense, READS, samples=3, context=10, tp=1) == 1000 + 3 * 10 * 2
    )
    system = replace(SECOND, latency=2.0, decode_weights=0.5, decode_caches=0.25, decode_step=7.0)
    # and no message
    assert decoding_seconds(system, dense, READS, 3, 10, tp=1) == 1000 / 0.5 + 60 / 0.25 + 7
    assert (experts.num_experts, experts.num_experts_per_tok) == (8, 2)
    chosen = 8 * (1 - (3 / 4) ** 3)
    assert decoding_seconds(SECOND, experts, READS, 3, 10, tp=1) == pytest.approx(
        1060 + chosen * 100
    )


def test_tensor_parallel_decoding_reads_less_and_exchanges_more_slowly_between_domains():
    model = model_config("llama3-8b-tiny")
    system = replace(SECOND, latency=2.0, far_latency=7.0)
    exchanges = 2 * model.num_layers  # after attention and after the MLP
    assert decoding_seconds(system, model, READS, 3, 10, tp=8) == 1060 / 8 + exchanges * 1.0
    caches = 60 / 8  # of 8 heads
    assert (
        decoding_seconds(system, model, READS, 3, 10, tp=16)
        == 1000 / 16 + caches + exchanges * 7.0
    )


@pytest.mark.parametrize(
    "row",
    [*sorted(CONFIGS.glob("rl/*.yaml")), CONFIGS / "bench/grpo-8b.yaml"],
    ids=lambda row: row.stem,
)
def test_all_samples_of_a_row_are_decoded_at_once(row):
    config = load(row)
    samplers = (config.grpo.generation_ranks or stated_ranks(config)) // config.rollout.tp
    assert config.grpo.prompts * config.grpo.group // samplers <= config.rollout.slots


def test_samples_beyond_the_slots_take_turns():
    tree = {
        "model": "llama3-8b-tiny",
        "task": "grpo",
        "data": {"kind": "mock"},
        "batch": {"global": 4, "micro": 1},
    }
    policy = {"prompts": 4, "group": 2, "reward": "math", "mock_digits": 7}
    all_at_once, turns, half = (
        generation_seconds(
            from_dict(
                tree | {"grpo": policy | {"prompts": prompts}, "rollout": {"slots": slots}}
            ),
            SECOND,
            None,
        )
        for prompts, slots in ((4, 8), (4, 4), (2, 8))
    )
    assert turns == pytest.approx(2 * half) and all_at_once < turns


@pytest.mark.parametrize(
    "parallel, tokens, rows",
    [
        ({"pp": 2, "schedule": "1F1B"}, 12, 3),
        # fewer than two rounds of its ranks
        ({"pp": 2, "vp": 2, "schedule": "Interleaved1F1B"}, 12, 3),
        ({"pp": 2, "vp": 2, "schedule": "Interleaved1F1B"}, 28, 6),  # a multiple of its ranks
        ({"pp": 4, "schedule": "1F1B"}, 12, 4),
    ],
)
def test_rollouts_fill_as_many_rows_as_the_pipeline_takes(parallel, tokens, rows):
    """8 responses of 12 tokens to prompts of 8 are 2.5 rows of 64, of 28 tokens 4.5."""
    config = from_dict(
        {
            "model": "llama3-8b-tiny",
            "task": "grpo",
            "data": {"kind": "mock"},
            "parallel": {"dp_shard": 1} | parallel,
            "batch": {"global": 8, "micro": 1, "seq_len": 64},
            "rollout": {"max_tokens": tokens},
            "grpo": {"prompts": 4, "group": 2, "reward": "math", "mock_digits": 7},
        }
    )
    learner = training_config(config)
    check_layout(learner, stated_ranks(learner))
    assert learner.batch.global_ == rows


def test_a_file_of_problems_is_not_read_as_text(tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    config = from_dict(
        {
            "model": "llama3-8b-tiny",
            "task": "grpo",
            "data": {"kind": "jsonl", "path": str(tmp_path / "problems.jsonl")},
            "batch": {"global": 8, "micro": 1, "seq_len": 64},
            "rollout": {"max_tokens": 12},
            "grpo": {"group": 2},
        }
    )
    assert len(open_dataset(training_config(config))[0].row(0)["tokens"]) == 64


@pytest.mark.parametrize("lora", [False, True])
def test_a_forward_pass_is_a_product_less_of_a_share_where_weights_are_frozen(lora):
    """Of whole models a third of a step, of adapters half of it; of the forward pass too where it is run again."""
    tree = {"model": "llama3-8b-tiny"} | ({"lora": {}} if lora else {})
    shares = [
        forward_share(from_dict(tree | {"recompute": setting})) for setting in ("none", "full")
    ]
    assert shares == ([1 / 2, 1 / 3] if lora else [1 / 3, 1 / 4])


@pytest.mark.parametrize(
    ("changes", "reference", "sampler"),
    [
        ({}, 7, 2),
        ({"rollout": {"tp": 2}}, 7, 1),
        ({"precision": "fp32"}, 7, 4),
        ({"grpo": {"kl": 0.0}}, 0, 2),
        ({"grpo": {"kl": 0.1, "lag": 1, "generation_ranks": 8}}, 7, 0),
        ({"lora": {}}, 0, 2),
        ({"reference": {"gpus": 1}, "parallel": {}}, 7, 0),
    ],
    ids=str,
)
def test_what_is_held_besides_the_trainer(changes, reference, sampler):
    """A reference like the trainer's model, and bytes of a parameter of the sampler's."""
    tree = {
        "model": "llama3-8b-tiny",
        "task": "grpo",
        "data": {"kind": "mock"},
        "precision": "bf16",
        "batch": {"global": 8, "micro": 1, "seq_len": 64},
        "parallel": {"dp_shard": 8},
        "grpo": {"prompts": 4, "group": 2, "reward": "math", "kl": 0.1},
        "reference": {"gpus": 8},
    }
    grpo = tree["grpo"] | changes.get("grpo", {})
    config = from_dict(tree | changes | {"grpo": grpo})
    count = sum(p.numel() for p in empty_model(config.model.config).parameters())
    assert memory_besides_steps(config, {"parameters": 7}) == {
        "reference": reference,
        "sampler": sampler * count,
    }


@pytest.mark.parametrize(
    "states, kl, size", [("fp32", 0.1, 12), ("fp32", 0.0, 8), ("bf16", 0.1, 8)]
)
def test_offloading_costs_time_and_saves_memory(states, kl, size):
    """States and reference go to the host and come back, and the sampler counts where it holds more than training."""
    tree = {
        "model": "llama3-8b-tiny",
        "task": "grpo",
        "data": {"kind": "mock"},
        "precision": "bf16",
        "optim": {"states": states},
        "batch": {"global": 8, "micro": 1, "seq_len": 64},
        "parallel": {"dp_shard": 8},
        "grpo": {"prompts": 4, "group": 2, "reward": "math", "kl": kl, "offload": True},
        "reference": {"gpus": 8},
    }
    config = from_dict(tree)
    kept = replace(config, grpo=replace(config.grpo, offload=False))
    count = sum(p.numel() for p in empty_model(config.model.config).parameters())
    more = refit_seconds(config, SECOND, None) - refit_seconds(kept, SECOND, None)
    assert more == pytest.approx(2 * size * count / 8 / SECOND.host_link)
    for optimizer, sampler in ((count, count), (3 * count, 0)):
        held = memory_besides_steps(config, {"parameters": 70, "optimizer": optimizer})
        assert held == {"reference": 0, "sampler": sampler}
    held = memory_besides_steps(config, {"parameters": 7 * count, "optimizer": 60})
    assert held == (
        {"reference": 7 * count - 60, "sampler": 0}
        if kl
        else {"reference": 0, "sampler": 2 * count - 60}
    )


def test_what_a_published_stack_pays_for():
    """Mixtral's twin (4 layers of 8 experts) on 16 GPUs; a byte and a tensor take a second each."""
    tree = {
        "model": "mixtral-8x7b-tiny",
        "task": "grpo",
        "data": {"kind": "mock"},
        "recompute": "full",
        "batch": {"global": 8, "micro": 1, "seq_len": 64},
        "parallel": {"dp_shard": 8, "pp": 2, "schedule": "1F1B"},
        "grpo": {"prompts": 4, "group": 2, "reward": "math"},
        "rollout": {"max_tokens": 32},
        "reference": {"gpus": 16},
    }
    config = from_dict(tree)
    apart = replace(config, grpo=replace(config.grpo, lag=1, generation_ranks=8))
    stack = Stack(gather=1, tensor=1, offload=1, wake=10, prepare=0, far_step=0)
    weights = dict(empty_model(config.model.config).named_parameters())
    size = sum(p.numel() for p in weights.values())
    experts = [name for name in weights if ".experts." in name]
    tensors = len(weights) - len(experts) + 8 * len(experts)
    assert refit_seconds(config, SECOND, stack) == 2 * size + tensors + 10 + 12 * size / 16
    assert refit_seconds(apart, SECOND, stack) == 2 * size


AT_ONCE = POLICY["batch"] | {"global": 8}
STACK = Stack(gather=1, tensor=0, offload=1, wake=0, prepare=5, far_step=3)


@pytest.mark.parametrize(
    ("changes", "stack", "updates", "passes"),
    [
        ({}, None, 2, 1),
        ({"grpo": {"kl": 0.1}}, None, 2, 2),
        ({"batch": AT_ONCE}, None, 1, 0),
        ({}, STACK, 2, 2),
        ({"batch": AT_ONCE}, STACK, 1, 2),
        ({"grpo": {"lag": 1, "generation_ranks": 8}}, None, 2, 1),
    ],
    ids=str,
)
def test_a_step_is_the_sum_of_its_phases_unless_ranks_sample_beside_it(
    changes, stack, updates, passes
):
    """Of an optimizer step of 99 s a forward pass is a third."""
    config = policy(**changes)
    # on which sampling takes longer, and less
    for system in (SECOND, replace(SECOND, memory=1e12)):
        found = phase_seconds(config, system, Simulation({}, {}, 1, 1, step=99.0), stack)
        assert found["training_s"] == updates * 99 and found["logprobs_s"] == pytest.approx(
            passes * updates * 33
        )
        parts = found["generation_s"], found["training_s"] + found["logprobs_s"]
        beside = max(parts) if config.grpo.generation_ranks else sum(parts)
        assert found["step_time_s"] == pytest.approx(
            beside + found["refit_s"] + (stack.prepare if stack else 0)
        )
        assert found["generation_s"] == generation_seconds(config, system, stack)
        assert found["refit_s"] == refit_seconds(config, system, stack) > 0
    # a row for each rank, of which an update fills 1.25 or 2.5
    assert training_config(config).batch.global_ == 8


def test_responses_are_decoded_by_as_many_samplers_as_there_are():
    """All are 12 tokens long: what a pair of GPUs reads for its share, of 8 responses, of each token's turn."""
    shape = model_config("llama3-8b-tiny")

    def seconds(samples, tp):
        steps = [
            decoding_seconds(SECOND, shape, model_reads(shape), samples, 8 + n, tp)
            for n in range(12)
        ]
        return pytest.approx(sum(steps), rel=1e-3)

    assert generation_seconds(policy(), SECOND, None) == seconds(8 / 4, tp=2)
    apart = policy(grpo={"lag": 1, "generation_ranks": 4})
    assert generation_seconds(apart, SECOND, None) == seconds(8 / 2, tp=2)
    few = policy(rollout={"slots": 1})  # which a published stack is not known to have
    assert generation_seconds(few, SECOND, STACK) == generation_seconds(policy(), SECOND, None)
    between = replace(SECOND, domain=1)
    late = generation_seconds(policy(), between, STACK) - generation_seconds(
        policy(), between, None
    )
    assert late == pytest.approx(12 * STACK.far_step)


def test_drafts_take_fewer_passes_that_read_more():
    """Of two drafts half are right: 1.75 tokens a pass, which computes three, and a layer twice."""
    shape = model_config("mixtral-8x7b-tiny")
    layer = replace(shape, num_layers=1)
    steps = [
        decoding_seconds(SECOND, shape, model_reads(shape), 2, 8 + n, 2, together=3)
        + 2 * decoding_seconds(SECOND, layer, model_reads(layer), 2, 8 + n, 2)
        for n in range(12)
    ]
    drafted = policy(model="mixtral-8x7b-tiny", reference={"drafts": 2, "acceptance": 0.5})
    found = generation_seconds(drafted, replace(SECOND, decode_step=0.0), None)
    assert found == pytest.approx(sum(steps) / 1.75, rel=1e-3)
    chosen = 8 * (1 - (3 / 4) ** (3 * 2))
    assert decoding_seconds(SECOND, shape, READS, 3, 10, 1, together=2) == pytest.approx(
        1060 + chosen * 100
    )


FLIGHT = {"lag": 1, "in_flight": True, "generation_ranks": 4}


def test_samples_of_several_steps_are_decoded_together_in_flight():
    """All 12 tokens long, lag 2: while the first samples are at 8 + n, those after them are at 4 + n and n."""
    shape = model_config("llama3-8b-tiny")
    flight = policy(grpo=FLIGHT | {"lag": 2})
    steps = [
        decoding_seconds(SECOND, shape, model_reads(shape), 3 * 4, 8 + (n + n + 4 + n + 8) / 3, 2)
        for n in range(4)
    ]
    assert generation_seconds(flight, SECOND, None) == pytest.approx(sum(steps), rel=1e-3)
    # published stacks are not known to begin later steps
    apart = policy(grpo={"lag": 1, "generation_ranks": 4})
    assert generation_seconds(flight, SECOND, STACK) == generation_seconds(apart, SECOND, STACK)


def test_replies_lengthen_the_context_and_are_waited_for():
    """Three turns with replies of 6 tokens, in 12 sampled tokens: one more each token; two waits of 5 s."""
    shape = model_config("llama3-8b-tiny")
    row = {"turns": 3.0, "reply_tokens": 6.0}
    steps = [
        decoding_seconds(SECOND, shape, model_reads(shape), 2, 8 + 2 * n, 2) for n in range(12)
    ]
    silent = policy(reference=row)
    assert generation_seconds(silent, SECOND, None) == pytest.approx(sum(steps), rel=1e-3)
    assert rollouts_of(silent).tokens == 8 * (8 + 12 + 12)
    for grpo, waits in (({}, 10), (FLIGHT, 5)):
        quick, slow = (
            generation_seconds(
                policy(reference=row | {"environment_s": s}, grpo=grpo), SECOND, None
            )
            for s in (0.0, 5.0)
        )
        assert slow - quick == pytest.approx(waits)


def test_a_refit_sends_weights_in_bf16_over_the_slowest_link():
    size = 2 * sum(p.numel() for p in empty_model(policy().model.config).parameters())
    assert refit_seconds(policy(), SECOND, None) == size / 2 / SECOND.nvlink
    assert (
        refit_seconds(policy(parallel={"dp_shard": 16}), SECOND, None)
        == size / 2 / SECOND.network
    )
    # bytes of states and reference
    for changes, held in (({"precision": "bf16-pure"}, 8 + 2), ({"lora": {}}, 0)):
        offload = policy(grpo={"offload": True, "kl": 0.1}, **changes)
        moved = 2 * held * size / 2 / 8 / SECOND.host_link
        assert refit_seconds(offload, replace(SECOND, nvlink=1e12), None) == pytest.approx(
            moved + size / 2e12
        )
