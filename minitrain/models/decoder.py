"""The decoder-only language model: one class for every family, shaped by its `DecoderConfig`.

Families differ in data, not in code: biases, norms, rotary scaling and activations are fields of
the config, and `shapes/` holds their values for each model. Parameter names are those of the
Hugging Face checkpoints. Elsewhere: losses (training/loss.py), sharding (parallel/), reading
weights (formats/hf.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError
from minitrain.models.attention import GroupedQueryAttention, KeptMasks, Mask
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.delta import GatedDeltaNet
from minitrain.models.delta import initialize_parameter as initialize_delta
from minitrain.models.layers import (
    MLPS,
    NORMS,
    attention_factor,
    identity,
    rotary_frequencies,
    rotary_tables,
)
from minitrain.models.mamba import Mamba2
from minitrain.models.mamba import initialize_parameter as initialize_mamba
from minitrain.models.mla import LatentAttention
from minitrain.models.moe import MoE
from minitrain.models.mtp import MTPMixin

# the matrices that write into the residual stream
RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "fc2_latent_proj.weight",
)
# norms that add 1 to their weight -> those of such a model that do not
AROUND_0 = {
    "layernorm1p": ("q_norm.weight", "k_norm.weight", "_a_layernorm.weight"),
    "rmsnorm1p": ("_a_layernorm.weight",),
}
# initial values of mixers with rules of their own
RULES = {".mamba.": initialize_mamba, ".linear_attn.": initialize_delta}


class Block(nn.Module):
    """A residual block: x + mixer(norm(x)), then x + mlp(norm(x)), or only one of them.

    Norms stand before mixer and MLP, after them (OLMo 3), or both (Gemma 3): see `norm_position`.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        hidden = config.hidden_size
        mixer, mlp = config.parts(layer)
        # whether its attention has a window, and rotary embeddings
        self.windowed = config.windowed(layer)
        self.rotates = config.rotates(layer)
        self.residual_multiplier = config.residual_multiplier

        def norm(position: str) -> nn.Module:
            if config.norm_position not in (position, "both"):
                return nn.Identity()
            return NORMS[config.norm](hidden, eps=config.norm_eps)

        self.self_attn = self.mamba = self.linear_attn = self.mlp = None
        if mixer:
            self.input_layernorm = norm("before")
            self.mixer_output_norm = norm("after")
        if mixer == "attention":
            attention = LatentAttention if config.kv_lora_rank else GroupedQueryAttention
            self.self_attn = attention(config)
        if mixer == "mamba":
            self.mamba = Mamba2(hidden, config.mamba, config.norm_eps)
        if mixer == "delta":
            self.linear_attn = GatedDeltaNet(hidden, config.delta, config.norm_eps)
        if mlp:
            # before the MLP: the name is that of Llama's files
            self.post_attention_layernorm = norm("before")
            self.mlp_output_norm = norm("after")
        if mlp == "moe":
            self.mlp = MoE(config)
        elif mlp:
            self.mlp = MLPS[config.mlp](hidden, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Mask | None,
        document_ids: Tensor | None = None,
        cache=None,
    ) -> Tensor:
        """Return [batch, seq, hidden], as x.

        rotary, mask: those of this layer; rotary is from `rotary_tables`.
        document_ids: int [batch, seq], for recurrent mixers, which have no mask, and for routers,
            which do not count padding.
        cache: this layer's. During prefill the last layer skips its MLP (`output_unused`): nothing
            reads its output.
        """
        if self.self_attn is not None:
            mixed = self.self_attn(self.input_layernorm(x), rotary, mask, cache)
            x = self.add(x, self.mixer_output_norm(mixed))
        recurrent = self.mamba if self.linear_attn is None else self.linear_attn
        if recurrent is not None:
            mixed = recurrent(self.input_layernorm(x), document_ids, cache)
            x = self.add(x, self.mixer_output_norm(mixed))
        if self.mlp is None or (cache is not None and cache.output_unused):
            return x
        normed = self.post_attention_layernorm(x)
        inputs = (document_ids, cache) if isinstance(self.mlp, MoE) else ()
        return self.add(x, self.mlp_output_norm(self.mlp(normed, *inputs)))

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the residual stream with the output of a mixer or MLP, [batch, seq, hidden] each."""
        return torch.add(x, output, alpha=self.residual_multiplier)


class MTPBlock(MTPMixin, Block):
    """A depth of multi-token prediction."""


class Decoder(nn.Module):
    """A language model, or one pipeline stage of it.

    A stage holds the blocks `layers`. The `first` has the embedding, the `last` the final norm, the
    head and the layers of multi-token prediction. Between stages travel hidden states. With tied
    embeddings, or multi-token prediction, first and last stage each have the matrix.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
    ):
        super().__init__()
        self.config = config
        self.first = first
        self.last = last
        # exchange points: context parallelism knows which tokens this rank has; tensor-parallel
        # ranks gather theirs for the head, and split what `predict_mtp` gets
        self.make_mask = KeptMasks()
        self.gather = self.split = identity
        self.rotary_dim = config.rotary_dim
        hidden = config.hidden_size
        vocab = config.vocab_size
        tied = config.tie_word_embeddings
        layers = range(config.num_layers) if layers is None else layers
        # names are those of checkpoints: model.layers.0.self_attn.q_proj.weight
        self.model = nn.ModuleDict()
        if first or (last and (tied or config.num_nextn_predict_layers)):
            self.model["embed_tokens"] = nn.Embedding(vocab, hidden)
        if first and config.position_embedding == "learned":
            self.model["embed_positions"] = nn.Embedding(config.max_position_embeddings, hidden)
        # a dict, not a list: a stage's first layer keeps its number
        self.model["layers"] = nn.ModuleDict({str(i): Block(config, i) for i in layers})
        for i in config.all_layers[config.num_layers :] if last else ():
            self.model.layers[str(i)] = MTPBlock(config, i)
        if last:
            self.model["norm"] = NORMS[config.norm](hidden, eps=config.norm_eps)
        labels = config.num_labels
        has_head = last and not (tied or labels)
        self.lm_head = nn.Linear(hidden, vocab, bias=False) if has_head else None
        self.score = nn.Linear(hidden, labels, bias=False) if last and labels else None

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        head: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
        cache=None,
        next_tokens: Tensor | None = None,
        mtp: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return logits [batch, seq, vocab], or head(hidden [batch, seq, hidden], weight, labels).

        x: token ids, int [batch, seq]. In a pipeline, all stages but the first take hidden states
            [batch, seq, hidden], and all but the last return them.
        positions: int [batch or 1, seq], for rotary or learned embeddings; None: 0, 1, 2, ... Later
            stages need them if tensor parallelism splits hidden states.
        document_ids: int [batch, seq]; tokens see only those with the same number (packed
            sequences). Below 0: padding.
        labels: int [batch, seq], only passed on to `head`. Raises InputError where there is none.
        head: called in the forward pass, when FSDP has gathered the head's weight [vocab, hidden].
        cache: the KV cache of each layer, by its number (rollout/caches.py). Then x is one sequence
            [1, tokens] of parts of several, which the cache tells apart, with positions and without
            document ids.
        mtp: called for each depth of multi-token prediction with its number, hidden states and
            the head's weight; the result is added. next_tokens: int [batch, seq, depths], for it.
        """
        if labels is not None and head is None:
            raise InputError(
                "labels are for a head: model(tokens, labels=..., head=linear_cross_entropy) is the sum "
                "of -log p (training/loss.py), where label t is the token after token t"
            )
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        if self.first:
            # [batch, seq, hidden]
            x = self.embed(x)
            if self.config.position_embedding == "learned":
                x = x + self.model.embed_positions(positions)
        run = self._runner(positions, document_ids, cache)
        for number in self.model.layers:
            if int(number) < self.config.num_layers:
                x = run(number, x)
        if not self.last:
            return x
        x = self.scale_logits(self.model.norm(x))
        # [batch, seq, hidden]; tensor parallelism gathers seq
        hidden = self.gather(x)
        weight = self.head_weight
        result = F.linear(hidden, weight) if head is None else head(hidden, weight, labels)
        for depth in range(self.config.num_nextn_predict_layers) if mtp is not None else ():
            embedded = self.embed(next_tokens[..., depth])
            x = self.scale_logits(run(str(self.config.num_layers + depth), x, embedded))
            result = result + mtp(depth, self.gather(x), weight)
        return result

    def predict_mtp(
        self,
        hidden: Tensor,
        tokens: Tensor,
        depth: int = 0,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache=None,
    ) -> Tensor:
        """Return the hidden states of a depth of multi-token prediction, [batch, seq, hidden].

        The head's weight makes logits of them, as of those that `forward` gives to `head`: they are
        normalized.
        hidden: [batch, seq, hidden], those of the depth before, or for depth 0 what `head` gets.
        tokens: int [batch, seq], for each the token that is depth + 1 after it.
        positions, document_ids, cache: those of the tokens that `hidden` is of, see `forward`.
        """
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        run = self._runner(positions, document_ids, cache)
        number = str(self.config.num_layers + depth)
        x = run(number, self.split(hidden), self.embed(tokens))
        return self.gather(self.scale_logits(x))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return tokens' embeddings, [batch, seq, hidden]. tokens: int [batch, seq]."""
        x = self.model.embed_tokens(tokens)
        multiplier = self.config.embedding_multiplier
        # rounded to the type of embeddings first, as Gemma was trained
        return x if multiplier == 1 else x * x.new_full((), multiplier)

    def scale_logits(self, hidden: Tensor) -> Tensor:
        """Return what the head gets, [batch, seq, hidden]: dividing it divides logits, which are wider."""
        scaling = self.config.logits_scaling
        return hidden if scaling == 1 else hidden / scaling

    def _runner(
        self, positions: Tensor, document_ids: Tensor | None, cache
    ) -> Callable[..., Tensor]:
        """Return a function that runs a layer, by its number, on hidden states [batch, seq, hidden].

        positions: int [batch or 1, seq]; document_ids: int [batch, seq].
        """
        # of full attention, and of sliding windows; a cache has its own
        masks = None, None
        if cache is None:
            masks = self._masks(positions.shape[1], positions.device, document_ids)
        # of both, too
        rotary = self._rotary(positions, cache)
        rotaries = rotary, rotary
        if self.config.window_rope_theta:
            rotaries = rotary, self._rotary(positions, cache, windowed=True)

        def run(number: str, *inputs: Tensor) -> Tensor:
            """Return [batch, seq, hidden], as inputs: a layer's, and for one of MTP embeddings."""
            layer = self.model.layers[number]
            layer_cache = None if cache is None else cache[int(number)]
            rotary = rotaries[layer.windowed] if layer.rotates else None
            return layer(*inputs, rotary, masks[layer.windowed], document_ids, layer_cache)

        return run

    def _masks(
        self, length: int, device: torch.device, document_ids: Tensor | None
    ) -> tuple[Mask, Mask | None]:
        """Return the mask of full attention, and that of sliding windows if layers have one.

        document_ids: int [batch, length].
        """
        window = self.config.sliding_window
        # kernels with sinks need an attn_mask (`plain=False`), as windows do anyway
        full = self.make_mask(length, device, document_ids, plain=not self.config.sinks)
        if not window:
            return full, None
        return full, self.make_mask(length, device, document_ids, window=window)

    def _rotary(
        self, positions: Tensor, cache=None, windowed: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Return `rotary_tables` of positions [batch or 1, seq], None without rotary embeddings.

        windowed: those of layers with a window that have a base of their own.
        """
        config = self.config
        if config.position_embedding != "rotary":
            return None
        # a cache computes frequencies once
        compute = rotary_frequencies if cache is None else cache.frequencies
        theta, scaling = config.rope_theta, config.rope_scaling
        if windowed:
            theta, scaling = config.window_rope_theta, None
        frequencies = compute(self.rotary_dim, theta, scaling, positions.device)
        return rotary_tables(positions, frequencies, attention_factor(scaling))

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the layers in order: the units of recomputation, compilation and sharding."""
        return list(self.model.layers.values())

    @property
    def mtp_layers(self) -> list[nn.Module]:
        """Return the layers of multi-token prediction among `blocks`, by depth."""
        layers = self.model.layers.items()
        return [layer for number, layer in layers if int(number) >= self.config.num_layers]

    @property
    def head_weight(self) -> Tensor:
        """Return the output head [vocab, hidden], which is the embedding where they are tied.

        A classifier's is [labels, hidden], and labels stand for the vocabulary in `forward` too.
        """
        if self.score:
            return self.score.weight
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a full parameter [...] by its name: matrices at random, norms with 1, the rest 0."""
        for mixer, rule in RULES.items():
            if mixer in name and rule(name.rpartition(mixer)[2], tensor, generator):
                return
        if tensor.ndim > 1 and not name.endswith("bias"):
            tensor.normal_(0, self._initial_std(name), generator=generator)
        elif name.endswith("norm.weight"):
            others = AROUND_0.get(self.config.norm)
            tensor.fill_(1 if others is None or name.endswith(others) else 0)
        else:
            tensor.zero_()

    def _initial_std(self, name: str) -> float:
        """Return the standard deviation of a matrix's initial values.

        With scaled_residual_init, GPT-2's rule keeps the residual stream from growing with depth.
        """
        config = self.config
        outputs = RESIDUAL_OUTPUTS
        if not config.moe_latent_size:
            outputs = (*RESIDUAL_OUTPUTS, "experts.down_proj")
        if not config.scaled_residual_init or not name.endswith(outputs):
            return config.initializer_range
        # layers have two parts that write, mixer and MLP, or one
        parts = [config.parts(layer) for layer in range(config.num_layers)]
        writers = 2 * len(parts) - sum(layer.count(None) for layer in parts)
        return config.initializer_range * writers**-0.5
