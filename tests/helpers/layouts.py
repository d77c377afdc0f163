"""Settings of parallelism and memory techniques, for tests that combine them."""

from math import prod

TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 128,
        "num_layers": 2,
        "initializer_range": 0.05,
    },
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1, "clip": 1.0},
    "parallel": {"dp_shard": 1},
}

TECHNIQUES = {
    "fsdp": {"parallel": {"dp_shard": 2}},
    "hsdp": {"parallel": {"dp_replicate": 2}},
    "tp": {"parallel": {"tp": 2}},
    "cp": {"parallel": {"cp": 2, "context": "allgather"}},
    "ulysses": {"parallel": {"cp": 2, "context": "ulysses"}},
    "pp": {"parallel": {"pp": 2}},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "accumulation": {"batch": {"micro": 1}},
    "mtp": {"model": {"num_nextn_predict_layers": 2}, "mtp_weight": 0.5},
    "tied": {"model": {"tie_word_embeddings": True}},
}


def combine(*names):
    """Return TREE with the settings of all these techniques."""
    tree = {key: dict(value) for key, value in TREE.items()}
    for name in names:
        for key, value in TECHNIQUES[name].items():
            tree[key] = tree[key] | value if isinstance(value, dict) else value
    return tree


def ranks(tree):
    """Return the number of ranks of a config."""
    return prod(
        tree["parallel"].get(name, 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    )
