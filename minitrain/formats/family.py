"""What there is to say of a family of language models on the hub: its config.json and its tensors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minitrain.models.decoder_config import DecoderConfig

CLASSIFIER = "ForSequenceClassification"
# key of the number of layers of multi-token prediction
DEPTHS = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Stacks:
    """How files stack the matrices of all experts."""

    # [experts, in, out], else as ours [experts, out, in]
    transposed: bool = False
    # gate's rows and up's take turns as in ours, else all of gate's come first
    alternating: bool = False


@dataclass(frozen=True)
class Family:
    """The config.json and the stored tensors of an architecture.

    Fields hold tables where possible, and functions otherwise; longer functions are in a file of the
    family's own.
    """

    # --- config.json

    # the name in `architectures`
    architecture: str
    # key -> the only value that `Decoder` supports; the key may be missing
    values: dict = field(default_factory=dict)
    # further fields of `DecoderConfig` -> keys; values are converted to the field's type
    fields: dict = field(default_factory=dict)
    # key of most families -> this family's key
    keys: dict = field(default_factory=dict)
    # alternative key -> the key that is read
    aliases: dict = field(default_factory=dict)
    # fields of `DecoderConfig` that this family fixes to other values than their defaults
    fixed: dict = field(default_factory=dict)
    # the supported quant_method; None: no quantized weights
    quantized: str | None = None
    # the default of rope_theta
    rope_theta: float = 10000.0
    # the default of rope_scaling
    rope: dict = field(default_factory=dict)
    # the default of window_rope_theta, or 0 for rope_theta; None: there is no such setting
    window_rope: float | None = None
    # the default of norm_topk_prob; None: no such key, and it is always true
    norm_topk: bool | None = None
    # False: the head is stored separately, whatever tie_word_embeddings says
    can_tie: bool = True
    # False: transformers has no model with a score as its head
    can_classify: bool = True
    # True: num_attention_heads must divide hidden_size, even where head_dim is given
    heads_divide: bool = False
    # the default of partial_rotary_factor; None: only 1 is supported
    partial_rotary: float | None = None
    # keys that affect only training in transformers
    noise: tuple = ("attention_dropout",)
    # True: transformers' loss can include a load-balancing term (output_router_logits)
    balances: bool = False
    # defaults(raw): return config.json with missing keys added and other spellings replaced
    defaults: Callable[[dict], dict] = lambda raw: raw
    # read(raw): return fields that do not follow from one key each. Raises InputError.
    read: Callable[[dict], dict] = lambda raw: {}
    # write(config, settings): return config.json. settings: its other keys, as most families call them
    write: Callable[[DecoderConfig, dict], dict] = lambda config, settings: settings
    # needed(config): return the fields that must not be 0
    needed: Callable[[DecoderConfig], tuple] = lambda config: (
        "num_experts",
        "sliding_window",
        "kv_lora_rank",
        "no_rope_layer_interval",
    )

    # --- tensors

    # parts of our names -> parts of stored names, all replaced at once; or a function of the name and
    # of the number of layers
    renamed: dict | Callable[[str, int], str] = field(default_factory=dict)
    # full_name(key): return the name that transformers gives a tensor, where other files shorten it
    full_name: Callable[[str], str] = lambda key: key
    # Linears of a module that are stored as one, in the order of their rows
    fused: tuple[str, ...] = ()
    # transposed(name): return whether a parameter is stored as [in, out]
    transposed: Callable[[str], bool] = lambda name: False
    # True: all parameters are stored as they are
    as_ours: bool = False
    # parts of our names that may also appear unchanged in files
    also_ours: tuple = ()
    # names of an expert's matrices: ours -> stored
    expert_matrices: dict = field(default_factory=dict)
    # None: every expert has matrices of its own
    stacks: Stacks | None = None
    # pattern of stored tensors to skip
    ignored: str = ""
    # depth_of(key, layers): return the depth of multi-token prediction, 0, 1, ..., that a stored
    # tensor belongs to; None if to none. Without this function, the family has no such layers
    depth_of: Callable[[str, int], int | None] | None = None
    # names of copies that files have in each layer of multi-token prediction: ours -> stored, with {}
    # for the layer's number
    copied: dict = field(default_factory=dict)

    @property
    def classifier(self) -> str:
        """Return the name in `architectures` of a model with a score as its head.

        If transformers has none, it is the name of the language model.
        """
        if not self.can_classify:
            return self.architecture
        return re.sub("(ForCausalLM|LMHeadModel)$", CLASSIFIER, self.architecture)

    def field(self, name: str) -> Any:
        """Return the value to which the family fixes a field of `DecoderConfig`, or the default."""
        return self.fixed.get(name, getattr(DecoderConfig, name))

    def key(self, name: str) -> str:
        """Return this family's key for the one that most families call `name`."""
        return self.keys.get(name, name)

    def fused_part(self, name: str) -> tuple[int, int]:
        """Return which part of a stored tensor our parameter is, and of how many: (0, 1) if of one."""
        # ...self_attn.q_proj.weight -> q_proj
        module = name.split(".")[-2:][0]
        return (self.fused.index(module), len(self.fused)) if module in self.fused else (0, 1)

    def stored_name(self, name: str, layers: int) -> str:
        """Return the stored name of our parameter. For experts see layouts_hf.py.

        layers: of the model, without those of multi-token prediction.
        """
        if callable(self.renamed):
            return self.renamed(name, layers)
        parts = "|".join(re.escape(part) for part in sorted(self.renamed, key=len, reverse=True))
        return re.sub(parts, lambda found: self.renamed[found[0]], name) if parts else name


def depth_by_number(key: str, layers: int) -> int | None:
    """Return the depth of a stored tensor, of which layers have the numbers behind the model's own.

    key, layers: see `Family.depth_of`.
    """
    found = re.match(r"model\.layers\.(\d{1,9})\.", key)
    depth = int(found[1]) - layers if found else -1
    return depth if depth >= 0 else None


# for models without an entry in FAMILIES, such as Wan
PLAIN = Family("")
