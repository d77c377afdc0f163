"""Adapters under every layout: each one's gradient is that of one process, and what is frozen stays as it is."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minitrain.formats.peft import adapter_shapes, save_adapter
from minitrain.models.lora import is_adapter
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.settings import Lora
from minitrain.training.build import build_model
from tests.helpers.adapters import train_adapters
from tests.helpers.layouts import combine, ranks
from tests.helpers.oracle import check_against_one_process, check_close, packed_batch

LORA = {"lora": {"rank": 8, "alpha": 16.0}}
EXPERTS = {
    "lora": {"rank": 8, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
}


@pytest.mark.parametrize(
    "names",
    [
        ("fsdp", "accumulation"),
        ("hsdp", "recompute"),
        ("tp", "fsdp"),
        ("tp", "selective"),
        ("cp", "tp"),
        ("pp", "tied"),
        ("ulysses", "pp"),
        ("fsdp", "tp", "pp", "recompute"),
    ],
    ids=" x ".join,
)
def test_layouts(pool, random_adapters, names):
    tree = combine(*names) | LORA
    check_against_one_process(
        pool, ranks(tree), tree, batch=packed_batch, run=train_adapters, double=True
    )


@pytest.mark.parametrize(
    ("model", "names", "lora"),
    [
        ("mixtral-8x7b-tiny", ("fsdp", "cp"), EXPERTS),
        ("mixtral-8x7b-tiny", (), EXPERTS | {"parallel": {"dp_shard": 2, "ep": 2}}),
        # wide
        (
            "mixtral-8x7b-tiny",
            (),
            {"lora": EXPERTS["lora"] | {"rank": 65}, "parallel": {"dp_shard": 4, "ep": 2}},
        ),
        (
            "nemotron3-nano-30b-a3b-tiny",
            ("pp", "fsdp"),
            {"lora": {"rank": 8, "targets": ["1.mlp.experts.up_proj"]}},
        ),
    ],
    ids=str,
)
def test_experts(pool, random_adapters, model, names, lora):
    """In the last case only one stage of the pipeline has anything to train."""
    tree = combine(*names) | lora | {"model": model}
    check_against_one_process(
        pool, ranks(tree), tree, batch=packed_batch, run=train_adapters, tolerance=1e-5
    )


@pytest.mark.parametrize(
    ("base", "names", "changes"),
    [
        ("nf4", ("fsdp", "tp", "recompute"), {}),
        ("fp8", ("pp", "fsdp"), {}),
        ("nf4", (), {"model": "mixtral-8x7b-tiny", "parallel": {"dp_shard": 4, "ep": 2}}),
        ("nf4", ("tp",), {"model": {"name": "mixtral-8x7b-tiny", "moe_intermediate_size": 128}}),
        # fewer key/value heads than ranks
        ("fp8", (), {"parallel": {"tp": 4}}),
    ],
    ids=str,
)
def test_frozen_weights_in_fewer_bits(pool, random_adapters, base, names, changes):
    """Their bytes are those of one process, and so are the gradients of what is beside them."""
    tree = combine(*names)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "head_dim": 128,
    }
    tree["model"] = tree["model"] | sizes
    tree["lora"] = (EXPERTS if "model" in changes else LORA)["lora"] | {"base": base}
    tree |= changes
    # grouped products have no fp64
    precise = {"tolerance": 1e-5} if "model" in changes else {"double": True}
    check_against_one_process(
        pool, ranks(tree), tree, 1, batch=packed_batch, run=train_adapters, **precise
    )


def test_columns_that_share_a_scale_stay_together(pool):
    tree = combine("tp") | {"lora": {"base": "nf4"}}
    tree["model"] |= {"intermediate_size": 192}
    with pytest.raises(
        Exception, match=r"lora.base=nf4: parallel.tp=2 cuts columns .*\(use a tp that"
    ):
        pool.run(2, train_adapters, tree)


def read_adapters(tree):
    config = from_dict(tree | {"device": "cpu"})
    model = make_trainer(config, start(config)).model
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}


@pytest.mark.parametrize(
    "parallel", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}], ids=str
)
def test_each_rank_reads_its_part_of_the_file(pool, parallel, tmp_path):
    model = {"name": "mixtral-8x7b-tiny", "num_layers": 1}
    lora = Lora(rank=8, targets=EXPERTS["lora"]["targets"])
    config = from_dict({"model": model}).model.config
    tensors = {name: torch.randn(shape) for name, shape in adapter_shapes(config, lora).items()}
    save_adapter(tensors.items(), config, lora, tmp_path)
    tree = {"task": "lora", "model": model, "parallel": parallel, "lora": {"path": str(tmp_path)}}
    tree["batch"] = {"global": 4, "micro": 1, "seq_len": 16}
    for found in pool.run(4, read_adapters, tree):
        assert found.keys() == tensors.keys() and all(
            torch.equal(found[name], x) for name, x in tensors.items()
        )


def train_in_bf16(tree):
    """A step's gradients, what types the parameters have, and how many reduce-scatters it took."""
    names = [
        name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)
    ]
    built = []
    with (
        mock.patch.object(dist, names[0], wraps=getattr(dist, names[0])) as reduce_scatter,
        mock.patch(
            "tests.helpers.oracle.build_model",
            lambda *args: built.append(build_model(*args)) or built[0],
        ),
    ):
        trace = train_adapters(tree, 1)
    types = {(p.dtype, p.requires_grad, p.grad is not None) for p in built[0].parameters()}
    return trace.gradients[0], types, reduce_scatter.call_count


def test_frozen_weights_in_bf16_beside_adapters_in_fp32(pool):
    """In one FSDP unit. The frozen ones' gradients are not reduced, so that the outermost unit has nothing to do."""
    tree = combine() | LORA | {"precision": "bf16"}
    ((expected, types, reductions),) = pool.run(1, train_in_bf16, tree)
    assert reductions == 0 and types == {
        (torch.bfloat16, False, False),
        (torch.float32, True, False),
    }
    sharded = tree | {"parallel": {"dp_shard": 2}}
    (found, types, reductions), _ = pool.run(2, train_in_bf16, sharded)
    # two blocks, once per micro-batch as their weights are freed
    assert reductions == 2 * (8 // 2 // 2)
    assert types == {(torch.bfloat16, False, False), (torch.float32, True, False)}
    check_close([found], expected, 2e-2, "gradients in bf16")
