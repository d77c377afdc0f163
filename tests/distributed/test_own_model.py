"""parallel/ taken home: FSDP and tensor parallelism for a transformer that knows nothing of minitrain."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from minitrain.errors import InputError
from minitrain.parallel.collectives import sum_over_
from minitrain.parallel.fsdp import shard
from minitrain.parallel.mesh import build_meshes, local_chunk
from minitrain.parallel.parts import split_parameters, use_local_tensors
from minitrain.parallel.tensor import split_block, split_embedding

VOCAB, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 32, 16, 4, 2, 4, 8


def identity(x: Tensor) -> Tensor:
    return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gather = self.reduce = identity  # exchange points, which tensor parallelism sets
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather(x)
        q, k, v = (
            linear(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        return self.reduce(
            self.o(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        )


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gather = self.reduce = identity
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.down(F.gelu(self.up(self.gather(x)))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The sum of the cross-entropies of `labels`, of which a rank may have some alone."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), labels.flatten(), reduction="sum"
        )


def parallelize(model: Transformer, meshes) -> None:
    split_embedding(model.embedding, meshes.tp)
    for block in model.blocks:
        split_block(
            block,
            meshes.tp,
            column=("q", "k", "v", "up"),
            row=("o", "down"),
            parts=(block.attention, block.mlp),
        )
    for module in (model.norm, model.head):  # they see a rank's own tokens
        split_parameters(module, meshes.tp, Replicate())
        module.register_forward_pre_hook(use_local_tensors)
    shard(model, model.blocks, meshes.parameters)


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def make_rows() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def train():
    meshes = build_meshes("cpu", tp=2)
    model = make_model()
    parallelize(model, meshes)
    place, ranks = meshes.batch.get_local_rank(), meshes.batch.size()
    tokens, labels = (rows.chunk(ranks)[place] for rows in make_rows())
    loss = model(tokens, local_chunk(meshes.tp, labels))
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    total = sum_over_(meshes.tokens, loss.detach().clone())
    return total, gradients, dist.get_world_size()


def test_a_suffix_that_no_module_has_is_refused():
    """It was replicated: right, but slow, and with all of the weight on each rank."""
    for column, row, wrong in [
        (("q", "k", "v", "upp"), ("o", "down"), "upp"),
        (("q", "k", "v", "up"), ("o", "dwn"), "dwn"),
    ]:
        with pytest.raises(InputError, match=f"no module of a Block .* ends in '{wrong}'"):
            split_block(Block(), None, column, row, ())


def test_tensor_and_data_parallelism_of_a_model_of_ones_own(pool):
    model = make_model()
    expected = model(*make_rows())
    expected.backward()
    for loss, gradients, ranks in pool.run(4, train):
        assert ranks == 4
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
