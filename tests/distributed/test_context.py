"""Context parallelism: the attention of whole rows, and the losses, gradients and weights of one process."""

from functools import partial
from math import prod
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from minitrain.data.text.text_rows import Mock
from minitrain.errors import InputError
from minitrain.grpo.objective import PolicyGradient
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig
from minitrain.parallel import parallelize
from minitrain.parallel.context import context_parallel, local_tokens, token_indices
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import meshes_of, start
from minitrain.settings import GRPO, Diffusion, Parallel
from minitrain.simulator.fake_world import fake_world
from minitrain.training.build import lay_out, make_model
from minitrain.training.flow import FlowMatching
from minitrain.training.log_probs import linear_log_probs
from minitrain.training.loop import Trainer, forward_backward
from minitrain.training.objectives import LanguageModeling, check_objective
from minitrain.training.packing import rows
from tests.helpers.families import families, is_rotary
from tests.helpers.oracle import (
    Batches,
    Count,
    check_against_one_process,
    check_close,
    collective,
    initial_weights,
    packed_batch,
    plain_model,
    plain_step,
    ragged_batch,
    snapshot,
    train,
    train_compiled,
)

FORMS = ["allgather", "ulysses"]
MODEL = {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 2, "initializer_range": 0.05}
HYBRID = MODEL | {"name": "nemotron3-nano-30b-a3b-tiny", "num_layers": 3, "layer_pattern": "M*M"}
TREE = {
    "model": MODEL,
    "batch": {"global": 4, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
}


def with_parallel(**settings):
    return TREE | {"parallel": settings}


# ------------------------------------------------------------------------------------------------------ attention alone


def explicit_attention(q, k, v, allowed, sinks):
    """softmax over the allowed pairs, bool [rows, queries, keys], and a sink per head, written out."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    terms = scores.exp() * allowed[:, None]
    below = terms.sum(-1, keepdim=True) + (0 if sinks is None else sinks[:, None, None].exp())
    return torch.einsum("bhij,bhjd->bhid", terms / below, v)


def sharded_attention(form, size, q, k, v, upstream, document_ids, sinks, rule):
    """On each rank: its tokens' places, outputs and gradients, from whole rows of which it uses only its tokens."""
    mesh = init_device_mesh("cpu", (size,))
    with torch.device("meta"):
        model = Decoder(DecoderConfig(num_layers=1))
    context_parallel(model, mesh, form)
    held = token_indices(q.shape[2], mesh, form == "allgather")
    own = [x[:, :, held].requires_grad_() for x in (q, k, v)]
    own_documents = None if document_ids is None else document_ids[:, held]
    mask = model.make_mask(len(held), held.device, own_documents, **rule)
    if sinks is not None:
        sinks = sinks.clone().requires_grad_()
    out = model.blocks[0].self_attn.attend(*own, mask, sinks)
    out.backward(upstream[:, :, held])
    return held, None if sinks is None else sinks.grad, [out.detach(), *(x.grad for x in own)]


def check_attention(
    pool, form, size, packed, causal=True, window=16, with_sinks=False, kv_heads=4
):
    random = torch.Generator().manual_seed(0)
    q, upstream = torch.randn(2, 2, 8, 16, 4, dtype=torch.double, generator=random)
    k, v = torch.randn(2, 2, kv_heads, 16, 4, dtype=torch.double, generator=random)
    document_ids = torch.randint(2, (2, 16), generator=random).cumsum(1) if packed else None
    sinks = (
        torch.randn(8, dtype=torch.double, generator=random).requires_grad_()
        if with_sinks
        else None
    )
    distance = torch.arange(16)[:, None] - torch.arange(16)
    allowed = (distance < window) & ((distance >= 0) | torch.tensor(not causal))
    allowed = (
        allowed & (document_ids[:, :, None] == document_ids[:, None]) if packed else allowed[None]
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = explicit_attention(*whole, allowed, sinks)
    out.backward(upstream)
    expected = [out.detach(), *(x.grad for x in whole)]

    rule = {"causal": causal, "plain": not with_sinks} | (
        {"window": window} if window < 16 else {}
    )
    given = None if sinks is None else sinks.detach()
    ranks = pool.run(
        size, sharded_attention, form, size, q, k, v, upstream, document_ids, given, rule
    )
    for held, _, results in ranks:
        for mine, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, reference[:, :, held], atol=1e-12, rtol=1e-12)
    assert sorted(place for held, *_ in ranks for place in held.tolist()) == list(range(16))
    if with_sinks:
        torch.testing.assert_close(
            sum(grad for _, grad, _ in ranks), sinks.grad, atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_brute_force(pool, form, size, causal, packed):
    check_attention(pool, form, size, packed, causal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [5, 16])
def test_windows_and_sinks(pool, form, packed, window):
    check_attention(pool, form, 2, packed, window=window, with_sinks=True)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ulysses_repeats_key_value_heads_that_are_fewer_than_ranks(pool, kv_heads):
    check_attention(pool, "ulysses", 4, packed=True, with_sinks=True, kv_heads=kv_heads)
    check_attention(pool, "ulysses", 4, packed=False, kv_heads=kv_heads)


def look_at_masks(form, size, length):
    """Pairs that this rank computes (None: plain causal), and whether a mask is built again for a second forward."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(num_layers=1))
    context_parallel(model, init_device_mesh("cpu", (size,)), form)
    make = partial(model.make_mask, length // size, torch.device("cpu"))
    document_ids = torch.zeros(1, length // size, dtype=torch.long)
    again = make() is not make(), make(document_ids) is not make(document_ids)
    pairs = make().attn_mask
    return None if pairs is None else pairs.sum().item(), again


def test_allgather_is_balanced(pool):
    pairs = 64 * 65 // 2  # of a causal row
    assert pool.run(4, look_at_masks, "allgather", 4, 64) == [(pairs // 4, (False, True))] * 4


def look_at_chunks(form, size):
    """What the masks of no rule, documents, a window, no causality and sinks say of this rank's chunks."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(num_layers=1))
    context_parallel(model, init_device_mesh("cpu", (size,)), form)
    make = partial(model.make_mask, 8, torch.device("cpu"))
    documents = torch.zeros(1, 8, dtype=torch.long)
    rules = ({}, {"document_ids": documents}, {"window": 5}, {"causal": False}, {"plain": False})
    return [make(**rule).chunks for rule in rules]


def test_allgather_says_which_chunks_of_a_plain_causal_sequence_a_rank_has(pool):
    found = pool.run(4, look_at_chunks, "allgather", 4)
    for own, chunks in zip([(0, 7), (1, 6), (2, 5), (3, 4)], found, strict=True):
        assert chunks == [own, None, None, None, own]
    # all tokens of some heads; with sinks the kernels' parts need no mask either
    assert pool.run(2, look_at_chunks, "ulysses", 2) == [[None, None, None, None, (0,)]] * 2


def test_ulysses_keeps_the_plain_kernel(pool):
    assert pool.run(4, look_at_masks, "ulysses", 4, 64) == [(None, (False, True))] * 4


# --------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("batch", [ragged_batch, packed_batch])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_context(pool, form, size, batch):
    check_against_one_process(pool, size, with_parallel(cp=size, context=form), batch=batch)


@pytest.mark.parametrize("layout", [{"cp": 8}, {"cp": 4, "tp": 2}], ids=str)
def test_ulysses_on_more_ranks_than_key_value_heads(pool, layout):
    check_against_one_process(
        pool, 8, with_parallel(context="ulysses", **layout), batch=packed_batch
    )


@pytest.mark.parametrize("batch", [ragged_batch, packed_batch])
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_shard": 1, "dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_with_data_parallel(pool, form, layout, batch):
    check_against_one_process(pool, 4, with_parallel(cp=2, context=form, **layout), batch=batch)


@pytest.mark.parametrize("form", FORMS)
def test_with_tensor_parallel(pool, form):
    check_against_one_process(
        pool, 4, with_parallel(cp=2, tp=2, context=form), batch=packed_batch
    )


@pytest.mark.parametrize("model", [*families(is_rotary)[1:], "llama3.1-8b-tiny"])
@pytest.mark.parametrize("form", FORMS)
def test_families(pool, form, model):
    tree = with_parallel(cp=2, context=form) | {"model": MODEL | {"name": model}}
    check_against_one_process(pool, 2, tree, batch=packed_batch)


@pytest.mark.parametrize(
    "layout",
    [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "dp_shard": 2}],
    ids=str,
)
@pytest.mark.parametrize("batch", [ragged_batch, packed_batch])
@pytest.mark.parametrize("form", FORMS)
def test_hybrids(pool, form, batch, layout):
    """Rows are longer than a chunk of the scan, and documents begin anywhere in them.

    In fp64 but for the scan's decays, which stay in fp32: attention's parts are summed in another order than a softmax.
    With tensor parallelism in fp32, where splitting sums moves them by 1e-6 alone.
    """
    tree = with_parallel(context=form, **layout) | {
        "model": HYBRID,
        "batch": TREE["batch"] | {"seq_len": 40},
    }
    tolerance = 1e-5 if "tp" in layout else 1e-6
    check_against_one_process(
        pool,
        prod(layout.values()),
        tree,
        batch=batch,
        tolerance=tolerance,
        double="tp" not in layout,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "run, settings",
    [
        (train, {"recompute": "full"}),
        (train_compiled, {"compile": True}),
        (train_compiled, {"compile": True, "recompute": "full"}),
    ],
    ids=["recomputed", "compiled", "compiled and recomputed"],
)
def test_hybrids_in_other_ways(pool, form, run, settings):
    tree = with_parallel(cp=2, context=form) | {"model": HYBRID} | settings
    check_against_one_process(pool, 2, tree, batch=packed_batch, run=run)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("form", FORMS)
def test_recompute(pool, form, recompute):
    tree = with_parallel(cp=2, context=form) | {"recompute": recompute}
    check_against_one_process(pool, 2, tree, batch=packed_batch)


@pytest.mark.parametrize("form", FORMS)
def test_accumulation(pool, form):
    tree = with_parallel(cp=2, context=form) | {"batch": TREE["batch"] | {"micro": 1}}
    check_against_one_process(pool, 4, tree, batch=packed_batch)


@pytest.mark.parametrize("recompute, batch", [("none", ragged_batch), ("full", packed_batch)])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_blocks(pool, form, recompute, batch):
    tree = with_parallel(cp=2, context=form) | {"compile": True, "recompute": recompute}
    check_against_one_process(pool, 2, tree, batch=batch, run=train_compiled)


def evaluate(tree):
    config = from_dict(tree | {"device": "cpu"})
    return Trainer(config, start(config)).evaluate(Batches(config, 2, packed_batch))


@pytest.mark.parametrize("form", FORMS)
def test_evaluation(pool, form):
    tree = with_parallel(cp=2, context=form)
    config = from_dict(tree)
    dataset = Batches(config, 2, packed_batch)
    expected, _ = plain_step(config, initial_weights(config), rows(dataset, range(len(dataset))))
    assert pool.run(4, evaluate, tree) == [pytest.approx(expected, rel=1e-6)] * 4


def count_collectives(tree):
    """All-gathers, reduce-scatters and all-to-alls between activations in a step."""
    config = from_dict(tree | {"device": "cpu"})
    trainer = Trainer(config, start(config))
    with Count(collective) as counter:
        trainer.step(Batches(config, 2, packed_batch), 0)
    return [
        counter.counts[name]
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    ]


@pytest.mark.parametrize(
    "recompute, form, expected",
    [
        ("none", "allgather", [2 + 1, 2, 0]),  # and one for the documents
        ("full", "allgather", [4 + 1, 2, 0]),
        ("none", "ulysses", [1, 0, 8 + 8]),
    ],
)
def test_collectives_of_two_layers(pool, form, recompute, expected):
    tree = with_parallel(cp=2, context=form) | {
        "batch": TREE["batch"] | {"micro": 4},
        "recompute": recompute,
    }
    assert pool.run(2, count_collectives, tree) == [expected] * 2


@pytest.mark.parametrize("form", FORMS)
def test_collectives_of_mamba(pool, form):
    """There and back, forward and backward; its documents, and once more those of the model's mask."""
    tree = with_parallel(cp=2, context=form) | {"model": HYBRID | {"layer_pattern": "MM-"}}
    tree |= {"batch": TREE["batch"] | {"micro": 4}}
    assert pool.run(2, count_collectives, tree) == [[2 + 1, 0, 4 + 4]] * 2


@pytest.mark.parametrize(
    "layout, keeps",
    [
        ({"dp_shard": 2}, False),
        ({"cp": 2}, True),
        ({"tp": 2}, True),
        ({"dp_shard": 2, "ep": 2}, True),
    ],
)
def test_the_compiler_keeps_the_order_of_collectives_inside_of_blocks(layout, keeps):
    """Ranks compile graphs of their own; FSDP's collectives are outside."""
    name = "qwen3-30b-a3b-tiny" if "ep" in layout else "llama3-8b-tiny"
    tree = with_parallel(**layout) | {"compile": True, "model": {"name": name}}
    config = from_dict(tree | {"device": "cpu"})
    with fake_world(2), mock.patch.object(parallelize, "compile_blocks") as compiled:
        lay_out(partial(make_model, config), config, meshes_of(config, "cpu"))
    assert compiled.call_args.kwargs == {"communicates": keeps}


# ------------------------------------------------------------------------------------------------------ split, refusals


def split_rows(form, batch):
    return local_tokens(batch, init_device_mesh("cpu", (2,)), form)


@pytest.mark.parametrize(
    "form, held",
    [
        # of four chunks, the first rank has the outer two
        ("allgather", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_split(pool, form, held):
    tokens = torch.arange(10, 26).view(2, 8)
    given = torch.arange(8).flip(0).expand(2, -1)
    for batch, positions in [({}, torch.arange(8).expand(2, -1)), ({"positions": given}, given)]:
        parts = pool.run(2, split_rows, form, {"tokens": tokens, "labels": tokens + 1, **batch})
        for part, mine in zip(parts, held, strict=True):
            assert set(part) == {"tokens", "labels", "positions"}
            assert torch.equal(part["tokens"], tokens[:, mine])
            assert torch.equal(part["labels"], tokens[:, mine] + 1)
            assert torch.equal(part["positions"], positions[:, mine])


@pytest.mark.parametrize(
    "parallel, seq_len, message",
    [
        (
            {"cp": 4},
            20,
            r"batch\.seq_len=20 is not a multiple of 8, .* parallel\.cp=4 .* context=allgather \(use 16 or 24",
        ),
        ({"cp": 4}, 5, r"seq_len=5 is not a multiple of 8, .* \(use 8\)"),
        (
            {"cp": 4, "context": "ulysses"},
            18,
            r"seq_len=18 is not a multiple of 4, .* context=ulysses \(use 16 or 20\)",
        ),
        (
            {"cp": 2, "tp": 4},
            12,
            r"parallel\.tp=4 does not divide batch\.seq_len / parallel\.cp=2",
        ),
        (
            {"cp": 3, "context": "ulysses"},
            24,
            r"cp=3 x tp=1 .*_key_value_heads=4 \(use .*allgather, or cp=1, 2, 4 or 8\)",
        ),
        (
            {"cp": 8, "tp": 2, "context": "ulysses"},
            16,
            r"cp=8 x tp=2 .*_attention_heads=8 .* or cp=1, 2 or 4\)",
        ),
        (
            {"cp": 2, "tp": 8, "context": "ulysses"},
            16,
            r"cp=2 x tp=8 .* num_key_value_heads=4 .* or cp=1\)",
        ),
    ],
)
def test_refusals(parallel, seq_len, message):
    with pytest.raises(InputError, match=message):
        from_dict(with_parallel(**parallel) | {"batch": TREE["batch"] | {"seq_len": seq_len}})


def test_accepted():
    from_dict(with_parallel(cp=8))  # more ranks than key/value heads
    from_dict(with_parallel(cp=2, tp=2, context="ulysses"))
    from_dict(with_parallel(cp=4, tp=2, context="ulysses"))  # and by repeating these


# ----------------------------------------------------------------------------------------------------------- objectives


class Preferences:
    """DPO against a uniform reference: rows 2n are preferred to rows 2n + 1; a term for each pair, of whole rows."""

    def count(self, batch):
        return len(batch["tokens"]) // 2

    def loss(self, model, batch):
        batch = dict(batch)
        log_probs = model(
            batch.pop("tokens"), **batch, head=lambda *inputs: linear_log_probs(*inputs)[0]
        ).sum(1)
        return -F.logsigmoid(0.1 * (log_probs[0::2] - log_probs[1::2])).sum()


def prefer(tree):
    config = from_dict(tree | {"device": "cpu"})
    trainer = Trainer(config, start(config), Preferences())
    batches = trainer.micro_batches(Mock(16, 128, seed=0, split=0), 0)
    loss = forward_backward(
        trainer.model, trainer.objective, batches, trainer.meshes, trainer.device
    )
    return loss.item(), snapshot((name, p.grad) for name, p in trainer.model.named_parameters())


def test_a_loss_of_whole_rows_is_that_of_one_process_where_ranks_have_whole_rows(pool):
    """By transformers' way to write it: the logits of all tokens."""
    ((loss, gradients),) = pool.run(1, prefer, TREE)
    config = from_dict(TREE | {"device": "cpu"})
    model, batch = plain_model(config), rows(Mock(16, 128, seed=0, split=0), range(4))
    chosen = (
        model(batch["tokens"]).log_softmax(-1).gather(2, batch["labels"][..., None]).sum((1, 2))
    )
    assert loss == pytest.approx(
        -F.logsigmoid(0.1 * (chosen[0::2] - chosen[1::2])).mean().item(), rel=1e-5
    )
    for parallel in ({"tp": 2}, {"dp_shard": 2}):
        for found, found_gradients in pool.run(2, prefer, with_parallel(**parallel)):
            assert found == pytest.approx(loss, rel=1e-5)
            check_close([found_gradients], gradients, 1e-4, str(parallel))


@pytest.mark.parametrize("name", ["cp", "pp"])
def test_a_loss_that_is_no_sum_over_tokens_is_refused_where_rows_are_split(name):
    """Each rank would take the log-sigmoid of its tokens' part of a sum."""
    parallel = Parallel(**{name: 2})
    with pytest.raises(
        InputError, match=f"parallel.{name}=2: Preferences does not name {name} in its `layouts`"
    ):
        Trainer(from_dict(with_parallel(**{name: 2})), None, Preferences())
    for objective in (LanguageModeling(), PolicyGradient(GRPO(), 1.0, 8)):
        check_objective(objective, parallel)
    check_objective(FlowMatching(Diffusion()), Parallel(cp=2))
    with pytest.raises(InputError, match="parallel.pp=2: FlowMatching does not name pp"):
        check_objective(FlowMatching(Diffusion()), Parallel(cp=2, pp=2))
