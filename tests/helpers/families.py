"""One model of the zoo for each family: a new family is tested in every layout, and in the sampler, by itself."""

from collections.abc import Callable

from minitrain.formats.families import FAMILIES, OWN
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.zoo import ZOO, model_config


def families(wanted: Callable[[DecoderConfig], bool] = lambda config: True) -> list[str]:
    """Return the tiny twin of the zoo's first model of each family, in the zoo's order, if it is wanted."""
    first = {}
    for name, fields in ZOO.items():
        first.setdefault(fields["family"], f"{name}-tiny")
    assert first.keys() == FAMILIES.keys() - {OWN}, "a family needs a model in the zoo"
    return [name for name in first.values() if wanted(model_config(name))]


def is_rotary(config: DecoderConfig) -> bool:
    """Return True for a dense model that rotates keys: else the gradient of their biases is rounding alone."""
    return is_dense(config) and config.position_embedding == "rotary"


def is_dense(config: DecoderConfig) -> bool:
    """Return True if matrix products in fp64 are all that is compared: grouped ones and scans know none."""
    return not (config.num_experts or config.layer_pattern)
