"""Import what tests need, in the server that forks their processes, and exclude it from garbage collection."""

import gc
from contextlib import suppress
from importlib import import_module

gc.disable()
for name in (
    "tests.helpers.oracle",
    "tests.helpers.grpo",
    "minitrain.train",
    "minitrain.commands.bench",
    # imported by commands when they need it
    "minitrain.bench.measure_sampling",
    "minitrain.bench.shrink",
    "minitrain.simulator.predict",
    "minitrain.run.tasks.grpo_task",
    "minitrain.run.tasks.train_model",
    "torch._dynamo.backends.common",
    "torch._inductor.lowering",
    "torch.distributed.checkpoint",
    "transformers",
):
    # most tests do not need transformers
    with suppress(ModuleNotFoundError):
        import_module(name)
gc.freeze()
gc.enable()
