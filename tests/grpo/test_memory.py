"""What training and sampling leave each other; over whole runs in distributed/test_grpo.py."""

import torch

from minitrain.grpo.memory import Phases


def test_each_phase_has_its_tensors_alone():
    """Whoever shares their storage, and if others have taken the sampler's place, as where matrices are joined."""
    joint = torch.arange(12.0)
    states, sampler = [joint[:5], joint[5:].view(7, 1), torch.zeros(())], [torch.ones(3), torch.ones(4, 2)]
    values = [state.clone() for state in states]

    def sizes(tensors):
        return [tensor.untyped_storage().nbytes() for tensor in tensors]

    phases = Phases(lambda: states, lambda: sampler)
    for _ in range(2):
        assert sizes(states) == [48, 48, 4] and sizes(sampler) == [0, 0]
        for _ in range(2):  # the second time changes nothing
            phases.sample()
            assert sizes(states) == [0, 0, 0] and sizes(sampler) == [12, 32]
        before, sampler = sampler, [torch.ones(3), torch.ones(4, 2)]
        for _ in range(2):
            phases.train()
            assert sizes(before) == [12, 32] and sizes(sampler) == [0, 0]
        assert all(torch.equal(state, value) for state, value in zip(states, values, strict=True))
