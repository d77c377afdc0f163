"""Multi-token prediction: layers after the last that predict later tokens (DeepSeek-V3, 2.2).

The head predicts token i + 1 from h_i, the final norm's output. Depth k = 1, 2, ... is one block
more, which predicts token i + 1 + k, and uses embedding and head of the model:

    x_i = eh_proj [enorm(embedding of token i + k), hnorm(h_i of depth k - 1)]
    h_i = shared_head.norm(block(x)_i)

The loss is in training/mtp_loss.py. In the sampler a depth can draft tokens, which the model
accepts or not. A file has depth k as layer num_layers + k - 1, with these names.

The report does not say whether depth 1 gets h before or after the final norm. Megatron-LM trains
it after, and vLLM and SGLang serve DeepSeek-V3's own layer so; torchtitan trains it before.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minitrain.models.layers import NORMS

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig


class MTPMixin:
    """What makes a block a depth: class MTPBlock(MTPMixin, Block)."""

    def __init__(self, config: "DecoderConfig", layer: int):
        super().__init__(config, layer)
        hidden = config.hidden_size
        norm = NORMS[config.norm]
        self.enorm = norm(hidden, eps=config.norm_eps)
        self.hnorm = norm(hidden, eps=config.norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        # a module, since a file's name has it: shared_head.norm
        self.shared_head = nn.ModuleDict({"norm": norm(hidden, eps=config.norm_eps)})

    def forward(self, hidden: Tensor, embedded: Tensor, *inputs) -> Tensor:
        """Return h, [batch, seq, hidden], of this depth.

        hidden: h of the depth before. embedded: embeddings of the tokens k later. Both are [batch,
        seq, hidden]. inputs: the block's others.
        """
        joint = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        return self.shared_head.norm(super().forward(self.eh_proj(joint), *inputs))
