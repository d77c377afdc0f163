"""Make routers select given experts, and compute what their bias must be after a step."""

from unittest import mock

import torch

from minitrain.data.text.text_rows import open_data
from minitrain.models.decoder import Decoder
from minitrain.models.router import Router
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.training.build import initialize
from minitrain.training.loop import Trainer
from minitrain.training.loss import IGNORE
from minitrain.training.packing import rows


def bias_after_a_step(tree):
    """Return the only router's bias after a step, and the bias that follows from one process's selections."""
    config = configs.from_dict(tree)
    trainer = Trainer(config, start(config))
    whole = Decoder(config.model.config)
    chosen = []
    initialize(whole, config.seed)
    whole.model.layers["1"].mlp.gate.register_forward_hook(
        lambda router, inputs, output: chosen.append(output[0])
    )
    batch = rows(Padded(config), range(8))
    whole(batch["tokens"], document_ids=batch["document_ids"])
    load = (
        chosen[0][(batch["document_ids"] == 0).flatten()].flatten().bincount(minlength=16).float()
    )
    trainer.step(Padded(config), 0)
    bias = trainer.model.model.layers["1"].mlp.gate.e_score_correction_bias
    return bias.clone(), 0.01 * torch.sign(load.mean() - load)


class Padded:
    """Mock data; the last n tokens of row n are padding."""

    def __init__(self, config):
        self.data, _ = open_data(
            config.data, config.batch.seq_len, config.model.config.vocab_size, config.seed
        )

    def row(self, n):
        row = self.data.row(n)
        place = torch.arange(self.data.seq_len)
        real = place < self.data.seq_len - n
        return {
            "tokens": torch.where(real, row["tokens"], 0),
            "labels": torch.where(real, row["labels"], IGNORE),
            "document_ids": torch.where(real, 0, -1),
        }


def all_to_the_first():
    """Make every token select experts 0, 1, ...: of four ranks with two experts each, three get no token."""
    return mock.patch.object(
        Router, "_select", lambda self, scores: torch.arange(self.top_k).expand(len(scores), -1)
    )
