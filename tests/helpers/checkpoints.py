"""Make small models, save and load their checkpoints, and compare their state."""

import resource
from contextlib import contextmanager

import torch
from torch import nn

from minitrain.run.checkpoint.checkpointer import Checkpointer


def make(width=8, layers=2, optimizer=torch.optim.AdamW, seed=0):
    """Return a small model with a buffer and a frozen parameter, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model.register_buffer("count", torch.tensor(float(seed)))
    model[0].bias.requires_grad_(False).fill_(0.5)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)


def step(model, optimizer):
    """Run one training step."""
    inputs = torch.arange(16.0).view(2, 8) / 16
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def content(model, optimizer):
    """Return copies of the model's state, and of the optimizer's state by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        f"{names[p]}/{key}": value
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    return {key: value.clone() for key, value in {**model.state_dict(), **state}.items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def save_many(folder, numbers, keep):
    """Save a checkpoint for each of these step numbers; return the last state."""
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep)
    for number in numbers:
        step(model, optimizer)
        checkpointer.save(number, model, optimizer, {"step": number})
    return content(model, optimizer)


def load_newest(folder):
    """Return the newest checkpoint's `extra`, and the state loaded from it."""
    model, optimizer = make()
    return Checkpointer(folder, keep=1).load(model, optimizer), content(model, optimizer)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_up_to(size):
    """Make writes beyond this size fail in this process, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
