"""The shape of a decoder as data, checked before any weights exist.

A family is a choice of these fields. `zoo.py` holds their values for each published model,
`formats/config_hf.py` reads them from a Hugging Face config.json, and `decoder.py` builds the model.
"""

import dataclasses
from dataclasses import dataclass
from itertools import chain

from minitrain.errors import InputError
from minitrain.models.layers import MLPS, NORMS
from minitrain.models.limits import check_fields

# see moe.py
EXPERT_MLPS = ("swiglu", "clamped_swiglu", "relu2")
POSITIONS = ("rotary", "learned", "none")
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ROPE_SCALINGS = {  # what each kind must have
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# what yarn may have too, and `truncate`
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
PARTS = {  # what a layer consists of, by its letter in a pattern
    "M": ("mamba", None),
    "*": ("attention", None),
    "E": (None, "moe"),
    "-": (None, "mlp"),
}


@dataclass(frozen=True)
class MambaShape:
    """The shape of a Mamba-2 mixer, in the letters of mamba.py.

    heads: H, each of head_dim P; groups: G, a divisor of H; state: N; conv: taps of the convolution.
    chunk: Q, which changes speed and memory only. dt_min: the least dt.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int
    dt_min: float = 0.0

    @property
    def width(self) -> int:
        """Return the channels of x, of z and of the output: H P."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> list[int]:
        """Return the rows of in_proj: z, x, B, C, dt."""
        return [self.width, *self.convolved, self.heads]

    @property
    def convolved(self) -> list[int]:
        """Return the channels of the convolution: x, B, C."""
        return [self.width, self.groups * self.state, self.groups * self.state]

    def rows(self, parts: list[int]) -> list[tuple[int, int, int]]:
        """Return `by_group` as ranges of rows: (first row after it, first row before it, count)."""
        found = []
        after = 0
        for group in range(self.groups):
            for i, part in enumerate(parts):
                size = part // self.groups
                found.append((after, sum(parts[:i]) + group * size, size))
                after += size
        return found


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape. Names follow Hugging Face's config.json where it has one."""

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
    norm_topk_prob: bool = True  # the chosen experts' weights are divided by their sum
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    bias_update_speed: float = 0.0  # of the selection bias, after every step
    router_aux_loss_coef: float = 0.0
    seq_aux: bool = (
        False  # balance each sequence, rather than the tokens of a forward pass together
    )
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
    scaled_residual_init: bool = (
        False  # divide what writes into the residual stream by sqrt(number of writers)
    )
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None  # Llama 3.1 has several
    # what the model's files say besides, for those of what is made of it: other keys of
    # config.json, and generation_config.json
    extra_config: dict = dataclasses.field(default_factory=dict, compare=False)
    generation_config: dict = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self):
        """Raise InputError for sizes that no model can have."""
        self._check_experts()
        check_fields(self)
        if self.rope_theta <= 1:
            raise self._wrong("rope_theta", "must be above 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise self._wrong(
                "num_key_value_heads",
                f"does not divide num_attention_heads={self.num_attention_heads}",
            )
        self._check_latent_attention()
        rotates = self.position_embedding == "rotary"
        if rotates and not (
            0 < self.partial_rotary_factor <= 1 and self.rotary_dim % 2 == 0 < self.rotary_dim
        ):
            why = f"of head_dim={self.head_dim} must rotate an even number of channels, between 2 and head_dim"
            raise self._wrong("partial_rotary_factor", why)
        mlps = EXPERT_MLPS if self.num_experts else MLPS
        for field, known in (("norm", NORMS), ("mlp", mlps), ("position_embedding", POSITIONS)):
            if getattr(self, field) not in known:
                raise self._wrong(field, f"is not one of {', '.join(known)}")
        self._check_rope_scaling()
        self._check_pattern()

    def _wrong(self, field: str, why: str) -> InputError:
        return InputError(f"model.{field}={getattr(self, field)!r} {why}")

    def _check_rope_scaling(self):
        if self.rope_scaling is None:
            return
        given = dict(self.rope_scaling)
        kind = given.pop("rope_type", None)
        _ = given.pop("truncate", None)
        if (
            not isinstance(kind, str)
            or kind not in ROPE_SCALINGS
            or set(ROPE_SCALINGS[kind]) - given.keys()
        ):
            wanted = " or ".join(
                f"rope_type {kind} and {', '.join(sorted(x))}" for kind, x in ROPE_SCALINGS.items()
            )
            raise InputError(
                f"model.rope_scaling={self.rope_scaling} is not supported: it must have {wanted}"
            )
        for key, value in given.items():
            if key not in ROPE_SCALINGS[kind] and not (kind == "yarn" and key in YARN):
                raise InputError(f"model.rope_scaling.{key} is not a setting of {kind}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if (
                not number
                or not 0 <= value <= 1e9
                or (value == 0 and not str(key).startswith("mscale"))
            ):
                raise InputError(f"model.rope_scaling.{key}={value!r} must be a number above 0")
        if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
            raise InputError(
                f"model.rope_scaling={self.rope_scaling}: low_freq_factor must be below high_freq_factor"
            )

    def _check_latent_attention(self):
        if not self.kv_lora_rank:
            return
        for field in LATENT:
            if getattr(self, field) < 1:
                raise self._wrong(field, "must be at least 1 in latent attention")
        if self.qk_rope_head_dim % 2:
            raise self._wrong("qk_rope_head_dim", "must be even")
        if self.num_key_value_heads != self.num_attention_heads:
            why = f"must be num_attention_heads={self.num_attention_heads} in latent attention"
            raise self._wrong("num_key_value_heads", why)

    def _check_experts(self):
        experts = self.num_experts
        chosen = self.num_experts_per_tok
        if experts < 1:
            return
        if not 1 <= chosen <= experts:
            raise self._wrong("num_experts_per_tok", f"must be between 1 and num_experts={experts}")
        for field in ("hidden_size", "moe_intermediate_size", "moe_latent_size"):
            size = getattr(self, field)
            if size % 8 or size < 8 * (field != "moe_latent_size"):
                raise self._wrong(field, "must be a multiple of 8 for grouped matrix products")
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise self._wrong("scoring_func", "is not one of softmax, sigmoid")
        if self.mlp not in MLPS and (self.first_k_dense_replace or "-" in self.layer_pattern):
            raise InputError(
                f"model.mlp={self.mlp} is for experts only: it needs first_k_dense_replace=0, no layer -"
            )
        self._check_groups()

    def _check_groups(self):
        experts = self.num_experts
        groups = self.n_group
        kept = self.topk_group
        softmax = self.scoring_func == "softmax"
        for field, needless in (
            ("n_group", 1),
            ("routed_scaling_factor", 1),
            ("bias_update_speed", 0),
        ):
            if softmax and getattr(self, field) != needless:
                raise self._wrong(field, "needs scoring_func=sigmoid")
        if groups < 1 or experts % groups:
            raise self._wrong("n_group", f"does not divide num_experts={experts}")
        if not 1 <= kept <= groups:
            raise self._wrong("topk_group", f"must be between 1 and n_group={groups}")
        if groups > 1 and experts // groups < 2:
            raise self._wrong(
                "n_group", f"leaves 1 of num_experts={experts} to a group (at least 2)"
            )
        if (left := kept * (experts // groups)) < self.num_experts_per_tok:
            raise self._wrong(
                "num_experts_per_tok", f"exceeds the {left} experts of topk_group={kept} groups"
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
            raise self._wrong("layer_pattern", "has layers of experts, but num_experts=0")
        if pattern and len(pattern) != self.num_layers:
            raise self._wrong(
                "layer_pattern",
                f"has {len(pattern)} letters, expected num_layers={self.num_layers}",
            )
        if self.mamba_num_heads % self.mamba_n_groups:
            raise self._wrong(
                "mamba_n_groups", f"does not divide mamba_num_heads={self.mamba_num_heads}"
            )

    @property
    def rotary_dim(self) -> int:
        return (
            self.qk_rope_head_dim
            if self.kv_lora_rank
            else int(self.head_dim * self.partial_rotary_factor)
        )

    def parts(self, layer: int) -> tuple[str | None, str | None]:
        """Return the mixer ("attention" or "mamba") and "mlp" or "moe" of a layer; one may be None."""
        if self.layer_pattern:
            return PARTS[self.layer_pattern[layer]]
        return (
            "attention",
            "moe" if self.num_experts and layer >= self.first_k_dense_replace else "mlp",
        )

    def windowed(self, layer: int) -> bool:
        return bool(self.sliding_window) and layer % 2 == 0

    @property
    def mamba(self) -> MambaShape:
        return MambaShape(
            self.mamba_num_heads,
            self.mamba_head_dim,
            self.mamba_n_groups,
            self.ssm_state_size,
            self.conv_kernel,
            self.mamba_chunk_size,
            self.time_step_min,
        )


def find_ends(config: DecoderConfig, *known: int | list[int] | None) -> tuple[int, ...]:
    """Return the tokens that end a text: `known`, then those at which transformers stops."""
    found = [*known, config.eos_token_id, config.generation_config.get("eos_token_id")]
    flat = chain.from_iterable(ids if isinstance(ids, list) else [ids] for ids in found)
    return tuple(dict.fromkeys(token for token in flat if isinstance(token, int)))
