"""What training and sampling leave each other; over whole runs in distributed/test_grpo_layouts.py."""

import torch

from minitrain.grpo.offload import Memory


def test_the_parts_of_a_step_have_tensors_of_their_own_in_turns():
    """Whoever shares their storage; if some are made later; and if others have taken the sampler's place, as where
    matrices are joined."""
    joint = torch.arange(12.0)
    states, sampler = (
        [joint[:5], joint[5:].view(7, 1), torch.zeros(())],
        [torch.ones(3), torch.ones(4, 2)],
    )
    values, reference = [state.clone() for state in states], []

    def sizes(tensors):
        return [tensor.untyped_storage().nbytes() for tensor in tensors]

    memory = Memory(
        {"states": lambda: states, "reference": lambda: reference}, {"sampler": lambda: sampler}
    )
    memory.hold("states")
    reference.append(torch.arange(3.0))
    for _ in range(2):
        assert sizes(states) == [48, 48, 4] and sizes(sampler) == [0, 0]
        memory.hold("sampler")
        for part in sampler:
            part.fill_(2)
        memory.hold("sampler")  # the second time changes nothing
        assert (
            sizes(states) == [0, 0, 0] and sizes(reference) == [0] and sizes(sampler) == [12, 32]
        )
        assert all((part == 2).all() for part in sampler)
        before, sampler = sampler, [torch.ones(3), torch.ones(4, 2)]
        memory.hold("reference")
        assert (
            sizes(states) == [0, 0, 0]
            and reference[0].tolist() == [0, 1, 2]
            and sizes(sampler) == [0, 0]
        )
        memory.hold("states")
        assert sizes(before) == [12, 32] and sizes(sampler) == sizes(reference) * 2 == [0, 0]
        assert all(copy is None for *_, copy in memory.away["sampler"])
        for state, value in zip(states, values, strict=True):
            assert torch.equal(state, value)
            state.add_(1), value.add_(1)
        memory.hold("states")  # nor here
        assert all(torch.equal(state, value) for state, value in zip(states, values, strict=True))
