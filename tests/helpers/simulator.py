"""A machine whose rates are 1, so that tests can state times, and a GRPO config to simulate."""

from dataclasses import replace

from minitrain.run.config.load import from_dict
from minitrain.simulator.timeline import Attention, System

# a byte or a FLOP takes a second, a byte between GPUs half; all else is free
PLAIN = Attention(forward=1, backward=0.5, narrow=0.25, start=0)

SECOND = System(
    name="second",
    bf16=1,
    fp8=2,
    fp8_shares=dict.fromkeys(("tensor", "row", "block", "mx"), 1.0),
    memory=1,
    launch=0,
    beside=0.27,
    grouped_beside=0.5,
    grouped_launch=0,
    dispatch=0,
    dispatch_network=0.5,
    sent_to="ranks",
    passes=0,
    tensor=1,
    channels=0,
    spread=0,
    expert_layer=0,
    local_expert=0,
    unfused=1,
    attention={"full": PLAIN, "causal": PLAIN, "flex": replace(PLAIN, start=100)},
    nvlink=2,
    domain=8,
    network=0.5,
    host_link=50e9,
    host_memory=1,
    latency=0,
    far_latency=0,
    gemm_tiles=1,
    step=0,
    capacity=100,
    decode_weights=1,
    decode_caches=1,
    decode_step=0,
)

POLICY = {
    "model": "llama3-8b-tiny",
    "task": "grpo",
    "data": {"kind": "mock"},
    "precision": "bf16",
    "batch": {"global": 4, "micro": 1, "seq_len": 64},
    "parallel": {"dp_shard": 8},
    "grpo": {"prompts": 4, "group": 2, "reward": "math", "mock_digits": 7},
    "rollout": {"max_tokens": 12, "tp": 2},
}


def policy(rollout=(), grpo=(), **changes):
    """Return a config with two updates of four responses of 12 tokens to prompts of 8, on 8 GPUs with tp=2."""
    sections = {"rollout": POLICY["rollout"] | dict(rollout), "grpo": POLICY["grpo"] | dict(grpo)}
    return from_dict(POLICY | sections | changes)
