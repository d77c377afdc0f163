"""What the server of processes imports before it forks any: they find it there, and none of it is garbage to them."""

import gc
from contextlib import suppress
from importlib import import_module

gc.disable()
for name in (
    "tests.helpers.oracle",
    "tests.helpers.grpo",
    "minitrain.train",
    "minitrain.commands.bench",
    # what commands import once they know what to do
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
    with suppress(ModuleNotFoundError):  # most tests do without transformers
        import_module(name)
gc.freeze()
gc.enable()
