"""Compute gradients of weights while the collectives of a backward pass are on their way.

A block's backward pass is a chain from the gradient of its output to that of its input, with
collectives in it. The next link waits for each of them. The gradients of weights are no part of the
chain, and autograd computes them where it gets to them. This pass over a graph lets one product of
theirs run behind the start of each collective, and behind that of the last one all that are ready:

    before   dX dW dX dW  reduce-scatter  wait ... all-gather  wait ... dX dX  reduce-scatter  wait ... dW dW
    after    dX dX  reduce-scatter  dW  wait ... all-gather  dW  wait ... dX dX  reduce-scatter  dW dW  wait

Collectives keep their order, and results their bits. Tensor parallelism hides three of a block's four
collectives so; at the first one, no gradient is ready yet. Context parallelism hides the gradients of
keys and values, expert parallelism those of the experts' inputs.

What a graph must have: functional collectives (torch.ops._c10d_functional), products that
recompute.py lists, and, as graphs of backward passes have, inputs `tangents_1`, ...
Left out: forward passes, where all that could run meanwhile needs the result.
"""

from itertools import pairwise

from torch.fx import Graph, Node

from minitrain.parallel.recompute import OWN_PRODUCTS, PRODUCTS, registered


def make_pass() -> object:
    """Return `fill_waits` as a pass of the compiler."""
    # takes a second to import
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class FillWaits(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            fill_waits(graph)

        def uuid(self) -> bytes:
            # compiled graphs are kept until this file changes
            return get_hash_for_files((__file__,))

    return FillWaits()


def fill_waits(graph: Graph) -> None:
    """Let products that no collective needs run behind the starts of collectives, in place."""
    nodes = list(graph.nodes)
    # all-reduces inside of blocks are of a few numbers
    starts = [node for node in nodes if is_start(node) and "all_reduce" not in node.name]
    if starts and any(node.name.startswith("tangents") for node in nodes):
        for node, next_one in pairwise(reordered(nodes, starts)):
            node.append(next_one)


def reordered(nodes: list[Node], starts: list[Node]) -> list[Node]:
    """Return the nodes of a graph in their new order. starts: of collectives that take time.

    What neither a collective nor a product needs, such as gradients of norms, comes after the last
    start: the compiler would fuse some of it with later kernels, and run these, with all that they
    wait for, where it stood.
    """
    needed = with_inputs([node for node in nodes if is_start(node)], nodes)
    kinds = PRODUCTS | registered(OWN_PRODUCTS)
    products = [node for node in nodes if node.target in kinds and node not in needed]
    # these stay where they are
    needed |= with_inputs(products, nodes).difference(products)
    needed.update(node for node in nodes if node.op == "placeholder")
    # in order
    done: dict[Node, None] = {}
    for node in nodes:
        held = node not in needed and (starts[-1] not in done or node.op == "output")
        if held or node in done or any(source not in done for source in node.all_input_nodes):
            continue
        done[node] = None
        for product in products if node in starts else ():
            missing = not_done(product, done, nodes)
            done |= dict.fromkeys(missing or ())
            if missing and node is not starts[-1]:
                break
    return list(done | dict.fromkeys(nodes))


def with_inputs(some: list[Node], nodes: list[Node]) -> set[Node]:
    """Return some nodes of a graph, and all that they need, directly or not. nodes: all, in order."""
    found = set(some)
    for node in reversed(nodes):
        if not found.isdisjoint(node.users):
            found.add(node)
    return found


def not_done(product: Node, done: dict[Node, None], nodes: list[Node]) -> list[Node] | None:
    """Return a product and what it needs, in order, but what is done; None if it has to wait.

    nodes: of the whole graph, in order.
    """
    wanted = {product}
    for node in reversed(nodes):
        if node in wanted and node not in done:
            if is_functional(node):
                return None
            wanted.update(node.all_input_nodes)
    return [node for node in nodes if node in wanted and node not in done]


def is_start(node: Node) -> bool:
    """Return whether a node starts a functional collective."""
    return is_functional(node) and "wait_tensor" not in node.name


def is_functional(node: Node) -> bool:
    """Return whether a node starts a functional collective, or waits for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"
