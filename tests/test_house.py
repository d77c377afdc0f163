"""The rules of the house: arrows point up one list of rooms, a technique can be taken home.

Budgets of the rooms are the project's own, and no fork's: `pytest -m budget`.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT
from tests.helpers.house import ROOMS, TREES, imported, reachable, room

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
TECHNIQUES = [
    file
    for file in TREES
    if file.parent.name == "parallel" and file.stem not in ("__init__", "parallelize")
]
TECHNIQUES += [
    Path("minitrain/training", f"{name}.py")
    for name in ("loss", "optim", "adamw", "flow", "sigmas")
]

# tokens of code that a room may have: what it gains it pays for, or the change says why it may grow
BUDGETS = {
    "errors": 450,
    "hashing": 400,
    "user_code": 520,
    "tasks": 260,
    "settings": 2_300,
    "models": 40_000,
    "parallel": 17_800,
    "training": 18_700,
    "rollout": 23_900,
    "grpo": 15_300,
    "formats": 21_700,
    "data/faults": 1_650,
    "data": 6_500,
    "data/text": 6_750,
    "data/chat": 12_950,
    "data/video": 3_200,
    "data/datasets": 950,
    "run": 100,
    "run/config": 10_600,
    "run/launch": 6_250,
    "run/checkpoint": 5_650,
    "run/monitor": 8_500,
    "run/tasks": 8_500,
    "bench": 16_800,
    "simulator": 21_300,
    "examples": 4_500,
    "commands": 12_950,
    "generate": 60,
    "merge": 60,
    "train": 60,
    "__main__": 250,
    "__init__": 300,
}
# Python 3.12 and later take an f-string apart
FSTRING = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)


def count_tokens(file: Path) -> int:
    """Count tokens of code: no comments, docstrings or layout, and an f-string as one."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [
        n for n in ast.walk(TREES[file]) if isinstance(n, documented) and ast.get_docstring(n)
    ]
    docstrings = {node.body[0].lineno for node in nodes}
    text = (ROOT / file).read_text(encoding="utf-8")
    count = 0
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        depth -= token.type == FSTRING[1]
        if depth == 0 and token.type not in NOT_CODE and not is_docstring:
            count += token.type != FSTRING[1]
        depth += token.type == FSTRING[0]
    return count


def test_arrows_point_up_the_list_of_rooms():
    wrong = [
        f"{file} -> {target}"
        for file, tree in TREES.items()
        for target in imported(tree)
        if ROOMS.index(room(target)) > ROOMS.index(room(file))
    ]
    assert not wrong


def test_no_file_imports_itself_over_others():
    arrows = {file: imported(tree) for file, tree in TREES.items()}
    assert not [str(file) for file in TREES if file in reachable(file, arrows)]


@pytest.mark.parametrize("file", TECHNIQUES, ids=lambda file: file.stem)
def test_a_technique_can_be_taken_home(file):
    """Importing it brings in at most 2,000 lines of the package."""
    arrows = {other: imported(tree, everywhere=False) for other, tree in TREES.items()}
    files = reachable(file, arrows) | {file}
    lines = sum(len((ROOT / each).read_text(encoding="utf-8").splitlines()) for each in files)
    assert lines <= 2000


def test_no_file_name_occurs_twice():
    # commands have the names of their modules; a vendor's CPU stands in two files
    files = [file for file in TREES if room(file) not in ("train", "generate", "merge")]
    names = [file.name for file in files if file.name not in ("__init__.py", "cpu.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_no_file_imports_a_test_file():
    folders = (ROOT / name for name in ("tests", ".ci", "minitrain"))
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for folder in folders
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.search(r"\btests\b.*\.test_", dotted_names(node))
    ]
    assert not wrong


def dotted_names(node: ast.Import | ast.ImportFrom) -> str:
    """Return what a statement imports, as dotted names separated by blanks."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return " ".join(module + alias.name for alias in node.names)


@pytest.mark.budget
@pytest.mark.parametrize("name", ROOMS)
def test_a_room_keeps_its_budget(name):
    tokens = sum(count_tokens(file) for file in TREES if room(file) == name)
    assert tokens <= BUDGETS[name], "this project's own budget: a fork may raise it, or leave it"


@pytest.mark.budget
def test_functions_files_and_folders_are_small():
    functions = (
        n for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)
    )
    assert not [n.name for n in functions if n.end_lineno - n.lineno >= 60]
    lengths = {
        str(file): len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in TREES
    }
    assert not {file for file, length in lengths.items() if length > 500}
    folders = [file.parent for file in TREES if file.name != "__init__.py"]
    assert not {folder for folder in folders if folders.count(folder) > 24}


def test_an_f_string_counts_as_one_token_on_every_python(tmp_path, monkeypatch):
    file = tmp_path / "one.py"
    file.write_text('x = f"{a + b} and {c!r:>{width}}"  # 3 tokens\n', encoding="utf-8")
    monkeypatch.setitem(TREES, file, ast.parse(file.read_text(encoding="utf-8")))
    assert count_tokens(file) == 3


# Names of torch that are private, as of 2.13 without a public equivalent: why, and the files that may say them.
# Operators have private names where public functions call them: `torch.ops`.
PRIVATE = {
    "Mamba-2's gate in fp32": ({"_functorch"}, {"parallel/compiling.py"}),
    "a compiled block's side effects while it recomputes": (
        {"_dynamo"},
        {"parallel/recompute.py"},
    ),
    "a size that grows with every step": ({"_dynamo"}, {"rollout/compiled.py"}),
    "a pass over the compiler's graphs": ({"_inductor"}, {"parallel/overlap.py"}),
    "what the compiler has done": ({"_dynamo"}, {"bench/measure.py"}),
    "a process that starts with the compiler": ({"_inductor"}, {"simulator/tracers.py"}),
    "a graph that is called without kernels": ({"_dynamo"}, {"simulator/fake_world.py"}),
    "the sampler calls blocks that the trainer has compiled": (
        {"_call_impl"},
        {"rollout/weights.py"},
    ),
    "more than calling `forward`: hooks": (
        {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"},
        {"models/variants.py"},
    ),
    "nn.Module calls it to cast: parameters and a buffer that stay in fp32": (
        {"_apply"},
        {"models/variants.py", "models/router.py"},
    ),
    "autograd is running: a second forward pass": (
        {"_C", "_current_graph_task_id"},
        {"models/router.py"},
    ),
    "a subclass that is one for FSDP alone, whose shard is asked for by identity and version": (
        {"_C", "_local_tensor", "_version"},
        {"parallel/fsdp_fp8.py"},
    ),
    "F.scaled_mm is another operator": ({"_scaled_mm"}, {"models/fp8.py"}),
    "one kernel for all gradients, in fp32": (
        {"_foreach_norm", "_foreach_mul_"},
        {"training/optim.py"},
    ),
    "collectives that compile": (
        {"_functional_collectives", "_c10d_functional"},
        {"parallel/collectives.py"},
    ),
    "one mesh dimension out of several": ({"_flatten"}, {"parallel/mesh.py"}),
    "where a shard begins": ({"_utils"}, {"parallel/shards.py"}),
    "FSDP's hooks, and its gradients before they are reduced": (
        {
            "_fully_shard",
            "_fsdp_param",
            "_get_grad_inner_tensor",
            "_get_fsdp_state",
            "_fsdp_param_group",
            "_pre_forward",
            "_post_forward",
            "_pre_forward_hook_handle",
            "_post_forward_hook_handle",
            "_partial_reduce_output",
        },
        {"parallel/fsdp.py"},
    ),
    "pipelining: actions, sends and shapes": (
        {
            "_schedule_visualizer",
            "_batch_p2p",
            "_get_init_p2p_neighbors_ops",
            "_utils",
            "_inference_mode",
            "_warmup_p2p",
        },
        {"parallel/pipeline_stage.py"},
    ),
    "the process group's store and groups": (
        {"_get_default_store", "_world"},
        {"run/launch/rendezvous.py"},
    ),
    "which collective hangs": (
        {"_C", "_distributed_c10d", "_dump_fr_trace_json"},
        {"run/launch/failures.py"},
    ),
    "documented under these names": (
        {"_record_memory_history", "_dump_snapshot"},
        {"run/monitor/profiling.py"},
    ),
    "the compiler is at work: names of modules": (
        {"_dynamo", "_inductor"},
        {"run/launch/interrupts.py"},
    ),
    "a logger's name": ({"_redistribute"}, {"run/launch/start.py"}),
    "below autograd: operators, their schemas and storages": (
        {"_ops", "_pytree", "_schema", "_cdata"},
        {"simulator/operators.py"},
    ),
    "below autograd: the dispatch mode, and where DTensor infers shapes": (
        {"_python_dispatch", "_sharding_prop", "_propagate_tensor_meta_non_cached"},
        {"simulator/trace.py"},
    ),
    "fake tensors and the fake process group": (
        {"_subclasses", "_internal"},
        {"simulator/fake_world.py"},
    ),
}
OF_PYTHON = {"_replace", "_asdict", "_fields", "_exit"}


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Return the private parts of torch's names in a file. own: private names that the package itself defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant):
            found.add(str(node.value))
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            owner = ast.unparse(node.value)
            if owner not in ("self", "_ops", "aten", "torch.ops.aten", "torch.ops.mkldnn"):
                found.add(f"torch.{node.attr}")
    found = {name for name in found if name.startswith("torch.")}
    return {
        part for name in found for part in name.split(".") if re.match("_[a-zA-Z]", part)
    } - OF_PYTHON


def test_private_names_of_torch_stand_in_one_file_for_each_reason():
    allowed = {
        (f"minitrain/{file}", name)
        for names, files in PRIVATE.values()
        for file in files
        for name in names
    }
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} - {
        name for _, name in allowed
    }
    used = {
        (file.as_posix(), name)
        for file, tree in TREES.items()
        for name in private_names(tree, own)
    }
    assert not used - allowed, "say why in PRIVATE, or use a public name"
    assert not allowed - used, "not used any more"
