"""Configs of pipelines."""

from minitrain.parallel.pipeline_split import SCHEDULES

# stages of a rank: two where any number will do
STAGES = {name: schedule.stages or 2 for name, schedule in SCHEDULES.items()}


def tree(
    pp=2,
    schedule="1F1B",
    layers=4,
    micro_batches=4,
    data_ranks=1,
    model=(),
    parallel=(),
    **settings,
):
    """A config with `micro_batches` of two rows on each data rank."""
    model = {
        "name": "llama3-8b-tiny",
        "vocab_size": 128,
        "num_layers": layers,
        "initializer_range": 0.05,
    } | dict(model)
    return {
        "model": model,
        "batch": {"global": 2 * micro_batches * data_ranks, "micro": 2, "seq_len": 16},
        "optim": {"name": "sgd", "lr": 0.1, "clip": 0.5},
        "parallel": {"pp": pp, "schedule": schedule, "vp": STAGES[schedule]} | dict(parallel),
        "device": "cpu",
    } | settings
