"""Find what a model and its device allow the sampler: pages, page sizes, CUDA graphs."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig, routing_width
from minitrain.models.grouped_mm import has_fast_kernel
from minitrain.models.shapes.mixers import state_bytes
from minitrain.parallel.tensor_decoder import tensor_parallel_size
from minitrain.settings import Rollout
from minitrain.training.footprint import free_memory

# models, with the numbers of those of their layers that have a part of every page
CachedLayers = list[tuple[Decoder, range]]
# elements of a pool: FlexAttention's decoding kernel does not compile for more
MAX_POOL_ELEMENTS = 2**31 - 1


def page_count(
    cached: CachedLayers,
    settings: Rollout,
    rows: int,
    longest: int,
    last_count: int = 0,
    records: bool = False,
) -> int:
    """Return how many pages the pool has.

    The first of these that applies:

        rollout.pages   if given
        last_count      if that many fit: kernels are compiled for the pool's size
        as many as      rollout.memory, a share of the free memory, has room for, but no more than
                        `rows` samples of `longest` tokens fill. One more is for the last page of a
                        prompt whose samples wait for a row. The ranks of a CPU split that share

    records: pages hold the experts of tokens, too. Raises InputError for more rollout.pages than fit.
    """
    fitting = fitting_pages(cached, settings.page_size, 1.0, rows, records)
    if settings.pages:
        if settings.pages > fitting:
            raise InputError(
                f"rollout.pages={settings.pages} are more than the free memory, or a kernel's index, has room for "
                f"(use at most {fitting}, or 0)"
            )
        return settings.pages
    if 0 < last_count <= fitting:
        return last_count
    # the last token is never cached
    most = rows * -(-(longest - 1) // settings.page_size) + 1
    # the ranks of a host make a pool each, before or after this one; torchrun says how many there are
    on_cpu = cached[0][0].head_weight.device.type == "cpu"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if on_cpu else 1
    share = settings.memory / ranks
    return max(1, min(most, fitting_pages(cached, settings.page_size, share, rows, records)))


def fitting_pages(
    cached: CachedLayers, page_size: int, share: float, rows: int, records: bool = False
) -> int:
    """Return how many pages fit into a share of the free memory, on all ranks that step together.

    Beside the states of recurrent layers, which `rows` samples and two more slots have.
    records: as for `page_count`; of the first model, in int16.
    """
    page_bytes = 2 * page_size * routing_width(cached[0][0].config) if records else 0
    states = 0
    sizes = []
    for model, layers in cached:
        config = model.config
        itemsize = model.head_weight.dtype.itemsize
        recurrent = filter(None, map(config.recurrence, layers))
        each = sum(state_bytes(shape, itemsize) for shape in recurrent)
        states += (rows + 2) * each // tensor_parallel_size(model)
        if config.kv_lora_rank:
            # latents, which all of a rank's heads read
            channels = config.kv_lora_rank + config.qk_rope_head_dim
            pools = 1
        else:
            # keys and values of this rank's heads
            heads = -(-config.num_key_value_heads // tensor_parallel_size(model))
            channels = heads * config.head_dim
            pools = 2
        sizes.append(channels)
        pools *= sum(config.parts(layer)[0] == "attention" for layer in layers)
        page_bytes += page_size * channels * pools * itemsize
    head = cached[0][0].head_weight
    room = max(0, share * free_memory(head.device) - states)
    fitting = int(room / max(page_bytes, 1))
    pages = torch.tensor(min(fitting, MAX_POOL_ELEMENTS // (page_size * max(sizes)) - 1))
    if isinstance(head, DTensor):
        pages = pages.to(head.device)
        mesh = head.device_mesh
        for dimension in range(mesh.ndim):
            dist.all_reduce(pages, dist.ReduceOp.MIN, mesh.get_group(dimension))
    return int(pages)


def check_page_size(size: int, config: DecoderConfig, tp: int, width: int = 1) -> None:
    """Raise InputError for a page size that FlexAttention cannot read.

    Its tiles are 128 keys, and a page needs as many tokens as there are queries of one key head: of
    latents all heads of a rank share it. width: tokens of a row.
    """
    sharers = tp if config.kv_lora_rank else config.num_key_value_heads
    queries = width * config.num_attention_heads // sharers
    if size % 128 or size < queries:
        least = 128 * -(-queries // 128)
        raise InputError(
            f"rollout.page_size={size} must be a multiple of 128 on CUDA, at least {least} for this model"
        )


def waits_for_device(model: Decoder) -> bool:
    """Return whether the host needs the device's results within a step, which no graph can replay.

    It does where FSDP gathers layers. With experts split over ranks it needs to know how many
    tokens arrive. Where grouped products lack torch's fast kernel it needs to know how many rows each
    expert has.
    """
    fast = all(has_fast_kernel(stack) for stack in expert_stacks(model))
    return isinstance(model, FSDPModule) or sends_tokens(model) or not fast


def sends_tokens(model: Decoder) -> bool:
    """Return whether tokens travel between ranks, to experts that are split over them."""
    return any(
        isinstance(stack, DTensor) and stack.placements[-1] == Shard(0)
        for stack in expert_stacks(model)
    )


def expert_stacks(model: Decoder) -> list[Tensor]:
    """Return the experts' parameters, each [experts, hidden, intermediate] or a DTensor of that.

    As attributes of modules they may be plain tensors after a forward pass.
    """
    return [p for name, p in model.named_parameters() if name.endswith("experts.down_proj")]
