"""Trace the operators of a compiled graph once, and repeat what they did at every later call.

The compiler cuts a block into graphs that are called thousands of times in a step, each of hundreds
of operators, all without branches: they do the same in every layer and micro-batch. The first call
on inputs of some layout runs operator by operator, and the tracer logs it: kernels, allocations,
and what is freed when. Every later call adds this log to the trace, with the storages of its own
inputs in place of the first call's. Nothing is estimated: the trace is the same as without.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from minitrain.simulator.operators import storage_address, tensors
from minitrain.simulator.trace import Tracer


class RepeatedGraph:
    """A graph that torch.compile cut out of a block, and what it did when it was called.

    It stands in for torch's `boxed_nop`, which runs a graph on a list of inputs and empties it.
    """

    def __init__(self, graph: GraphModule, example_inputs: list):
        self.graph = graph
        # tells torch that `__call__` takes a list of inputs, and empties it
        self._boxed_call = True
        self.recordings: dict[tuple, Recording] = {}

    def __call__(self, inputs: list) -> tuple:
        tracer = Tracer.active
        numbers = [tracer.number(x) if isinstance(x, Tensor) else None for x in inputs]
        layouts = tuple(map(layout, inputs))
        # which of the inputs share a storage
        shared = tuple(map(numbers.index, numbers))
        key = layouts, shared
        if key in self.recordings:
            return self.recordings[key].repeat(tracer, inputs, numbers)
        recording = Recording(tracer, self.graph, numbers)
        outputs = recording.run(inputs)
        if recording.can_repeat:
            self.recordings[key] = recording
        return outputs


class Recording:
    """The calls that a graph made to the tracer, in order, and the layouts of its outputs.

    numbers: of the inputs' storages, None for what is no tensor.
    """

    def __init__(self, tracer: Tracer, graph: GraphModule, numbers: list[int | None]):
        self.tracer = tracer
        self.graph = graph
        self.inputs = numbers
        self.steps: list[tuple] = []
        self.outputs: list[tuple] = []
        # attributes of the graph are tensors that no input stands for
        self.can_repeat = not any(node.op == "get_attr" for node in graph.graph.nodes)

    def run(self, inputs: list) -> tuple:
        """Run the graph, the first time; return its outputs."""
        # inputs may be changed in place, or dropped
        given = list(map(layout, inputs))
        self.tracer.log = self.steps
        try:
            outputs = _Steps(self.graph, inputs, self.steps).boxed_run(inputs)
        finally:
            self.tracer.log = None
        self.outputs = [self.describe(x, given) for x in outputs]
        return outputs

    def describe(self, output, given: list[tuple]) -> tuple[str, object, tuple]:
        """Return where an output comes from, and its layout.

        ("input", index of the input that it is or shares memory with), ("new", number of its
        storage) or ("constant", itself).
        """
        if not isinstance(output, Tensor):
            return "constant", output, ()
        number = self.tracer.number(output)
        seen = layout(output)
        if number not in self.inputs:
            return "new", number, seen
        place = next(
            (i for i, n in enumerate(self.inputs) if n == number and given[i][0] == seen[0]), None
        )
        # None: a view as another dtype
        self.can_repeat &= place is not None
        return "input", place, seen

    def repeat(self, tracer: Tracer, inputs: list, numbers: list[int | None]) -> tuple:
        """Repeat the first call on inputs with these `numbers` of storages; return the outputs."""
        # recorded number of a storage -> its number in this call
        now = dict(zip(self.inputs, numbers, strict=True))
        outputs = [
            as_seen(inputs[x], seen) if kind == "input" else x for kind, x, seen in self.outputs
        ]
        self.follow(tracer, inputs, now)
        made: dict[int, Tensor] = {}
        with tracer.silent():
            for place, (kind, number, seen) in enumerate(self.outputs):
                if kind == "new" and number not in made:
                    made[number] = storage_of(seen)
                    tracer.adopt(made[number], now[number])
                if kind == "new":
                    outputs[place] = as_seen(made[number], seen)
        return tuple(outputs)

    def follow(self, tracer: Tracer, inputs: list, now: dict[int | None, int | None]) -> None:
        """Call the tracer's methods as the first call did, and drop `inputs` where it did.

        now: number of a storage in the first call -> in this one.
        """
        for act, *what in self.steps:
            if act == "record":
                tracer.record(what[0].renumbered(now))
            elif act == "new_number":
                now[what[0]] = tracer.new_number(what[1])
            elif act == "dropped":
                for place in what[0]:
                    inputs[place] = None
            # an input's storage is freed when dropped, or lives on elsewhere: not forgotten here
            elif act != "forget" or what[0] not in self.inputs:
                getattr(tracer, act)(now[what[0]], *what[1:])
        inputs.clear()


class _Steps(Interpreter):
    """Runs a graph, and notes after which operator nothing in it needs an input's storage."""

    def __init__(self, graph: GraphModule, inputs: list, steps: list[tuple]):
        super().__init__(graph)
        self.steps = steps
        # address of an input's storage -> indices of the inputs that share it
        self.places: dict[int, list[int]] = {}
        # value that is still needed -> those of these storages that it is a view of
        self.holders: dict[Node, set[int]] = {}
        for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            self.holders[node] = addresses(inputs[place])
            for address in self.holders[node]:
                self.places.setdefault(address, []).append(place)

    def run_node(self, node: Node):
        result = super().run_node(node)
        self.holders[node] = addresses(result) & self.places.keys()
        for value in self.user_to_last_uses.get(node, ()):
            for address in self.holders.pop(value):
                if not any(address in held for held in self.holders.values()):
                    self.steps.append(("dropped", self.places.pop(address)))
        return result


def addresses(value) -> set[int]:
    return {storage_address(x.untyped_storage()) for x in tensors(value)}


def layout(x) -> tuple:
    """Return a tensor's dtype, shape, strides, offset and size of storage; else (x,)."""
    if not isinstance(x, Tensor):
        return (x,)
    return x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes()


def as_seen(x: Tensor, seen: tuple) -> Tensor:
    """Return the tensor itself, or a view of its storage with the layout `seen`."""
    return x if layout(x) == seen else x.as_strided(*seen[1:4])


def storage_of(seen: tuple) -> Tensor:
    """Return a new tensor whose storage has the size that the layout `seen` tells."""
    dtype, shape, strides, _, size = seen
    exact = torch.empty_strided(shape, strides, dtype=dtype)
    return exact if layout(exact) == seen else torch.empty(size // dtype.itemsize, dtype=dtype)
