"""What the benchmark counts: all tokens of prompts and responses, over the whole step, as the published table does."""

from pathlib import Path

import pytest

from minitrain.bench.measure_policy import measure_policy, published_lengths
from minitrain.bench.rows import load_row
from minitrain.run.config import load as configs
from minitrain.run.monitor.flops import clean, flops_per_token, lora_weights, policy_flops
from tests.helpers.grpo import TREE

ROW = Path(__file__).parents[2] / "configs" / "rl" / "llama3.1-8b-grpo-16gpu-onpolicy.yaml"


def test_a_row_of_the_table_has_its_lengths():
    """1562 tokens/s/GPU x 16 GPUs x 97.7 s are 2048 responses of 1060 tokens with prompts of 132."""
    config = published_lengths(configs.load(ROW))
    assert config.rollout.max_tokens == 1060 and config.grpo.mock_digits + 1 == 132
    fewer = published_lengths(load_row(ROW, ["grpo.prompts=16"])[1])
    assert fewer.grpo.prompts == 16 and fewer.grpo.mock_digits == config.grpo.mock_digits
    row = load_row(ROW, ["rollout.max_tokens=300"])[1]
    shorter = published_lengths(row)
    assert (
        shorter.rollout.max_tokens == 300 and shorter.grpo.mock_digits == config.grpo.mock_digits
    )
    assert row.reference["changed"] == ["rollout.max_tokens"]


def test_measured_row():
    tree = TREE | {
        "grpo": {"prompts": 4, "group": 4, "kl": 0.1},
        "batch": {"global": 8, "micro": 4, "seq_len": 32},
    }
    config = configs.from_dict(tree)
    outcome = measure_policy(config, "tiny", steps=1, warmup=1)
    assert outcome["steps"] == 1 and outcome["world_size"] == 1 and outcome["ratio"] is None
    tokens = 16 * (5 + outcome["response_tokens"])
    assert outcome["tokens_per_sec_per_gpu"] == pytest.approx(tokens / outcome["step_time_s"])
    phases = [outcome[f"{name}_s"] for name in ("generation", "logprobs", "training")]
    assert min(phases) > 0 and sum(phases) < 1.5 * outcome["step_time_s"]
    # two updates and a reference: sampling and two more forward passes, each a third of forward and backward
    assert policy_flops(config)(16 * 12) == 2 * flops_per_token(config.model.config, 12, clean)


def test_frozen_weights_have_no_gradient():
    config = configs.from_dict(
        TREE | {"grpo": {"prompts": 2, "group": 4, "kl": 0.0}, "lora": {"rank": 4}}
    )
    shape, lora = config.model.config, config.lora
    training = flops_per_token(shape, 12, clean, lora_weights(shape, lora.rank, lora.targets))
    sampling = flops_per_token(shape, 12, clean) / 3
    assert policy_flops(config)(8 * 12) == pytest.approx(training + sampling)
