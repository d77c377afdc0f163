"""Lists of the pages that a step reads."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain import Sampler, SamplingParams
from minitrain.errors import InputError
from minitrain.models.zoo import model_config
from minitrain.rollout import caches, capacity
from minitrain.rollout.steps import DecodingStep
from minitrain.settings import Rollout
from tests.helpers.sampling import make, prompts_of, uncached

pytestmark = pytest.mark.usefixtures("pack_everything")


def test_pages_that_cuda_can_read():
    # of 64 heads and of 128
    dense, latent = (model_config("qwen3-32b"), model_config("deepseek-v3"))
    for size, config, tp in ((128, dense, 1), (256, dense, 8), (128, latent, 1)):
        capacity.check_page_size(size, config, tp)
    latent = dataclasses.replace(latent, num_attention_heads=256, num_key_value_heads=256)
    capacity.check_page_size(128, latent, 2)
    for size, config, least in ((64, dense, 128), (128, latent, 256)):
        with pytest.raises(
            InputError,
            match=f"rollout.page_size={size} must be a multiple of 128 .* at least {least}",
        ):
            capacity.check_page_size(size, config, 1)


@pytest.mark.parametrize("window", [None, 1, 4, 6, 9])
def test_page_lists_name_what_a_sample_sees(window):
    """Every key of the pool that the lists and the rule let through, for all lengths; what CUDA's kernel reads."""
    size, width, pool = 4, 6, 30
    generator, positions = torch.Generator().manual_seed(0), torch.arange(size * width)
    table = torch.stack([torch.randperm(pool, generator=generator)[:width] for _ in positions])
    step = DecodingStep(
        torch.zeros_like(positions), table, torch.zeros_like(positions), size, pool
    )
    step.begin()
    blocks = step.page_mask(window)  # made once, then brought up to date in place
    step.positions.copy_(positions)
    step.begin()
    assert step.page_mask(window) is blocks
    for row, own in enumerate(positions.tolist()):
        pages = blocks.kv_indices[row, 0, 0, : blocks.kv_num_blocks[row, 0, 0]].tolist()
        assert len(pages) == len(set(pages)) and blocks.full_kv_indices is None
        keys = [
            k
            for page in pages
            for k in range(page * size, (page + 1) * size)
            if blocks.mask_mod(row, 0, 0, k)
        ]
        seen = range(max(0, own - window + 1) if window else 0, own + 1)
        assert sorted(keys) == sorted(int(table[row, i // size]) * size + i % size for i in seen)


class Kernels(TorchDispatchMode):
    """Counts operations that are not just views of what there is."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.count += not function.is_view
        return out


def test_a_step_finds_its_pages_in_few_kernels():
    """Each takes microseconds to start, in every step."""
    positions, table = torch.arange(8), torch.arange(48).view(8, 6)
    step = DecodingStep(positions, table, torch.zeros_like(positions), 4, 48)
    step.begin()
    step.page_mask(None)
    with Kernels() as kernels:
        step.begin()
    assert kernels.count <= 9


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v3"])
def test_frequencies_are_computed_once(name):
    model, (prompt,) = make(name), prompts_of((5,))
    expected = uncached(model, prompt, 6)
    with mock.patch.object(
        caches, "rotary_frequencies", wraps=caches.rotary_frequencies
    ) as computed:
        (found,) = Sampler(model, settings=Rollout(slots=2, page_size=4, pages=20)).generate(
            [prompt], SamplingParams(temperature=0, max_tokens=6)
        )
    assert computed.call_count == 1 and found.tokens == expected
