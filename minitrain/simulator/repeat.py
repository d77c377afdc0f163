"""Trace a compiled graph once, and replay the recording at every later call, which saves time.

The compiler cuts a block into graphs of hundreds of operators, which a step calls thousands of times.
Graphs have no branches, so every call with inputs of the same layout does the same. The first such
call runs operator by operator while the tracer logs kernels, allocations and frees. Every later call
adds the log to the trace, with the storages of its own inputs. The trace is exactly the same as
without recordings.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from minitrain.simulator.operators import storage_address, tensors
from minitrain.simulator.trace import Tracer


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_bytes: int


class Output(NamedTuple):
    """Where a graph's output comes from."""

    # "input": it is an input or shares its storage; "new": it has a new storage; "constant"
    kind: str
    # index of that input; number of the new storage; the constant itself
    value: object
    # None for constants
    layout: Layout | None


class RepeatedGraph:
    """A graph that torch.compile cut out of a block, with recordings of its calls.

    It stands in for torch's `boxed_nop`, which runs a graph on a list of inputs and empties the list.
    """

    def __init__(self, graph: GraphModule, example_inputs: list):
        self.graph = graph
        # tells torch that `__call__` takes a list of inputs and empties it
        self._boxed_call = True
        self.recordings: dict[tuple, Recording] = {}

    def __call__(self, inputs: list) -> tuple:
        tracer = Tracer.active
        numbers = [tracer.number(x) if isinstance(x, Tensor) else None for x in inputs]
        layouts = tuple(map(layout, inputs))
        # for each input, the first one that shares its storage
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
    """The calls to the tracer that running a graph caused, in order, and the graph's outputs.

    numbers: storage numbers of the inputs; None for inputs that are no tensors.
    """

    def __init__(self, tracer: Tracer, graph: GraphModule, numbers: list[int | None]):
        self.tracer = tracer
        self.graph = graph
        self.inputs = numbers
        # (method of the tracer, its arguments...) or ("dropped", indices of inputs)
        self.steps: list[tuple] = []
        self.outputs: list[Output] = []
        # attributes of a graph are tensors outside of its inputs, whose storages could differ
        self.can_repeat = not any(node.op == "get_attr" for node in graph.graph.nodes)

    def run(self, inputs: list) -> tuple:
        """Run the graph for the first time and return its outputs."""
        # taken now, because running may resize or drop inputs
        given = list(map(layout, inputs))
        self.tracer.log = self.steps
        try:
            outputs = _Steps(self.graph, inputs, self.steps).boxed_run(inputs)
        finally:
            self.tracer.log = None
        self.outputs = [self.describe(x, given) for x in outputs]
        return outputs

    def describe(self, output, given: list) -> Output:
        """Return where an output comes from. given: the layouts of the inputs."""
        if not isinstance(output, Tensor):
            return Output("constant", output, None)
        number = self.tracer.number(output)
        seen = layout(output)
        if number not in self.inputs:
            return Output("new", number, seen)
        same = [
            i for i, n in enumerate(self.inputs) if n == number and given[i].dtype == seen.dtype
        ]
        # a view of an input as another dtype cannot be made from the input by `as_strided`
        self.can_repeat &= bool(same)
        return Output("input", same[0] if same else None, seen)

    def repeat(self, tracer: Tracer, inputs: list, numbers: list[int | None]) -> tuple:
        """Replay the recording on inputs with these storage numbers; return the outputs."""
        # recorded number of a storage -> its number in this call
        now = dict(zip(self.inputs, numbers, strict=True))
        outputs = [
            strided(inputs[output.value], output.layout)
            if output.kind == "input"
            else output.value
            for output in self.outputs
        ]
        self.replay(tracer, inputs, now)
        made: dict[int, Tensor] = {}
        with tracer.silent():
            for place, (kind, number, seen) in enumerate(self.outputs):
                if kind == "new" and number not in made:
                    made[number] = new_storage(seen)
                    tracer.adopt(made[number], now[number])
                if kind == "new":
                    outputs[place] = strided(made[number], seen)
        return tuple(outputs)

    def replay(self, tracer: Tracer, inputs: list, now: dict[int | None, int | None]) -> None:
        """Call the tracer's methods as the first call did, and drop `inputs` where it did.

        now: number of a storage in the first call -> in this one.
        """
        for step in self.steps:
            match step:
                case "record", event:
                    tracer.record(event.renumbered(now))
                case "new_number", number, kind:
                    now[number] = tracer.new_number(kind)
                case "dropped", places:
                    for place in places:
                        inputs[place] = None
                case "forget", number if number in self.inputs:
                    # dropping the input frees its storage, unless the caller still holds it
                    pass
                case method, number, *arguments:
                    getattr(tracer, method)(now[number], *arguments)
        inputs.clear()


class _Steps(Interpreter):
    """Run a graph, and note after which operator no value in it needs an input's storage."""

    def __init__(self, graph: GraphModule, inputs: list, steps: list[tuple]):
        super().__init__(graph)
        self.steps = steps
        # address of an input's storage -> indices of the inputs that share it
        self.places: dict[int, list[int]] = {}
        # value that is still needed -> addresses of the inputs' storages that it is a view of
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
    """Return the addresses of the storages of all tensors in a value."""
    return {storage_address(x.untyped_storage()) for x in tensors(value)}


def layout(x) -> object:
    """Return a tensor's Layout; other inputs as they are, since a graph may depend on them."""
    if not isinstance(x, Tensor):
        return x
    size = x.untyped_storage().nbytes()
    return Layout(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), size)


def strided(x: Tensor, wanted: Layout) -> Tensor:
    """Return the tensor itself, or a view of its storage with the wanted layout."""
    if layout(x) == wanted:
        return x
    return x.as_strided(wanted.shape, wanted.strides, wanted.offset)


def new_storage(wanted: Layout) -> Tensor:
    """Return a new tensor on a storage of the layout's size; if possible, with that layout."""
    exact = torch.empty_strided(wanted.shape, wanted.strides, dtype=wanted.dtype)
    if layout(exact) == wanted:
        return exact
    return torch.empty(wanted.storage_bytes // wanted.dtype.itemsize, dtype=wanted.dtype)
