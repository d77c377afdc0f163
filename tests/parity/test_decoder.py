"""The decoder computes what transformers computes: logits and every gradient, for every family, packed or not."""

import pytest
import torch

from minitrain import load_pretrained
from minitrain.models.layers import rotary_frequencies
from tests.helpers.hf_models import (
    CONFIGS,
    LLAMA3_ROPE,
    MOE_CONFIGS,
    WINDOW_CONFIGS,
    assert_same,
    build,
    packed,
    random_tokens,
)


@pytest.fixture(params=[*CONFIGS, *WINDOW_CONFIGS, *MOE_CONFIGS])
def pair(request, tmp_path):
    """The same weights in transformers and here, through a checkpoint on disk."""
    theirs = build(request.param)
    theirs.save_pretrained(tmp_path)
    return theirs, load_pretrained(tmp_path)


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
