"""Gradient descent without momentum."""

import torch

from minitrain.parallel.shards import to_local


class SGD(torch.optim.Optimizer):
    """Gradient descent that can skip an update (see `update_weights`), of DTensors too."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        # a scalar 1 if `update_weights` skips this update
        skip = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = to_local(parameter)
                    gradient = to_local(parameter.grad)
                    change = group["lr"] * (gradient + group["weight_decay"] * weight)
                    weight -= change if skip is None else torch.where(skip > 0, 0, change)
