"""The decoder computes what transformers computes: logits and every gradient, for every family, packed or not."""

import pytest
import torch

from minitrain import load_pretrained
from minitrain.models.layers import rotary_frequencies
from tests.helpers.hf_models import (
    CONFIGS,
    LLAMA3_ROPE,
    MOE_CONFIGS,
    build,
    compare_and_differentiate,
    packed,
    random_tokens,
)


@pytest.fixture(params=[*CONFIGS, *MOE_CONFIGS])
def pair(request, tmp_path):
    """The same weights in transformers and here, through a checkpoint on disk."""
    theirs = build(request.param)
    theirs.save_pretrained(tmp_path)
    return theirs, load_pretrained(tmp_path)


def in_our_layout(name, gradient, gpt_oss):
    """transformers stacks experts too, GPT-OSS's transposed, of all others gate rows first, then up rows."""
    name = name.replace(".router.", ".gate.")
    if gpt_oss and name.endswith(("gate_up_proj", "down_proj")):
        gradient = gradient.transpose(1, 2)
    if not gpt_oss and "gate_up_proj" in name:
        gradient = torch.stack(gradient.chunk(2, dim=1), dim=2).flatten(1, 2)
    return name, gradient


def assert_same(found, expected, ours, theirs):
    """The logits, and every gradient."""
    compare_and_differentiate(found, expected)
    gpt_oss = theirs.config.model_type == "gpt_oss"
    expected = dict(in_our_layout(name, p.grad, gpt_oss) for name, p in theirs.named_parameters())
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


def test_logits_and_gradients(pair):
    theirs, ours = pair
    tokens = random_tokens(2, 40)
    assert_same(ours(tokens), theirs(tokens).logits, ours, theirs)


def test_packed_documents_equal_each_document_alone(pair):
    theirs, ours = pair
    rows = [[9, 1, 20, 10], [25, 15]]
    tokens = random_tokens(2, 40)
    expected, document_ids, positions = packed(theirs, tokens, rows)
    assert_same(
        ours(tokens, positions=positions, document_ids=document_ids), expected, ours, theirs
    )


def test_positions_shift_the_rotation_of_the_scaled_family(tmp_path):
    """Far positions tell scaled from unscaled frequencies; near ones barely do."""
    theirs = build("llama3.1")
    theirs.save_pretrained(tmp_path)
    tokens, positions = random_tokens(1, 24), torch.arange(24)[None] * 10
    expected = theirs(tokens, position_ids=positions).logits
    torch.testing.assert_close(
        load_pretrained(tmp_path)(tokens, positions=positions), expected, atol=1e-4, rtol=0
    )


def test_llama3_scaling_covers_its_three_zones():
    plain = rotary_frequencies(8, LLAMA3_ROPE["rope_theta"])
    ratio = rotary_frequencies(8, LLAMA3_ROPE["rope_theta"], LLAMA3_ROPE) / plain
    oracle = build("llama3.1").model.rotary_emb.inv_freq
    torch.testing.assert_close(ratio * plain, oracle, atol=0, rtol=1e-6)
    assert ratio[0] == 1
    assert 1 / 8 < ratio[1] < 1
    torch.testing.assert_close(ratio[2:], torch.full((2,), 1 / 8))
