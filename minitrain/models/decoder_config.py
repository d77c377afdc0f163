"""The shape of a decoder as data, checked before any weights exist.

A family is a choice of these fields. `shapes/` holds their values for each published model.
`formats/config_hf.py` reads them from a Hugging Face config.json. `decoder.py` builds the model.
"""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from minitrain.errors import Faults, InputError, refuse
from minitrain.models.shapes.mixers import DeltaShape, MambaShape

# values of `mlp`, for layers.py and for experts in moe.py
DENSE_MLPS = ("swiglu", "geglu", "relu2", "gelu")
EXPERT_MLPS = ("swiglu", "clamped_swiglu", "relu2")
# fields of latent attention (mla.py)
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# the keys that `rope_scaling` must have, by its rope_type
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# those that yarn may have too, beside `truncate`
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# the mixer and the MLP of a layer, by its letter in `layer_pattern`
LAYER_PARTS = {
    "M": ("mamba", None),
    "*": ("attention", None),
    "E": (None, "moe"),
    "-": (None, "mlp"),
}
# the mixer of a layer that has an MLP too, or experts, by its letter
MIXERS = {"m": "mamba", "d": "delta", "a": "attention"}

# The largest sizes: above those of any model, and below those that overflow or take minutes to
# allocate. A config.json may be wrong or hostile, and the model is built before weights are read.
LIMITS = {
    "num_layers": 1_000,
    "num_nextn_predict_layers": 64,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_latent_size",
            "ffn_dim",
            "dim",
        ),
        1 << 20,
    ),
}
# numbers of heads and experts, widths of heads, ranks of projections
DEFAULT_LIMIT = 1 << 16


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape. Names follow Hugging Face's config.json where it has one."""

    # --- the whole

    family: str = "llama"  # which Hugging Face architecture reads and writes the checkpoint
    vocab_size: int = 32000  # rows of the embedding
    hidden_size: int = 512  # channels between layers
    intermediate_size: int = 1536  # channels inside an MLP
    num_layers: int = 8  # blocks, each with a mixer, an MLP or both
    layer_pattern: str = ""  # a letter per layer, see `parts`; empty: attention and MLP in each
    max_position_embeddings: int = 8192  # the longest sequence
    # of layers and head; 1p: the weight is stored less 1; rmsnorm1p: also that of qk_norm
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm", "layernorm1p"] = "rmsnorm"
    norm_eps: float = 1e-5  # added to the variance
    # whether layers normalize what mixers and MLPs read, or what they return
    norm_position: Literal["before", "after", "both"] = "before"
    # swiglu, geglu, relu2, gelu with biases, or for experts only clamped_swiglu
    mlp: str = "swiglu"
    tie_word_embeddings: bool = False  # the head is the embedding
    initializer_range: float = 0.02  # standard deviation of initial weights
    scaled_residual_init: bool = False  # of what writes into the residual stream: / sqrt(writers)
    embedding_multiplier: float = 1.0  # of tokens' embeddings
    residual_multiplier: float = 1.0  # of what a mixer or MLP adds to the residual stream
    logits_scaling: float = 1.0  # logits are divided by it
    num_nextn_predict_layers: int = 0  # depths of multi-token prediction, see models/mtp.py
    # above 0: a classifier with so many outputs at a text's last token, or a reward model with one;
    # its head is `score`, in place of the vocabulary's
    num_labels: int = 0

    # --- attention

    num_attention_heads: int = 8  # heads of queries
    num_key_value_heads: int = 8  # heads of keys and values, which several of queries share
    head_dim: int = 64  # channels of a head
    qkv_bias: bool = False  # queries, keys and values have biases
    o_bias: bool = False  # attention's output has a bias
    qk_norm: bool = False  # queries and keys are normalized, head by head
    qk_norm_over_heads: bool = False  # with qk_norm: all heads of a token together
    attention_multiplier: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    sinks: bool = False  # a learned term in each head's softmax
    sliding_window: int = 0  # how many keys layers with a window see; 0: all layers see all
    sliding_window_pattern: int = 2  # one of so many layers, the last, has no window
    position_embedding: Literal["rotary", "learned", "none"] = "rotary"  # how order is told
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: dict | None = None  # as in config.json, of rope_type linear, llama3 or yarn
    partial_rotary_factor: float = 1.0  # the share of each head that is rotated
    # rope_theta of layers with a window, which have no rope_scaling then; 0: as in other layers
    window_rope_theta: float = 0.0
    no_rope_layer_interval: int = 0  # one of so many layers, the last, rotates nothing; 0: none
    attn_output_gate: bool = False  # q_proj makes a gate of each output channel, too

    # --- latent attention

    kv_lora_rank: int = 0  # of keys and values; above 0: this group is used, not head_dim
    q_lora_rank: int = 0  # of queries; at least 1 with latent attention
    qk_nope_head_dim: int = 0  # channels of queries and keys that are not rotated
    qk_rope_head_dim: int = 0  # channels of queries and keys that are rotated
    v_head_dim: int = 0  # channels of values

    # --- experts

    num_experts: int = 0  # routed ones; 0: all MLPs are dense, and this group is not used
    num_experts_per_tok: int = 1  # experts that each token is sent to
    moe_intermediate_size: int = 0  # channels inside an expert
    first_k_dense_replace: int = 0  # the number of first layers that have no experts
    shared_expert_intermediate_size: int = 0  # of one that sees every token; 0: there is none
    shared_expert_gate: bool = False  # the shared expert's output is multiplied by a gate
    moe_latent_size: int = 0  # width that experts work on, if not hidden_size
    expert_bias: bool = False  # router and experts have biases
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: with selection bias
    norm_topk_prob: bool = True  # the selected experts' weights are divided by their sum
    n_group: int = 1  # groups of experts, of which a token selects some first
    topk_group: int = 1  # how many groups it selects
    routed_scaling_factor: float = 1.0  # of the routed experts' sum
    bias_update_speed: float = 0.0  # of the selection bias, per step (DeepSeek-V3's gamma)
    router_aux_loss_coef: float = 0.0  # weight of the loss that balances experts
    seq_aux: bool = False  # balance each sequence, not the tokens of a forward pass together
    fake_balanced_gate: bool = False  # experts in turn, whatever the token: for benchmarks

    # --- Mamba-2

    mamba_num_heads: int = 8  # heads of a mixer
    mamba_head_dim: int = 64  # channels of a head
    mamba_n_groups: int = 1  # heads of a group share B and C
    ssm_state_size: int = 128  # the state of each channel
    conv_kernel: int = 4  # taps of the convolution
    mamba_chunk_size: int = 128  # tokens that are computed at once
    time_step_min: float = 0.0  # the least dt

    # --- gated DeltaNet

    linear_num_key_heads: int = 16  # heads of queries and of keys
    linear_num_value_heads: int = 32  # heads of values, of which several share a key head
    linear_key_head_dim: int = 128  # channels of a head of queries and keys
    linear_value_head_dim: int = 128  # channels of a head of values
    linear_conv_kernel_dim: int = 4  # taps of the convolution
    linear_fused_proj: bool = False  # two projections, as in Qwen3-Next, not four

    # --- files

    bos_token_id: int | None = None  # the token that begins a text
    eos_token_id: int | list[int] | None = None  # those that end one: Llama 3.1 has several
    # other keys of the model's config.json, which exports keep
    extra_config: dict = dataclasses.field(default_factory=dict, compare=False)
    # the model's generation_config.json, which exports keep too
    generation_config: dict = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self):
        """Raise InputError for sizes that no model can have."""
        mlps = EXPERT_MLPS if self.num_experts else DENSE_MLPS
        if self.mlp not in mlps:
            raise InputError(f"model.mlp={self.mlp!r} is not one of {', '.join(mlps)}")
        if self.num_experts > 0:
            refuse(self._experts_faults())
        check_fields(self)
        refuse(self._attention_faults())
        for field in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            if not getattr(self, field) > 0:
                raise InputError(f"model.{field}={getattr(self, field)} must be above 0")
        if self.rope_scaling is not None:
            refuse(self._rope_scaling_faults())
        if self.layer_pattern:
            refuse(self._pattern_faults())

    # The checks below yield pairs (is it wrong?, message). The first that is wrong is raised, so a
    # later check may rely on earlier ones.

    def _experts_faults(self) -> Faults:
        experts = self.num_experts
        chosen = self.num_experts_per_tok
        groups = self.n_group
        kept = self.topk_group
        yield (
            not 1 <= chosen <= experts,
            f"model.num_experts_per_tok={chosen} must be between 1 and num_experts={experts}",
        )
        for field in ("hidden_size", "moe_intermediate_size", "moe_latent_size"):
            size = getattr(self, field)
            least = 0 if field == "moe_latent_size" else 8
            line = f"model.{field}={size} must be a multiple of 8 for grouped matrix products"
            yield size % 8 or size < least, line
        for field, needless in (
            ("n_group", 1),
            ("routed_scaling_factor", 1),
            ("bias_update_speed", 0),
        ):
            value = getattr(self, field)
            wrong = self.scoring_func == "softmax" and value != needless
            yield wrong, f"model.{field}={value} needs scoring_func=sigmoid"
        yield (
            groups < 1 or experts % groups,
            f"model.n_group={groups} does not divide num_experts={experts}",
        )
        yield (
            not 1 <= kept <= groups,
            f"model.topk_group={kept} must be between 1 and n_group={groups}",
        )
        each = experts // groups
        yield (
            groups > 1 and each < 2,
            f"model.n_group={groups} leaves 1 of num_experts={experts} to a group (at least 2)",
        )
        yield (
            kept * each < chosen,
            f"model.num_experts_per_tok={chosen} exceeds the {kept * each} experts of topk_group={kept} groups",
        )
        yield (
            self.shared_expert_gate and not self.shared_expert_intermediate_size,
            "model.shared_expert_gate=True needs shared_expert_intermediate_size",
        )
        shared = self.shared_expert_intermediate_size
        dense = self.first_k_dense_replace or shared or "-" in self.layer_pattern
        yield (
            self.mlp not in DENSE_MLPS and dense,
            f"model.mlp={self.mlp} is for experts only: it needs first_k_dense_replace=0, "
            f"shared_expert_intermediate_size=0, no layer -",
        )

    def _attention_faults(self) -> Faults:
        heads = self.num_attention_heads
        groups = self.num_key_value_heads
        for field in ("rope_theta", "window_rope_theta"):
            theta = getattr(self, field)
            unused = field == "window_rope_theta" and theta == 0
            yield theta <= 1 and not unused, f"model.{field}={theta} must be above 1"
        yield (
            self.window_rope_theta and not self.sliding_window,
            f"model.window_rope_theta={self.window_rope_theta} needs sliding_window",
        )
        yield (
            self.qk_norm_over_heads and not self.qk_norm,
            "model.qk_norm_over_heads=True needs qk_norm=true",
        )
        gated = self.attn_output_gate
        yield (
            self.qk_norm_over_heads and (gated or self.norm == "rmsnorm1p"),
            "model.qk_norm_over_heads=True is not for norm=rmsnorm1p or attn_output_gate=true",
        )
        yield (
            gated and self.kv_lora_rank,
            "model.attn_output_gate=True is not for latent attention (kv_lora_rank)",
        )
        yield (
            heads % groups,
            f"model.num_key_value_heads={groups} does not divide num_attention_heads={heads}",
        )
        if self.kv_lora_rank:
            for field in LATENT:
                size = getattr(self, field)
                yield size < 1, f"model.{field}={size} must be at least 1 in latent attention"
            rotated = self.qk_rope_head_dim
            yield rotated % 2, f"model.qk_rope_head_dim={rotated} must be even"
            yield (
                groups != heads,
                f"model.num_key_value_heads={groups} must be num_attention_heads={heads} in latent attention",
            )
        share = self.partial_rotary_factor
        fits = 0 < share <= 1 and self.rotary_dim > 0 and self.rotary_dim % 2 == 0
        yield (
            self.position_embedding == "rotary" and not fits,
            f"model.partial_rotary_factor={share} of head_dim={self.head_dim} must rotate an even number of "
            f"channels, between 2 and head_dim",
        )

    def _rope_scaling_faults(self) -> Faults:
        given = dict(self.rope_scaling)
        kind = given.pop("rope_type", None)
        given.pop("truncate", None)
        needed = ROPE_SCALINGS.get(kind if isinstance(kind, str) else None)
        known = (
            f"rope_type {name} and {', '.join(sorted(x))}" for name, x in ROPE_SCALINGS.items()
        )
        told = f"model.rope_scaling={self.rope_scaling}"
        yield (
            needed is None or set(needed) - given.keys(),
            f"{told} is not supported: it must have {' or '.join(known)}",
        )
        optional = YARN if kind == "yarn" else ()
        for key, value in given.items():
            line = f"model.rope_scaling.{key} is not a setting of {kind}"
            yield key not in (*needed, *optional), line
            least = 0 if key.startswith("mscale") else sys.float_info.min
            fits = isinstance(value, int | float) and least <= value <= 1e9
            yield not fits, f"model.rope_scaling.{key}={value!r} must be a number above 0"
        yield (
            kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"],
            f"{told}: low_freq_factor must be below high_freq_factor",
        )

    def _pattern_faults(self) -> Faults:
        pattern = self.layer_pattern
        told = f"model.layer_pattern={pattern!r}"
        letters = LAYER_PARTS | MIXERS
        unknown = min(set(pattern) - letters.keys(), default=None)
        yield (
            unknown,
            f"{told}: letter {unknown!r} is not one of {' '.join(letters)} (M Mamba-2, * attention, "
            "E experts, - MLP; m Mamba-2, d gated DeltaNet, a attention, each with experts or an MLP)",
        )
        yield (
            "E" in pattern and not self.num_experts,
            f"{told} has layers of experts, but num_experts=0",
        )
        yield (
            len(pattern) != self.num_layers,
            f"{told} has {len(pattern)} letters, expected num_layers={self.num_layers}",
        )
        heads = self.mamba_num_heads
        groups = self.mamba_n_groups
        yield (
            heads % groups,
            f"model.mamba_n_groups={groups} does not divide mamba_num_heads={heads}",
        )
        heads = self.linear_num_value_heads
        groups = self.linear_num_key_heads
        yield (
            heads % groups,
            f"model.linear_num_key_heads={groups} does not divide linear_num_value_heads={heads}",
        )

    @property
    def rotary_dim(self) -> int:
        return (
            self.qk_rope_head_dim
            if self.kv_lora_rank
            else int(self.head_dim * self.partial_rotary_factor)
        )

    def parts(self, layer: int) -> tuple[str | None, str | None]:
        """Return a layer's mixer, attention, mamba or delta, and mlp or moe; one may be None.

        Those from num_layers on are of multi-token prediction, and have attention and an MLP.
        """
        letter = "a"
        if self.layer_pattern and layer < self.num_layers:
            letter = self.layer_pattern[layer]
        if letter in LAYER_PARTS:
            return LAYER_PARTS[letter]
        sparse = self.num_experts and layer >= self.first_k_dense_replace
        return MIXERS[letter], "moe" if sparse else "mlp"

    @property
    def all_layers(self) -> range:
        """Return the numbers of all layers, those of multi-token prediction at the end."""
        return range(self.num_layers + self.num_nextn_predict_layers)

    def windowed(self, layer: int) -> bool:
        return bool(self.sliding_window) and (layer + 1) % self.sliding_window_pattern != 0

    def rotates(self, layer: int) -> bool:
        """Return whether a layer rotates queries and keys by their positions."""
        every = self.no_rope_layer_interval
        return self.position_embedding == "rotary" and not (every and (layer + 1) % every == 0)

    def query_factor(self, width: int) -> float:
        """Return the factor on queries, [..., width], that gives scores their `attention_multiplier`.

        Attention divides scores by sqrt(width).
        """
        return self.attention_multiplier * width**0.5 if self.attention_multiplier else 1.0

    def kind(self, layer: int) -> tuple:
        """Return what tells a layer from others: equal kinds compute the same on equal inputs."""
        return *self.parts(layer), self.windowed(layer), self.rotates(layer)

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

    @property
    def delta(self) -> DeltaShape:
        return DeltaShape(
            self.linear_num_key_heads,
            self.linear_key_head_dim,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            self.linear_fused_proj,
        )

    def recurrence(self, layer: int) -> MambaShape | DeltaShape | None:
        """Return the shape of a layer's mixer if it carries a state along the sequence."""
        return {"mamba": self.mamba, "delta": self.delta}.get(self.parts(layer)[0])

    @property
    def is_recurrent(self) -> bool:
        """Return whether layers carry states, which cannot be taken back to an earlier token."""
        return any(map(self.recurrence, range(self.num_layers)))


def as_classifier(config: DecoderConfig, labels: int = 1) -> DecoderConfig:
    """Return the config with a score as the head, which is not tied or scaled, nor predicts tokens."""
    return dataclasses.replace(
        config,
        num_labels=labels,
        tie_word_embeddings=False,
        num_nextn_predict_layers=0,
        logits_scaling=1.0,
    )


def find_ends(config: DecoderConfig, *known: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids of tokens that end a text: `known`, then those at which transformers stops."""
    found = []
    for ids in (*known, config.eos_token_id, config.generation_config.get("eos_token_id")):
        found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def check_fields(config) -> None:
    """Raise InputError for a config's unknown words, negative floats, and sizes out of bounds.

    A size may be 0 if that is its default: the model then has no such part.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int:
            check_size(field.name, value, min(field.default, 1))
        elif field.type is float and value < 0:
            raise InputError(f"model.{field.name}={value!r} must be at least 0")
        elif get_origin(field.type) is Literal and value not in get_args(field.type):
            known = ", ".join(get_args(field.type))
            raise InputError(f"model.{field.name}={value!r} is not one of {known}")


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise InputError for a size `name` of a model that is below `least` or absurdly large."""
    if value < least:
        raise InputError(f"model.{name}={value} must be at least {least}")
    if value > LIMITS.get(name, DEFAULT_LIMIT):
        raise InputError(
            f"model.{name}={value} must be at most {LIMITS.get(name, DEFAULT_LIMIT):,}"
        )


def routing_width(config: DecoderConfig) -> int:
    """Return how many experts a token has in all layers."""
    layers = sum(config.parts(layer)[1] == "moe" for layer in range(config.num_layers))
    return layers * config.num_experts_per_tok


def check_vocabulary(config: DecoderConfig, other: Any, name: str) -> None:
    """Raise InputError for a second model that knows more or fewer tokens. name: what it is."""
    # a diffusion model knows none
    sizes = [getattr(each, "vocab_size", 0) for each in (other, config)]
    if sizes[0] != sizes[1]:
        told = f"the {name} knows {sizes[0]:,} tokens, and the model {sizes[1]:,}"
        raise InputError(f"{told} (use a {name} of the same tokenizer)")
