"""Adapters that are random, B too, and training them."""

from unittest import mock

from tests.helpers.oracle import train


def random_adapter(name, tensor, generator):
    """B too: while it is zero, so are the gradients of A, whatever the layout makes of them."""
    tensor.normal_(0, 0.1, generator=generator)


def train_adapters(*args):
    """By torch's own Linears, as on GPUs, also where oneDNN's are faster."""
    with (
        mock.patch("minitrain.training.build.initialize_adapter", random_adapter),
        mock.patch("minitrain.training.build.use_cpu_linears"),
    ):
        return train(*args)
