"""Name one model of the zoo for each family, so that tests of layouts and the sampler include new families."""

from collections.abc import Callable

from minitrain.formats.families import FAMILIES, OWN
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.zoo import ZOO, model_config


def families(wanted: Callable[[DecoderConfig], bool] = lambda config: True) -> list[str]:
    """Return the tiny twins of each family's first model in the zoo, of those whose config is wanted."""
    first = {}
    for name, fields in ZOO.items():
        first.setdefault(fields["family"], f"{name}-tiny")
    assert first.keys() == FAMILIES.keys() - {OWN}, "a family needs a model in the zoo"
    return [name for name in first.values() if wanted(model_config(name))]


def is_rotary(config: DecoderConfig) -> bool:
    """Return True for a dense model with rotary embeddings; without, key biases have zero gradients."""
    return is_dense(config) and config.position_embedding == "rotary"


def is_dense(config: DecoderConfig) -> bool:
    """Return True for a model without experts and scans, whose kernels do not support fp64."""
    return not (config.num_experts or config.layer_pattern)
