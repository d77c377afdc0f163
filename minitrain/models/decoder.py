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
from minitrain.models.attention import GroupedQueryAttention, Mask, make_mask
from minitrain.models.layers import (
    GatedMLP,
    GeluMLP,
    LayerNorm1P,
    SquaredReluMLP,
    rotary_frequencies,
    rotary_magnitude,
    rotary_tables,
    yarn_magnitude,
)
from minitrain.models.mamba import Mamba2, MambaShape
from minitrain.models.mamba import initialize_parameter as initialize_mamba
from minitrain.models.mla import LatentAttention
from minitrain.models.moe import EXPERT_MLPS, MoE, Router

NORMS = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm, "layernorm1p": LayerNorm1P}
MLPS = {"swiglu": GatedMLP, "relu2": SquaredReluMLP, "gelu": GeluMLP}
POSITIONS = ("rotary", "learned", "none")
PARTS = {  # what a layer consists of, by its letter in a pattern
    "M": ("mamba", None),
    "*": ("attention", None),
    "E": (None, "moe"),
    "-": (None, "mlp"),
}
RESIDUAL_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


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
    norm: str = "rmsnorm"  # rmsnorm | layernorm | layernorm1p
    norm_eps: float = 1e-5
    mlp: str = "swiglu"  # swiglu | relu2 | gelu, which has biases | clamped_swiglu, of experts only
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    position_embedding: str = "rotary"  # rotary | learned | none
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    partial_rotary_factor: float = 1.0  # the share of each head that is rotated
    tie_word_embeddings: bool = False
    sliding_window: int = 0  # layers 0, 2, 4, ... see so many keys; 0: all layers see all
    sinks: bool = False  # a learned term in each head's softmax
    kv_lora_rank: int = 0  # above 0: multi-head latent attention, which uses this and the next four, and no head_dim
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_experts: int = 0  # 0: all MLPs are dense, and what follows on experts is not used
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0  # so many first layers have no experts
    shared_expert_intermediate_size: int = 0  # of an expert that sees every token; 0: there is none
    moe_latent_size: int = 0  # width that experts work on, if not hidden_size
    expert_bias: bool = False  # router and experts have biases
    scoring_func: str = "softmax"  # softmax | sigmoid, which has a selection bias and groups
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    bias_update_speed: float = 0.0  # of the selection bias, after every step
    router_aux_loss_coef: float = 0.0
    seq_aux: bool = False  # balance each sequence, rather than the tokens of a forward pass together
    fake_balanced_gate: bool = False  # experts in turn, whatever the token: for benchmarks
    layer_pattern: str = ""  # a letter per layer, see `parts`; empty: attention and MLP in each
    mamba_num_heads: int = 8
    mamba_head_dim: int = 64
    mamba_n_groups: int = 1  # heads of a group share B and C
    ssm_state_size: int = 128
    conv_kernel: int = 4
    mamba_chunk_size: int = 128
    time_step_min: float = 0.0  # dt is at least so much
    initializer_range: float = 0.02
    scaled_residual_init: bool = False  # divide what writes into the residual stream by sqrt(number of writers)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None  # Llama 3.1 has several

    def __post_init__(self):
        """Raises InputError for sizes that no model can have."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim", "max_position_embeddings", "mamba_num_heads",
                      "mamba_head_dim", "mamba_n_groups", "ssm_state_size", "conv_kernel", "mamba_chunk_size"):
            if getattr(self, field) < 1:
                raise InputError(f"model.{field}={getattr(self, field)} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"model.num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        self._check_latent_attention()
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim % 2 or self.rotary_dim == 0:
            raise InputError(
                f"model.partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} "
                f"must rotate an even number of channels, between 2 and head_dim"
            )
        mlps = EXPERT_MLPS if self.num_experts else MLPS
        for field, known in (("norm", NORMS), ("mlp", mlps), ("position_embedding", POSITIONS)):
            if getattr(self, field) not in known:
                raise InputError(f"model.{field}={getattr(self, field)!r} is not one of {', '.join(known)}")
        self._check_rope_scaling()
        self._check_experts()
        self._check_pattern()

    def _check_rope_scaling(self):
        needed = {
            "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
            "yarn": {"factor", "original_max_position_embeddings"},
        }
        kind = (self.rope_scaling or {}).get("rope_type")
        if self.rope_scaling is not None and (kind not in needed or needed[kind] - self.rope_scaling.keys()):
            wanted = " or ".join(f"rope_type {kind} and {', '.join(sorted(keys))}" for kind, keys in needed.items())
            raise InputError(f"model.rope_scaling={self.rope_scaling} is not supported: it must have {wanted}")

    def _check_latent_attention(self):
        if self.sliding_window < 0:
            raise InputError(f"model.sliding_window={self.sliding_window} must be at least 0")
        if not self.kv_lora_rank:
            return
        for field in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, field) < 1:
                raise InputError(f"model.{field}={getattr(self, field)} must be at least 1 in latent attention")
        if self.qk_rope_head_dim % 2:
            raise InputError(f"model.qk_rope_head_dim={self.qk_rope_head_dim} must be even")
        if self.num_key_value_heads != self.num_attention_heads:
            raise InputError(
                f"model.num_key_value_heads={self.num_key_value_heads} must be num_attention_heads="
                f"{self.num_attention_heads} in latent attention"
            )

    def _check_experts(self):
        experts, chosen = self.num_experts, self.num_experts_per_tok
        if experts < 0:
            raise InputError(f"model.num_experts={experts} must be at least 0")
        if experts == 0:
            return
        if not 1 <= chosen <= experts:
            raise InputError(f"model.num_experts_per_tok={chosen} must be between 1 and num_experts={experts}")
        for field in ("hidden_size", "moe_intermediate_size", "moe_latent_size"):
            size = getattr(self, field)
            if size % 8 or size < 8 * (field != "moe_latent_size"):
                raise InputError(f"model.{field}={size} must be a multiple of 8 for grouped matrix products")
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise InputError(f"model.scoring_func={self.scoring_func!r} is not one of softmax, sigmoid")
        if self.mlp not in MLPS and self.first_k_dense_replace:
            raise InputError(f"model.mlp={self.mlp} is for experts only: it needs first_k_dense_replace=0")
        for field in ("first_k_dense_replace", "shared_expert_intermediate_size", "bias_update_speed",
                      "router_aux_loss_coef"):  # fmt: skip
            if getattr(self, field) < 0:
                raise InputError(f"model.{field}={getattr(self, field)} must be at least 0")
        self._check_groups()

    def _check_groups(self):
        experts, groups, kept = self.num_experts, self.n_group, self.topk_group
        softmax = self.scoring_func == "softmax"
        for field, needless in (("n_group", 1), ("routed_scaling_factor", 1), ("bias_update_speed", 0)):
            if softmax and getattr(self, field) != needless:
                raise InputError(f"model.{field}={getattr(self, field)} needs scoring_func=sigmoid")
        if groups < 1 or experts % groups:
            raise InputError(f"model.n_group={groups} does not divide num_experts={experts}")
        if not 1 <= kept <= groups:
            raise InputError(f"model.topk_group={kept} must be between 1 and n_group={groups}")
        if groups > 1 and experts // groups < 2:
            raise InputError(f"model.n_group={groups} leaves 1 of num_experts={experts} to a group (at least 2)")
        if kept * (experts // groups) < self.num_experts_per_tok:
            raise InputError(
                f"model.num_experts_per_tok={self.num_experts_per_tok} exceeds the {kept * (experts // groups)} "
                f"experts of topk_group={kept} groups"
            )

    def _check_pattern(self):
        pattern = self.layer_pattern
        unknown = set(pattern) - PARTS.keys()
        if unknown:
            raise InputError(
                f"model.layer_pattern={pattern!r}: letter {min(unknown)!r} is not one of {' '.join(PARTS)} "
                f"(M Mamba-2, * attention, E experts, - MLP)"
            )
        if "E" in pattern and not self.num_experts:
            raise InputError(f"model.layer_pattern={pattern!r} has layers of experts, but num_experts is 0")
        if pattern and len(pattern) != self.num_layers:
            raise InputError(
                f"model.layer_pattern={pattern!r} has {len(pattern)} letters, expected num_layers={self.num_layers}"
            )
        if self.mamba_num_heads % self.mamba_n_groups:
            raise InputError(
                f"model.mamba_n_groups={self.mamba_n_groups} does not divide mamba_num_heads={self.mamba_num_heads}"
            )
        if self.time_step_min < 0:
            raise InputError(f"model.time_step_min={self.time_step_min} must be at least 0")

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_dim * self.partial_rotary_factor)

    def parts(self, layer: int) -> tuple[str | None, str | None]:
        """What layer 0, 1, ... is: a mixer of tokens ("attention", "mamba") and an "mlp" or "moe", or only one."""
        if self.layer_pattern:
            return PARTS[self.layer_pattern[layer]]
        return "attention", "moe" if self.num_experts and layer >= self.first_k_dense_replace else "mlp"

    def windowed(self, layer: int) -> bool:
        return bool(self.sliding_window) and layer % 2 == 0

    @property
    def mamba(self) -> MambaShape:
        return MambaShape(
            self.mamba_num_heads, self.mamba_head_dim, self.mamba_n_groups, self.ssm_state_size, self.conv_kernel,
            self.mamba_chunk_size, self.time_step_min,
        )  # fmt: skip


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)); some layers have only one of the two."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        hidden, norm = config.hidden_size, NORMS[config.norm]
        mixer, mlp = config.parts(layer)
        self.self_attn = self.mamba = self.mlp = None
        if mixer:
            self.input_layernorm = norm(hidden, eps=config.norm_eps)
        if mixer == "attention":
            self.self_attn = latent_attention(config) if config.kv_lora_rank else grouped_query_attention(config)
            self.windowed = config.windowed(layer)
        if mixer == "mamba":
            self.mamba = Mamba2(hidden, config.mamba, config.norm_eps)
        if mlp:
            self.post_attention_layernorm = norm(hidden, eps=config.norm_eps)
            is_moe = mlp == "moe"
            self.mlp = mixture_of_experts(config) if is_moe else MLPS[config.mlp](hidden, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Mask,
        documents: Tensor | None = None,
        window_mask: Mask | None = None,
    ) -> Tensor:
        """x: [batch, seq, hidden]; documents: int [batch, seq], for what mixes tokens without looking at the mask."""
        if self.self_attn is not None:
            x = x + self.self_attn(self.input_layernorm(x), rotary, window_mask if self.windowed else mask)
        if self.mamba is not None:
            x = x + self.mamba(self.input_layernorm(x), documents)
        if self.mlp is not None:
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x


def grouped_query_attention(config: DecoderConfig) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=config.qk_norm, norm_eps=config.norm_eps,
        sinks=config.sinks,
    )  # fmt: skip


def latent_attention(config: DecoderConfig) -> LatentAttention:
    scaling = config.rope_scaling or {}
    extended = scaling.get("rope_type") == "yarn" and scaling.get("mscale_all_dim")
    return LatentAttention(
        config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank,
        config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        scale=yarn_magnitude(scaling["factor"], scaling["mscale_all_dim"]) ** 2 if extended else 1.0,
    )  # fmt: skip


def mixture_of_experts(config: DecoderConfig) -> MoE:
    router = Router(
        config.hidden_size, config.num_experts, config.num_experts_per_tok, config.scoring_func, config.expert_bias,
        config.n_group, config.topk_group, config.routed_scaling_factor, config.fake_balanced_gate,
        count_load=config.bias_update_speed > 0, aux_loss_coef=config.router_aux_loss_coef,
        aux_per_sequence=config.seq_aux,
    )  # fmt: skip
    return MoE(
        router, config.hidden_size, config.moe_intermediate_size, config.mlp, config.expert_bias,
        config.shared_expert_intermediate_size, config.moe_latent_size,
    )  # fmt: skip


class Decoder(nn.Module):
    """Token ids in, logits out; or, with a `head`, whatever that makes of the last hidden states.

    A pipeline stage holds only some `layers`; the `first` stage has the embedding, the `last` the final norm and the
    head, and the others take and return hidden states. With tied embeddings, first and last each have the matrix.
    """

    def __init__(self, config: DecoderConfig, layers: range | None = None, first: bool = True, last: bool = True):
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.sequence_split = 1  # over so many ranks tensor parallelism splits a row's hidden states between layers
        self.make_mask = make_mask  # context parallelism replaces it by one that knows where this rank's tokens are
        hidden, vocab, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
        layers = range(config.num_layers) if layers is None else layers
        self.model = nn.ModuleDict()
        if first or (last and tied):
            self.model["embed_tokens"] = nn.Embedding(vocab, hidden)
        if first and config.position_embedding == "learned":
            self.model["embed_positions"] = nn.Embedding(config.max_position_embeddings, hidden)
        self.model["layers"] = nn.ModuleDict({str(i): Block(config, i) for i in layers})
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
        positions: int [batch, seq], for rotary or learned embeddings; 0, 1, 2, ... if not given.
        documents: int [batch, seq]; tokens see only those with the same number (packed sequences).
        head: called inside the forward pass, where a sharded head weight [vocab, hidden] is whole.
        """
        if positions is None:
            positions = torch.arange(x.shape[1] * (1 if self.first else self.sequence_split), device=x.device)[None]
        if self.first:
            x = self.model.embed_tokens(x)
            if self.config.position_embedding == "learned":
                x = x + self.model.embed_positions(positions)
        config, mask = self.config, self.make_mask(positions.shape[1], x.device, documents)
        rotary = None
        if config.position_embedding == "rotary":
            frequencies = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling, x.device)
            rotary = rotary_tables(positions, frequencies, rotary_magnitude(config.rope_scaling))
        window_mask = None
        if config.sliding_window:
            window_mask = self.make_mask(positions.shape[1], x.device, documents, window=config.sliding_window)
        for layer in self.model.layers.values():
            x = layer(x, rotary, mask, documents, window_mask)
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
        if ".mamba." in name and initialize_mamba(name.rpartition(".mamba.")[2], tensor, generator):
            return
        if tensor.ndim > 1 and not name.endswith("bias"):
            tensor.normal_(0, self._initial_std(name), generator=generator)
        elif name.endswith("norm.weight") and self.config.norm != "layernorm1p":
            tensor.fill_(1)
        else:
            tensor.zero_()

    def _initial_std(self, name: str) -> float:
        """GPT-2's rule, where the config asks for it, keeps the residual stream's size from growing with depth."""
        config = self.config
        if not config.scaled_residual_init or not name.endswith(RESIDUAL_OUTPUTS):
            return config.initializer_range
        writers = sum(part is not None for layer in range(config.num_layers) for part in config.parts(layer))
        return config.initializer_range * writers**-0.5
