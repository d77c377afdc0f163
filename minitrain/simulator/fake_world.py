"""Trace one rank's training step on fake tensors, in a world of any size.

Nothing is computed, sent or allocated. The code that runs is the one `bench.py` measures: the same
model, layout, compiler, loop and optimizer. Four things differ:

- the process group is torch's fake one;
- tensors are fake, and on the CPU;
- attention is one operator that knows how many query-key pairs its mask allows (the parts of
  models/merged_attention.py are operators already and need no stand-in);
- the head's weight gradient is accumulated by the matrix product itself, as on CUDA.

The compiler does everything except generate kernels: it cuts each block into a forward and a backward
graph, and decides which tensors are saved between them. Memory leaves out the buffers that are in
flight between pipeline stages.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

# torch.compile's backend without kernels calls debugging.boxed_nop, which has no public name
from torch._dynamo.backends import debugging
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule
from torch.nn import Module

# torch's fake process group has no public name
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.attention import Mask, apply_sinks
from minitrain.models.merged_attention import MAX_CHANNELS, merged_attention
from minitrain.models.quantize import is_placeholder
from minitrain.parallel import recompute, shards
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.overlap import fill_waits
from minitrain.run.launch.start import meshes_of
from minitrain.run.monitor.flops import unseen_keys
from minitrain.settings import Config
from minitrain.simulator.host_copies import recorded_copies
from minitrain.simulator.marks import mark_blocks, marked_passes, marked_schedule, parts
from minitrain.simulator.operators import ATTENTION_WORK, attention_work
from minitrain.simulator.repeat import RepeatedGraph
from minitrain.simulator.trace import Trace, Tracer
from minitrain.training import loss
from minitrain.training.adamw import states_on_device
from minitrain.training.build import allocate, lay_out, make_model
from minitrain.training.ema import update_averages
from minitrain.training.loop import Trainer

# the models' exchange points for attention: over tokens, and from a video to its text
ATTENDING = ("attend", "attend_text")
# a name in parallel/shards.py that `patched_for_fake_tensors` replaces
OFFSETS = "compute_local_shape_and_global_offset"


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make a process group of `world_size` ranks in which this process is `rank`.

    The other ranks do not exist; collectives return immediately.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def process_groups(meshes: Meshes) -> dict[str, tuple[list[str], list[int]]]:
    """Return each process group's mesh dimensions and ranks, by the group's name."""
    # meshes may share a group under different dimension names
    groups: dict[str, tuple[list[str], list[int]]] = {}
    for field in fields(meshes):
        mesh = getattr(meshes, field.name)
        for dimension in mesh.mesh_dim_names if mesh else ():
            group = mesh.get_group(dimension)
            new = [], dist.get_process_group_ranks(group)
            groups.setdefault(group.group_name, new)[0].append(dimension)
    return groups


# --- attention and the head's gradient


@torch.library.custom_op("minitrain::attention", mutates_args=())
def fake_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, pairs: float | None
) -> tuple[Tensor, Tensor]:
    """Stand in for attention; return its output and log-sum-exp [batch, heads, queries].

    q: [batch, heads, queries, head_dim]; k, v: [batch, kv_heads, keys, head_dim].
    causal, pairs: see `attention_work`.
    """
    raise NotImplementedError("this operator exists for fake tensors only")


@torch.library.custom_op("minitrain::attention_backward", mutates_args=())
def fake_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    causal: bool,
    pairs: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("this operator exists for fake tensors only")


@fake_attention.register_fake
def _(q, k, v, causal, pairs):
    # attention kernels return memory of layout [batch, queries, heads, head_dim]
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[-1])
    out = out.transpose(1, 2)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@fake_attention_backward.register_fake
def _(grad, q, k, v, out, log_sum, causal, pairs):
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.causal, ctx.pairs = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, _):
    return *fake_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.pairs), None, None


fake_attention.register_autograd(_differentiate, setup_context=_save)
FAKE_ATTENTION_WORK = {
    torch.ops.minitrain.attention: attention_work,
    torch.ops.minitrain.attention_backward: lambda grad, q, k, v, out, log_sum, causal, pairs=None: (
        attention_work(q, k, v, causal, pairs, backward=True)
    ),
}


def fake_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Stand in for models/attention.py's `attention`, with the same shapes."""
    # `counting_mask` puts the number of pairs in the place of a mask tensor
    mask = mask or Mask(causal=False)
    # on a GPU `takes_parts` chooses cuDNN's kernels in these cases
    widest = max(q.shape[3], v.shape[3])
    if mask.chunks and mask.attn_mask is not None and widest <= MAX_CHANNELS:
        return merged_attention(q, k, v, mask.chunks, sinks)
    out, log_sum = fake_attention(q, k, v, mask.causal, mask.attn_mask)
    return out if sinks is None else apply_sinks(out, log_sum, sinks[:, None])


def counting_mask(
    visible: float,
    length: int,
    device,
    document_ids=None,
    causal=True,
    q_positions=None,
    window=None,
    plain=True,
) -> Mask:
    """Stand in for `make_mask`: count the query-key pairs per row that the mask would allow.

    visible: with document ids, the share of a row's causal pairs that lie within one document.
    Context-parallel ranks have equal numbers of pairs, so a rank with `q_positions` gets its share of
    the row's.
    """
    if plain and document_ids is None and window is None and (q_positions is None or not causal):
        return Mask(causal)
    seen = length if document_ids is None else length * visible
    pairs = length * seen / (2 if causal else 1)
    if window is not None:
        pairs -= length * unseen_keys(seen, window) / 2
    if q_positions is not None:
        return Mask(causal, pairs * len(q_positions) / length)
    return Mask(causal, pairs, (0,) if causal and document_ids is None and not window else None)


def fake_add_product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """Stand in for training/loss.py's `_add_product`: [m, n] += [m, k] @ [k, n]."""
    torch.ops.minitrain.add_product(total, a, b)


# --- a step


def trace_step(
    config: Config, world_size: int, rank: int = 0, visible: float | None = 1.0
) -> Trace:
    """Trace an optimizer step of `rank`, after the first step, when optimizer states exist.

    visible: see `counting_mask`; None keeps attention and the head's gradient as they are on CPUs.
    Marks of the trace: `forward` and `backward` where a micro-batch's passes begin, `optimizer`
    where gradients are complete. In a pipeline also (stage, kind, micro-batch), see replay.Action,
    where an action of the schedule begins, and None where it ends. Raises InputError for a run with
    a teacher, which would be a second model.
    """
    if config.teachers:
        raise InputError("distill.teacher: a second model is not simulated (leave it out)")
    with fake_world(world_size, rank), patched_for_fake_tensors(visible):
        meshes = meshes_of(config, "cpu")
        tracer = Tracer(process_groups(meshes))
        dataset, _ = open_dataset(config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            trainer = Trainer(
                replace(config, device="cpu"), meshes, build=partial(build_counted, visible)
            )
            make_optimizer_states(trainer)
            # fake tensors have no values, so their labels cannot be counted
            trainer.objective.count = lambda batch: 1
            record_step(trainer, dataset, tracer)
    return tracer.trace


def record_step(trainer: Trainer, dataset, tracer: Tracer) -> None:
    """Trace step 0 of a trainer whose optimizer states exist. Its tensors may be real or fake."""
    tracer.classify(parts(trainer.model.state_dict().values()), "parameters")
    tracer.classify(parts(states_on_device(trainer.optimizer)), "optimizer")
    with (
        tracer,
        marked_schedule(tracer),
        marked_passes(trainer, tracer),
        recorded_copies(tracer, FakeTensor),
    ):
        mark_blocks(trainer.model, tracer)
        trainer.step(dataset, 0)


def build_counted(
    visible: float | None, config: Config, meshes: Meshes, fill: Callable | None = None
) -> Module:
    """Stand in for `build_model`: lay out a model from `make_counted`. Its values are undefined."""
    # layouts are made on the meta device, whose tensors cannot also be fake
    with unset_fake_temporarily():
        model = lay_out(partial(make_counted, visible, config), config, meshes)
    allocate(model, config, meshes.device)
    return model


def make_counted(visible: float | None, config: Config, **stage) -> Module:
    """Return `make_model`'s model, or stage, with stand-ins for attention and compilation.

    With `visible` None, attention stays as it is.
    """
    model = make_model(config, **stage)
    for block in model.blocks:
        block.compile = partial(compile_without_kernels, block)
    if visible is not None:
        model.make_mask = partial(counting_mask, visible)
        for module in model.modules():
            for name in ATTENDING:
                if hasattr(module, name):
                    setattr(module, name, fake_attend)
    return model


@contextmanager
def patched_for_fake_tensors(visible: float | None) -> Iterator[None]:
    """Patch functions that models have no exchange points for, so that they work on fake tensors."""
    saved = recompute.ATTENTION | {torch.ops.minitrain.attention.default}
    patches = [
        # recomputation saves the outputs of fake attention too, and the tracer counts its work
        patch.object(recompute, "ATTENTION", saved),
        patch.dict(ATTENTION_WORK, FAKE_ATTENTION_WORK),
        # reads numbers back from tensors
        patch.object(shards, OFFSETS, without_fake_tensors(getattr(shards, OFFSETS))),
        # fake tensors cannot become the subclass that FP8's placeholders are (fsdp_fp8.Unstrided), so
        # torch.as_strided gets its behavior
        patch.object(Tensor, "as_subclass", lambda tensor, kind: tensor),
        patch.object(
            torch, "as_strided", partial(as_strided_unless_placeholder, torch.as_strided)
        ),
        patch.object(debugging, "boxed_nop", repeated_graph),
    ]
    if visible is not None:
        # CPUs accumulate the head's gradient differently than CUDA
        patches.append(patch.object(loss, "_add_product", fake_add_product))
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def repeated_graph(graph: GraphModule, inputs: list) -> RepeatedGraph:
    """Return a compiled graph in the order that overlap.py gives it, which is traced once."""
    fill_waits(graph.graph)
    graph.recompile()
    return RepeatedGraph(graph, inputs)


def without_fake_tensors(function: Callable) -> Callable:
    """Wrap a function so that the tensors it creates are real."""

    def run(*args):
        with unset_fake_temporarily():
            return function(*args)

    return run


def as_strided_unless_placeholder(
    as_strided: Callable, tensor: Tensor, *args, **kwargs
) -> Tensor:
    """Return FP8's placeholders unchanged, other tensors strided."""
    return tensor if is_placeholder(tensor) else as_strided(tensor, *args, **kwargs)


def compile_without_kernels(module: Module, options: dict | None = None, **others) -> None:
    """Stand in for `module.compile`: make the compiler's graphs, but generate no kernels."""
    Module.compile(module, backend="aot_eager_decomp_partition", **others)


def make_optimizer_states(trainer: Trainer) -> None:
    """Create the optimizer's states, as a first step would."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    if trainer.config.optim.ema:
        update_averages(trainer.optimizer, trainer.config.optim, 0, torch.tensor(True))
    trainer.optimizer.zero_grad(set_to_none=True)
