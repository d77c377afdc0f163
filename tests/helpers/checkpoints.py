"""Small models whose checkpoints tests write, damage and read again."""

import resource
from contextlib import contextmanager

import torch
from torch import nn

from minitrain.run.checkpoint.checkpointer import Checkpointer


def make(width=8, layers=2, optimizer=torch.optim.AdamW, seed=0):
    """A small model with a buffer and a frozen parameter, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model.register_buffer("count", torch.tensor(float(seed)))
    model[0].bias.requires_grad_(False).fill_(0.5)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)


def step(model, optimizer):
    inputs = torch.arange(16.0).view(2, 8) / 16
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def content(model, optimizer):
    """All values: the model's state and, by parameter name, the optimizer's."""
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
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep)
    for number in numbers:
        step(model, optimizer)
        checkpointer.save(number, model, optimizer, {"step": number})
    return content(model, optimizer)


def load_newest(folder):
    model, optimizer = make()
    return Checkpointer(folder, keep=1).load(model, optimizer), content(model, optimizer)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_up_to(size):
    """Writing more into one file fails, in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
