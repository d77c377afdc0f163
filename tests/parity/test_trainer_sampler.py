"""The sampler's log-probabilities are the trainer's, to the last bit, where the kernels allow it.

In fp64, rounded once to fp32: then only another formula, mask, position or cache could show, since products of one row
and of many (prefill, decoding, training) differ by less than fp32 sees. tests/README.md lists where bits differ.
"""

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.settings import Rollout
from minitrain.training.log_probs import linear_log_probs
from minitrain.training.loss import IGNORE
from tests.helpers.families import families, is_rotary

PROMPTS = [list(range(5, 35)), list(range(7, 40)), [3], [*range(5, 35), 99]]


@pytest.mark.parametrize("name", [*families(is_rotary), "llama3.1-8b-tiny"])
@pytest.mark.parametrize(
    "limits", [{}, {"page_size": 4, "pages": 24, "slots": 3}], ids=["plain", "preempted"]
)
def test_log_probabilities_are_equal_to_the_bit(name, limits):
    torch.manual_seed(0)
    model = Decoder(model_config(name)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.05)
    sampler = Sampler(model, settings=Rollout(**limits))
    answers = sampler.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt + answer.tokens])
        labels = torch.full_like(tokens, IGNORE)
        labels[0, len(prompt) - 1 : -1] = torch.tensor(answer.tokens)
        log_probs, _ = model(tokens, labels=labels, head=linear_log_probs)
        assert log_probs[0, len(prompt) - 1 : -1].tolist() == answer.logprobs
