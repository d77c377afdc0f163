"""The decoder-only language model: one class for every family, shaped by its `DecoderConfig`.

A family differs from another in data, not in code: biases, norms, rotary scaling and activations are fields of the
config, and `zoo.py` holds their values for each published model. Parameter names are those of the Hugging Face
checkpoints. What is not here: losses (training/loss.py), sharding (parallel/), reading weights (checkpoint_hf.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError
from minitrain.models.attention import GroupedQueryAttention, Mask
from minitrain.models.layers import GatedMLP, LayerNorm1P, SquaredReluMLP, rotary_frequencies, rotary_tables

NORMS = {"rmsnorm": nn.RMSNorm, "layernorm1p": LayerNorm1P}
MLPS = {"swiglu": GatedMLP, "relu2": SquaredReluMLP}


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that fixes a decoder's shape. Names follow Hugging Face's config.json where it has one."""

    family: str = "llama"  # which Hugging Face architecture reads and writes the checkpoint
    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 8192
    norm: str = "rmsnorm"  # rmsnorm | layernorm1p
    norm_eps: float = 1e-5
    mlp: str = "swiglu"  # swiglu | relu2
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    partial_rotary_factor: float = 1.0  # the share of each head that is rotated
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None  # Llama 3.1 has several

    def __post_init__(self):
        """Raises InputError for sizes that no model can have."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, field) < 1:
                raise InputError(f"model.{field}={getattr(self, field)} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"model.num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim % 2 or self.rotary_dim == 0:
            raise InputError(
                f"model.partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} "
                f"must rotate an even number of channels, between 2 and head_dim"
            )
        for field, known in (("norm", NORMS), ("mlp", MLPS)):
            if getattr(self, field) not in known:
                raise InputError(f"model.{field}={getattr(self, field)!r} is not one of {', '.join(known)}")
        if self.rope_scaling is not None:
            needed = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
            if self.rope_scaling.get("rope_type") != "llama3" or needed - self.rope_scaling.keys():
                raise InputError(
                    f"model.rope_scaling={self.rope_scaling} is not supported: "
                    f"it must have rope_type llama3 and {', '.join(sorted(needed))}"
                )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        hidden, norm = config.hidden_size, NORMS[config.norm]
        self.input_layernorm = norm(hidden, eps=config.norm_eps)
        self.self_attn = GroupedQueryAttention(
            hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            qkv_bias=config.qkv_bias, qk_norm=config.qk_norm, norm_eps=config.norm_eps,
        )
        self.post_attention_layernorm = norm(hidden, eps=config.norm_eps)
        self.mlp = MLPS[config.mlp](hidden, config.intermediate_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids in, logits out; or, with a `head`, whatever that makes of the last hidden states.

    A pipeline stage holds only some `layers`; the `first` stage has the embedding, the `last` the final norm and the
    head, and the others take and return hidden states. With tied embeddings, first and last each have the matrix.
    """

    def __init__(self, config: DecoderConfig, layers: range | None = None, first: bool = True, last: bool = True):
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.make_mask = Mask  # context parallelism replaces it by one that knows where this rank's tokens are
        hidden, vocab, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
        layers = range(config.num_layers) if layers is None else layers
        self.model = nn.ModuleDict()
        if first or (last and tied):
            self.model["embed_tokens"] = nn.Embedding(vocab, hidden)
        self.model["layers"] = nn.ModuleDict({str(i): Block(config) for i in layers})
        if last:
            self.model["norm"] = NORMS[config.norm](hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(hidden, vocab, bias=False) if last and not tied else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        head: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
    ) -> Tensor:
        """Logits [batch, seq, vocab] of tokens, int [batch, seq]; or head(hidden [batch, seq, hidden], weight, labels).

        x: the tokens; in a pipeline, all stages but the first get hidden states, and all but the last return them.
        positions: int [batch, seq], for the rotary embedding; 0, 1, 2, ... if not given.
        documents: int [batch, seq]; tokens see only those with the same number (packed sequences).
        head: called inside the forward pass, where a sharded head weight [vocab, hidden] is whole.
        """
        if self.first:
            x = self.model.embed_tokens(x)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        config, mask = self.config, self.make_mask(documents=documents)
        frequencies = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling, x.device)
        rotary = rotary_tables(positions, frequencies)
        for layer in self.model.layers.values():
            x = layer(x, rotary, mask)
        if not self.last:
            return x
        x = self.model.norm(x)
        weight = self.head_weight
        return F.linear(x, weight) if head is None else head(x, weight, labels)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers in order: the units of recomputation, compilation and sharding."""
        return list(self.model.layers.values())

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]: the output head, which is the embedding where the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill `tensor`, the whole parameter called `name`, with its initial value."""
        if tensor.ndim > 1:
            tensor.normal_(0, self.config.initializer_range, generator=generator)
        elif name.endswith("norm.weight") and self.config.norm == "rmsnorm":
            tensor.fill_(1)
        else:
            tensor.zero_()
