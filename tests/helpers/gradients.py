"""Compare gradients with those of another implementation."""

import torch
from torch import Tensor

from tests.helpers.oracle import relative_error


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check the relative error of each module's weight and bias as one vector.

    A bias that all keys share nearly cancels in the softmax, so its gradient alone would be mostly rounding.
    """
    assert found.keys() == expected.keys()
    modules: dict[str, list[str]] = {}
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        modules.setdefault(name.removesuffix(".weight").removesuffix(".bias"), []).append(name)
    for module, names in modules.items():
        one, other = (
            torch.cat([side[name].flatten() for name in names]) for side in (found, expected)
        )
        assert relative_error(one, other) < 1e-5, module
