"""Routing and experts against loops over tokens; balance against its definitions; memory, recomputation, bad input."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minitrain.errors import InputError
from minitrain.models import grouped_mm as grouped
from minitrain.models import router as routing
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DEFAULT_LIMIT, DecoderConfig
from minitrain.models.grouped_mm import grouped_mm, has_fast_kernel
from minitrain.models.lora import add_adapters
from minitrain.models.moe import Experts, MoE, dispatch
from minitrain.models.router import Router, update_selection_bias
from minitrain.models.zoo import model_config
from minitrain.parallel.recompute import recompute
from minitrain.settings import Lora, Optim
from minitrain.training.build import initialize
from minitrain.training.loss import IGNORE
from minitrain.training.optim import make_optimizer
from tests.helpers.experts import bias_after_a_step
from tests.helpers.oracle import Results, check_against_one_process, ragged_batch

HIDDEN, WIDTH = 16, 24


def make_router(num_experts, top_k, scoring="softmax", hidden=HIDDEN, **settings):
    return Router(shape(num_experts, top_k, scoring_func=scoring, hidden_size=hidden, **settings))


def shape(num_experts, top_k, **settings):
    settings = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH} | settings
    return DecoderConfig(num_experts=num_experts, num_experts_per_tok=top_k, **settings)


def fill(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.5, generator=generator)
    return module


def one_expert(experts, mlp, e, x):
    """Expert e on one token, by the formulas."""
    first = experts.gate_up_proj[e] if mlp != "relu2" else experts.up_proj[e]
    bias = getattr(experts, experts.first + "_bias")
    hidden = first @ x + (0 if bias is None else bias[e])
    if mlp == "relu2":
        hidden = hidden.clamp(min=0) ** 2
    else:
        gate, up = hidden[0::2], hidden[1::2]
        if mlp == "clamped_swiglu":
            gate, up = torch.minimum(gate, torch.tensor(7.0)), up.clip(-7, 7) + 1
        hidden = up * gate / (1 + torch.exp(-gate * (1.702 if mlp == "clamped_swiglu" else 1)))
    return experts.down_proj[e] @ hidden + (0 if bias is None else experts.down_proj_bias[e])


def loop(x, indices, weights, experts, mlp):
    rows = [
        sum(
            w * one_expert(experts, mlp, e, token)
            for e, w in zip(chosen.tolist(), weight, strict=True)
        )
        for token, chosen, weight in zip(x, indices, weights, strict=True)
    ]
    return torch.stack(rows)


def gradients(output, *inputs):
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad(output, inputs, cotangent)


# ---------------------------------------------------------------------------------------------------- dispatch, experts


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("load", ["random", "one expert", "last expert empty"])
def test_dispatch_and_experts_equal_a_loop_over_tokens(mlp, bias, load):
    torch.manual_seed(0)
    experts = fill(Experts(6, HIDDEN, WIDTH, mlp, bias))
    x = torch.randn(11, HIDDEN, requires_grad=True)
    weights = torch.rand(11, 2, requires_grad=True)
    indices = torch.stack(
        [torch.randperm(5 if load == "last expert empty" else 6)[:2] for _ in range(11)]
    )
    if load == "one expert":
        indices, weights = torch.full((11, 1), 3), torch.rand(11, 1, requires_grad=True)
    found = dispatch(x, indices, weights, experts)()
    expected = loop(x, indices, weights, experts, mlp)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    inputs = [x, weights, *experts.parameters()]
    for mine, oracle in zip(gradients(found, *inputs), gradients(expected, *inputs), strict=True):
        assert oracle.norm() > 0
        assert (mine - oracle).norm() <= 1e-5 * oracle.norm()


@pytest.mark.parametrize(
    "capability, fast",
    [((8, 9), False), ((9, 0), True), ((10, 3), True), ((11, 0), False), ((12, 0), False)],
)
def test_which_gpus_multiply_expert_by_expert_without_the_host(capability, fast):
    """As torch has it (GroupedBlas.cpp): Hopper and the Blackwell of data centers, in bf16."""
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert has_fast_kernel(torch.empty(2, 8, 8, dtype=torch.bfloat16)) == fast
        assert not has_fast_kernel(torch.empty(2, 8, 8))


def test_an_expert_without_tokens_has_gradient_zero():
    experts = fill(Experts(4, HIDDEN, WIDTH, "swiglu", bias=True))
    indices = torch.tensor([[0, 2], [2, 0], [0, 2]])
    dispatch(
        torch.randn(3, HIDDEN), indices, torch.rand(3, 2), experts
    )().square().sum().backward()
    for parameter in experts.parameters():
        assert (parameter.grad[[1, 3]] == 0).all() and (parameter.grad[[0, 2]] != 0).any()


class Garbage(TorchDispatchMode):
    """Products of no rows are what Blackwell's kernel leaves there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func == torch.ops.aten._grouped_mm.default and args[1].ndim == 2:
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            out[offsets.diff(prepend=offsets.new_zeros(1)) == 0] = torch.nan
        return out


@pytest.mark.parametrize("adapted", [False, True])
def test_what_a_kernel_leaves_for_an_expert_without_tokens_is_no_gradient(adapted):
    experts = nn.ModuleDict({"experts": Experts(4, HIDDEN, WIDTH, "swiglu", bias=True)})
    experts.blocks = [experts]
    if adapted:
        add_adapters(experts, Lora(rank=2, targets=["experts.gate_up_proj", "experts.down_proj"]))
    parameters = [p for p in fill(experts).parameters() if p.requires_grad]
    x, indices, weights = (
        torch.randn(3, HIDDEN),
        torch.tensor([[0, 2], [2, 0], [0, 2]]),
        torch.rand(3, 2),
    )

    def gradients():
        loss = dispatch(x, indices, weights, experts.experts)().square().sum()
        return torch.autograd.grad(loss, parameters)

    expected = gradients()
    with Garbage():
        assert not all(gradient.isfinite().all() for gradient in gradients())
        with mock.patch.object(grouped, "leaves_garbage", lambda device: True):
            for mine, oracle in zip(gradients(), expected, strict=True):
                assert torch.equal(mine, oracle) and mine.stride() == oracle.stride()


def test_same_bits_every_time_whatever_order_tokens_come_in():
    torch.manual_seed(0)
    experts = fill(Experts(8, HIDDEN, WIDTH, "swiglu", bias=False))
    x, weights = torch.randn(64, HIDDEN), torch.rand(64, 4)
    indices = torch.rand(64, 8).argsort(dim=-1)[:, :4]
    order = torch.randperm(64)
    shuffled = dispatch(x[order], indices[order], weights[order], experts)()
    assert torch.equal(dispatch(x, indices, weights, experts)()[order], shuffled)


def test_rows_are_sorted_for_as_many_experts_as_a_model_may_have():
    """In place of an expert, its number as a factor: a row that another one gets is seen."""

    class Numbers:
        num_experts = DEFAULT_LIMIT

        def __call__(self, rows, weights, counts):
            return (
                rows
                * weights[:, None]
                * torch.arange(self.num_experts).repeat_interleave(counts)[:, None]
            )

    indices = torch.tensor(
        [
            [0, DEFAULT_LIMIT - 1],
            [DEFAULT_LIMIT // 2, DEFAULT_LIMIT // 2 - 1],
            [DEFAULT_LIMIT // 2 + 1, 1],
        ]
    )
    x, weights = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    expected = x * (weights * indices).sum(1, keepdim=True)
    torch.testing.assert_close(dispatch(x, indices, weights, Numbers())(), expected)


def test_shared_and_latent_experts_by_hand():
    settings = dict(
        scoring_func="sigmoid", mlp="relu2", shared_expert_intermediate_size=40, moe_latent_size=8
    )
    moe = fill(MoE(shape(4, 2, **settings)))
    x = torch.randn(2, 5, HIDDEN)
    indices, weights = moe.gate(x)
    low = (x @ moe.fc1_latent_proj.weight.T).flatten(0, 1)
    routed = loop(low, indices, weights, moe.experts, "relu2") @ moe.fc2_latent_proj.weight.T
    shared = (
        F.relu(x @ moe.shared_experts.up_proj.weight.T) ** 2
        @ moe.shared_experts.down_proj.weight.T
    )
    torch.testing.assert_close(moe(x), routed.view_as(x) + shared, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize(("seed", "mean"), [(0, 0.0), (1, -2.0), (2, 2.0)])
def test_grouped_sigmoid_routing_token_by_token(seed, mean):
    """mean: of the biases, so that scores with them may all be below 0."""
    torch.manual_seed(seed)
    router = fill(
        make_router(12, 3, "sigmoid", n_group=4, topk_group=2, routed_scaling_factor=2.5), seed
    )
    x = torch.randn(50, HIDDEN)
    router.e_score_correction_bias.normal_(mean, 0.5)
    indices, weights = router(x)
    for token, chosen, weight in zip(x, indices, weights, strict=True):
        score = torch.sigmoid(router.weight @ token)
        choice = (score + router.e_score_correction_bias).tolist()
        groups = sorted(range(4), key=lambda g: -sum(sorted(choice[3 * g : 3 * g + 3])[1:]))[:2]
        best = sorted((e for e in range(12) if e // 3 in groups), key=lambda e: -choice[e])[:3]
        assert set(chosen.tolist()) == set(best)
        torch.testing.assert_close(weight, 2.5 * score[chosen] / score[chosen].sum())


def test_a_token_that_no_expert_wants_has_no_weights():
    """Rather than NaN: sigmoids of less than -104 are 0 in fp32."""
    router = make_router(4, 2, "sigmoid")
    router.weight.data.fill_(-1)
    assert (router(torch.full((3, HIDDEN), 100.0))[1] == 0).all()


def test_router_computes_in_fp32():
    router, x = fill(make_router(32, 4, hidden=64)), torch.randn(40, 64)
    half = copy.deepcopy(router).to(torch.bfloat16)
    indices, weights = half(x.to(torch.bfloat16))
    logits = x.to(torch.bfloat16).double() @ half.weight.double().T
    values, expected = logits.topk(4)
    assert weights.dtype == torch.float32
    assert torch.equal(indices, expected)
    torch.testing.assert_close(weights, values.softmax(-1).float(), atol=1e-5, rtol=1e-5)


class Seen(TorchDispatchMode):
    """Lists the types and numbers of elements of what operators return, and the types of what `mm` multiplies."""

    def __init__(self):
        super().__init__()
        self.returned, self.multiplied = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.returned |= {
            (each.dtype, each.numel())
            for each in pytree.tree_leaves(out)
            if isinstance(each, Tensor)
        }
        if function is torch.ops.aten.mm.default:
            self.multiplied |= {each.dtype for each in args}
        return out


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_router_in_bf16_makes_no_fp32_copies_of_what_it_multiplies(scoring):
    """Its products would run outside of the tensor cores. The gradients are fp32's, rounded as a Linear's in bf16."""
    torch.manual_seed(0)
    router = fill(make_router(8, 2, scoring, hidden=64)).to(torch.bfloat16)
    x, wanted = torch.randn(5, 40, 64).to(torch.bfloat16), torch.randn(200, 2)
    with Seen() as seen:
        mine = gradients(router(x.requires_grad_())[1] * wanted, x, router.weight)
    assert seen.multiplied == {torch.bfloat16}
    assert (
        not {(torch.float32, x.numel()), (torch.float32, router.weight.numel())} & seen.returned
    )
    wide, y = copy.deepcopy(router).float(), x.detach().float().requires_grad_()
    for ours, right in zip(mine, gradients(wide(y)[1] * wanted, y, wide.weight), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - right).norm() < 1e-2 * right.norm()


def test_a_compiled_router_in_bf16_gives_the_same():
    torch.manual_seed(0)
    router = fill(make_router(8, 2, hidden=64, expert_bias=True)).to(torch.bfloat16)
    x, results = torch.randn(40, 64).to(torch.bfloat16).requires_grad_(), []
    for call in (router, torch.compile(router, backend="aot_eager", fullgraph=True)):
        indices, weights = call(x)
        results.append([indices, weights, *gradients(weights.log(), x, *router.parameters())])
    for mine, oracle in zip(*results, strict=True):
        assert torch.equal(mine, oracle)


def test_fake_balanced_gate():
    config = model_config(
        "qwen3-30b-a3b-tiny", fake_balanced_gate=True, num_experts=6, num_experts_per_tok=4
    )
    indices, weights = MoE(config).gate(torch.randn(3, 2, 64))
    assert indices.tolist() == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]] * 2
    assert torch.equal(weights, torch.full((6, 4), 0.25))


# -------------------------------------------------------------------------------------------------------------- balance


def routed_load(router, x):
    """Tokens per expert, one by one."""
    indices, _ = router(x)
    return [sum(e in chosen for chosen in indices.tolist()) for e in range(router.num_experts)]


@pytest.mark.parametrize("recompute", [False, True])
def test_load_is_counted_once_per_forward_pass_that_trains(recompute):
    torch.manual_seed(0)
    router = fill(make_router(8, 2, "sigmoid", bias_update_speed=0.1))
    batches = [torch.randn(2, 7, HIDDEN) for _ in range(3)]
    with torch.no_grad():
        expected = [
            sum(counts) for counts in zip(*(routed_load(router, x) for x in batches), strict=True)
        ]
        assert router.load is None  # an evaluation does not count

    def weigh(x):
        return router(x)[1].square().sum()

    losses = [
        checkpoint(weigh, x, use_reentrant=False) if recompute else weigh(x) for x in batches
    ]
    sum(losses).backward()
    assert router.load.tolist() == expected


def test_load_is_counted_once_where_a_compiled_block_recomputes():
    torch.manual_seed(0)
    router = fill(make_router(8, 2, "sigmoid", bias_update_speed=0.1))
    x = torch.randn(2, 7, HIDDEN)
    with torch.no_grad():
        expected = routed_load(router, x)
    recompute([router], "full")
    torch.compile(lambda x: router(x)[1], backend="aot_eager", fullgraph=True)(
        x
    ).square().sum().backward()
    assert router.load.tolist() == expected


def test_selection_bias_moves_against_the_load():
    model = nn.ModuleList(
        [make_router(4, 1, "sigmoid", bias_update_speed=0.01) for _ in range(2)]
    )
    model[0].load, model[1].load = torch.tensor([5, 3, 4, 4]), torch.tensor([0, 0, 0, 8])
    update_selection_bias(
        model, 1.0, sum_load=lambda load: load + torch.tensor([[0, 0, 0, 4], [0, 0, 0, 0]])
    )
    torch.testing.assert_close(
        model[0].e_score_correction_bias, torch.tensor([0.0, 0.01, 0.01, -0.01])
    )
    torch.testing.assert_close(
        model[1].e_score_correction_bias, torch.tensor([0.01, 0.01, 0.01, -0.01])
    )
    assert model[0].load is None


def test_selection_bias_evens_out_a_skewed_router():
    torch.manual_seed(0)
    router, x = (
        fill(make_router(8, 2, "sigmoid", bias_update_speed=0.01)),
        torch.randn(256, HIDDEN) + 0.3,
    )
    spread = []
    for _ in range(300):
        router(x)
        spread.append(router.load.float().std().item())
        update_selection_bias([router], 1.0)
    assert spread[-1] < 0.2 * spread[0]


def aux_loss(probabilities, indices, top_k):
    """E sum_e f_e P_e of one group of tokens, by counting."""
    experts = probabilities.shape[1]
    f = [
        sum(e in chosen for chosen in indices.tolist()) / (len(indices) * top_k)
        for e in range(experts)
    ]
    return experts * sum(f[e] * probabilities[:, e].mean() for e in range(experts))


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_auxiliary_loss_by_definition(scoring, per_sequence):
    torch.manual_seed(0)
    router = fill(make_router(6, 2, scoring, router_aux_loss_coef=0.7, seq_aux=per_sequence))
    x = torch.randn(3, 8, HIDDEN)
    indices, weights = router(x)
    (found,) = torch.autograd.grad(weights.sum() * 0, router.weight)
    logits = x.flatten(0, 1) @ router.weight.T
    scores = logits.sigmoid()
    probabilities = (
        logits.softmax(-1) if scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
    )
    groups = (
        zip(probabilities.split(8), indices.split(8), strict=True)
        if per_sequence
        else [(probabilities, indices)]
    )
    losses = [aux_loss(*group, top_k=2) for group in groups]
    (expected,) = torch.autograd.grad(0.7 * sum(losses) / len(losses), router.weight)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_auxiliary_loss_adds_up_over_micro_batches():
    """Per sequence, the gradient of a step does not depend on how its rows are split."""
    torch.manual_seed(0)
    router = fill(make_router(6, 2, router_aux_loss_coef=0.7, seq_aux=True))
    x, found = torch.randn(6, 8, HIDDEN), 0
    whole = torch.autograd.grad(router(x)[1].sum() * 0, router.weight)[0]
    router.tokens_per_step = torch.tensor(48)
    for part in x.split([1, 3, 2]):
        found = found + torch.autograd.grad(router(part)[1].sum() * 0, router.weight)[0]
    torch.testing.assert_close(found, whole, atol=1e-7, rtol=1e-4)


def test_even_routing_costs_the_coefficient():
    """f = P = 1 / E: the loss is 1, whatever E, top_k and the lengths."""
    router = make_router(6, 2, router_aux_loss_coef=0.7)
    indices = torch.arange(24).view(12, 2) % 6
    loss = router._aux_loss(torch.full((12, 6), 1 / 6), indices, sequences=1)
    assert loss.item() == pytest.approx(0.7)


def test_a_training_step_moves_the_selection_bias(pool):
    """After a step the bias has moved by the sign of the load, over all micro-batches and both ranks.

    Whether these have different rows or, under tensor parallelism, different tokens of the same.
    """
    small = dict(name="deepseek-v3-tiny", num_layers=2, bias_update_speed=0.01)
    tree = dict(
        model=small,
        device="cpu",
        steps=1,
        batch={"global": 8, "micro": 2, "seq_len": 16},
        recompute="full",
    )
    split = tree | {"parallel": {"tp": 2}}
    (one,), two = pool.run(1, bias_after_a_step, tree), pool.run(2, bias_after_a_step, tree)
    two += pool.run(2, bias_after_a_step, split)
    bias, expected = one
    assert torch.equal(bias, expected)
    assert (bias != 0).any()
    for bias, _ in two:
        assert torch.equal(bias, expected)


def padded_batch(config, step):
    """`ragged_batch`, whose tokens without a label are padding: all of the first row's."""
    batch = ragged_batch(config, step)
    return batch | {"document_ids": torch.where(batch["labels"] == IGNORE, -1, 0)}


@pytest.mark.parametrize("per_sequence, micro", [(True, 1), (False, 2)])
def test_auxiliary_loss_over_ranks(pool, per_sequence, micro):
    """The gradients of one process that sees all rows at once; per sequence also in several micro-batches."""
    model = dict(
        name="mixtral-8x7b-tiny", num_layers=1, router_aux_loss_coef=1.0, seq_aux=per_sequence
    )
    batch = {"global": 4, "micro": micro, "seq_len": 24}
    tree = dict(model=model, batch=batch, optim=dict(name="sgd", lr=0.1), recompute="full")
    check_against_one_process(pool, 2, tree, batch=padded_batch)


# -------------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize(
    "name, changes, dtype",
    [
        (
            "deepseek-v3-tiny",
            dict(first_k_dense_replace=0, bias_update_speed=0.01, router_aux_loss_coef=0.01),
            "bf16",
        ),
        ("gpt-oss-20b-tiny", {}, "bf16"),
        ("gpt-oss-20b-tiny", {}, "fp32"),
        ("qwen3-30b-a3b-tiny", dict(fake_balanced_gate=True), "bf16"),
    ],
)
def test_a_block_compiles_as_one_graph_under_recomputation(name, changes, dtype):
    """The same operations, so the same bits; in fp32, the products are our operator."""
    config = model_config(name, num_layers=1, **changes)
    tokens, results = torch.arange(32).view(2, 16), []
    for compiled in (False, True):
        model = Decoder(config)
        initialize(model, seed=0)
        model.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        if compiled:
            recompute(model.blocks, "full")
            model.blocks[0].compile(fullgraph=True, dynamic=False, backend="aot_eager")
        logits = model(tokens)
        logits.float().square().sum().backward()
        load = model.blocks[0].mlp.gate.load
        results.append(
            [logits, *(p.grad for p in model.parameters() if p.grad is not None), load]
        )
    for mine, oracle in zip(*results, strict=True):
        assert (mine is None and oracle is None) or torch.equal(mine, oracle)


@pytest.mark.parametrize("compiling", [False, True])
def test_gradients_of_experts_come_in_the_layout_of_their_weights(compiling):
    """In another, autograd would copy each of them."""
    weights, x = torch.randn(3, 16, 8, requires_grad=True), torch.randn(10, 8)
    offsets = torch.tensor([4, 4, 10], dtype=torch.int32)
    with mock.patch.object(torch.compiler, "is_compiling", lambda: compiling):
        product = grouped_mm(x, weights.transpose(-2, -1), offsets)
    (grad,) = torch.autograd.grad(product.square().sum(), weights)
    assert grad.is_contiguous()
    expected = torch.autograd.grad(
        torch.cat([x[:4] @ weights[0].T, x[4:] @ weights[2].T]).square().sum(), weights
    )[0]
    torch.testing.assert_close(grad, expected)


# --------------------------------------------------------------------------------------------------------------- memory


def test_no_tensor_of_tokens_by_experts_by_channels():
    """Forward and backward of a DeepSeek-V3-shaped block: at most one row per chosen expert, of both halves."""
    config = model_config(
        "deepseek-v3-tiny", num_experts=128, n_group=8, topk_group=4, num_experts_per_tok=2
    )
    moe, tokens = fill(MoE(config)), 512
    x = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
    sizes = []
    with Results(
        lambda result: sizes.append(result.untyped_storage().nbytes() // result.element_size())
    ):
        moe(x).square().mean().backward()
    stacks = max(parameter.numel() for parameter in moe.parameters())
    rows = (
        tokens
        * config.num_experts_per_tok
        * max(2 * config.moe_intermediate_size, config.hidden_size)
    )
    channels = min(config.moe_intermediate_size, config.hidden_size)
    assert tokens <= max(sizes) <= max(stacks, rows) < tokens * config.num_experts * channels


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "mixtral-8x7b",
            dict(num_experts_per_tok=9),
            "num_experts_per_tok=9 must be between 1 and num_experts=8",
        ),
        ("mixtral-8x7b", dict(num_experts_per_tok=0), "num_experts_per_tok=0 must be between 1"),
        ("mixtral-8x7b", dict(num_experts=-1), "num_experts=-1 must be at least 0"),
        (
            "mixtral-8x7b",
            dict(moe_intermediate_size=100),
            "moe_intermediate_size=100 must be a multiple of 8",
        ),
        (
            "mixtral-8x7b",
            dict(moe_intermediate_size=0),
            "moe_intermediate_size=0 must be a multiple of 8",
        ),
        (
            "mixtral-8x7b",
            dict(scoring_func="tanh"),
            "scoring_func='tanh' is not one of softmax, sigmoid",
        ),
        ("mixtral-8x7b", dict(n_group=2), "n_group=2 needs scoring_func=sigmoid"),
        (
            "mixtral-8x7b",
            dict(bias_update_speed=0.001),
            "bias_update_speed=0.001 needs scoring_func=sigmoid",
        ),
        (
            "mixtral-8x7b",
            dict(mlp="gelu"),
            "mlp='gelu' is not one of swiglu, clamped_swiglu, relu2",
        ),
        (
            "mixtral-8x7b",
            dict(router_aux_loss_coef=-0.1),
            "router_aux_loss_coef=-0.1 must be at least 0",
        ),
        ("llama3-8b", dict(mlp="clamped_swiglu"), "mlp='clamped_swiglu' is not one of"),
        ("llama3-8b", dict(sliding_window=-1), "sliding_window=-1 must be at least 0"),
        ("gpt-oss-20b", dict(first_k_dense_replace=1), "mlp=clamped_swiglu is for experts only"),
        (
            "gpt-oss-20b",
            dict(shared_expert_intermediate_size=8),
            "mlp=clamped_swiglu is for experts only",
        ),
        (
            "gpt-oss-20b",
            dict(num_layers=4, layer_pattern="*E-E"),
            "mlp=clamped_swiglu is for experts only",
        ),
        (
            "deepseek-v3",
            dict(routed_scaling_factor=-1.0),
            "routed_scaling_factor=-1.0 must be at least 0",
        ),
        ("deepseek-v3", dict(n_group=3), "n_group=3 does not divide num_experts=256"),
        ("deepseek-v3", dict(n_group=256), "n_group=256 leaves 1 of num_experts=256 to a group"),
        ("deepseek-v3", dict(topk_group=9), "topk_group=9 must be between 1 and n_group=8"),
        (
            "deepseek-v3",
            dict(num_experts=32, topk_group=1),
            "num_experts_per_tok=8 exceeds the 4 experts of",
        ),
        (
            "deepseek-v3",
            dict(v_head_dim=0),
            "v_head_dim=0 must be at least 1 in latent attention",
        ),
        ("deepseek-v3", dict(qk_rope_head_dim=3), "qk_rope_head_dim=3 must be even"),
        (
            "deepseek-v3",
            dict(num_key_value_heads=8),
            "num_key_value_heads=8 must be num_attention_heads=128",
        ),
        (
            "deepseek-v3",
            dict(rope_scaling=dict(rope_type="yarn")),
            "must have rope_type linear and",
        ),
    ],
)
def test_impossible_models_are_refused(name, changes, message):
    with pytest.raises(InputError) as caught:
        model_config(name, **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_dense_models_need_nothing_of_experts():
    with torch.device("meta"):
        model = Decoder(DecoderConfig(num_experts=0, num_experts_per_tok=7))
    assert not any(isinstance(module, Router) for module in model.modules())


def test_biases_of_experts_do_not_decay():
    model = Decoder(model_config("gpt-oss-20b-tiny"))
    decayed, others = (group["params"] for group in make_optimizer(model, Optim()).param_groups)
    names = {name for name, p in model.named_parameters() if any(p is q for q in others)}
    assert len(decayed) + len(others) == len(list(model.parameters()))
    assert names == {
        name
        for name, _ in model.named_parameters()
        if name.endswith(("bias", "norm.weight", "sinks"))
    }


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_experts_on_cuda_in_bf16(bias):
    torch.manual_seed(0)
    experts = fill(Experts(8, 64, 128, "swiglu", bias))
    x, weights = torch.randn(256, 64), torch.rand(256, 2)
    indices = torch.rand(256, 7).argsort(dim=-1)[:, :2]  # expert 7 stays empty
    outputs = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        there = copy.deepcopy(experts).to(device, dtype)
        y = dispatch(x.to(device, dtype), indices.to(device), weights.to(device, dtype), there)()
        y.float().square().mean().backward()
        outputs.append([y, *(parameter.grad for parameter in there.parameters())])
    for mine, oracle in zip(outputs[1], outputs[0], strict=True):
        assert (mine.cpu().float() - oracle).norm() / oracle.norm() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("experts", "hidden"), [(8, 4096), (128, 2048), (256, 7168)])
def test_a_router_on_cuda_in_bf16(experts, hidden, compiled):
    """Scores to fp32's accuracy, with gradients as exact as bf16's are."""
    torch.manual_seed(0)
    router, results = make_router(experts, 4, hidden=hidden), []
    router.weight.data.normal_(0, 0.02)
    router.to(torch.bfloat16)
    x, grad = torch.randn(500, hidden).to(torch.bfloat16), torch.randn(500, experts)
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        scores = (
            torch.compile(routing.linear_fp32)
            if compiled and device == "cuda"
            else routing.linear_fp32
        )
        factors = (
            x.to(device, dtype).requires_grad_(),
            router.weight.detach().to(device, dtype).requires_grad_(),
        )
        logits = factors[0] @ factors[1].T if device == "cpu" else scores(*factors)
        results.append(
            [logits, *torch.autograd.grad(logits, factors, grad.to(device, logits.dtype))]
        )
    (right, *expected), (logits, *mine) = results
    assert logits.dtype == torch.float32
    assert (logits.cpu() - right).norm() < 1e-4 * right.norm()
    for ours, exact in zip(mine, expected, strict=True):
        assert (ours.cpu() - exact).norm() < 1e-2 * exact.norm()
