"""The decoder-only language model: one class for every family, shaped by its `DecoderConfig`.

A family differs from another in data, not in code: biases, norms, rotary scaling and activations
are fields of the config, and `zoo.py` holds their values for each published model. Parameter names
are those of the Hugging Face checkpoints. What is not here: losses (training/loss.py), sharding
(parallel/), reading weights (formats/hf.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.attention import GroupedQueryAttention, Mask, make_mask
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import MLPS, NORMS, rotary_frequencies, rotary_magnitude, rotary_tables
from minitrain.models.mamba import Mamba2
from minitrain.models.mamba import initialize_parameter as initialize_mamba
from minitrain.models.mla import LatentAttention
from minitrain.models.moe import MoE

RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "fc2_latent_proj.weight",
)


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm(x)), then x + mlp(norm(x)); some layers have only one
    of the two.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        hidden = config.hidden_size
        norm = NORMS[config.norm]
        mixer, mlp = config.parts(layer)
        self.self_attn = self.mamba = self.mlp = None
        if mixer:
            self.input_layernorm = norm(hidden, eps=config.norm_eps)
        if mixer == "attention":
            self.self_attn = (LatentAttention if config.kv_lora_rank else GroupedQueryAttention)(
                config
            )
            self.windowed = config.windowed(layer)
        if mixer == "mamba":
            self.mamba = Mamba2(hidden, config.mamba, config.norm_eps)
        if mlp:
            self.post_attention_layernorm = norm(hidden, eps=config.norm_eps)
            self.mlp = (
                MoE(config) if mlp == "moe" else MLPS[config.mlp](hidden, config.intermediate_size)
            )

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Mask | None,
        documents: Tensor | None = None,
        window_mask: Mask | None = None,
        cache=None,
    ) -> Tensor:
        """x: [batch, seq, hidden]. documents: int [batch, seq], for Mamba-2, which no mask
        constrains, and for routers, which do not count padding. cache: the sampler's; while a
        prompt only fills it, `output_unused` is true in the last layer, whose output nothing
        reads."""
        if self.self_attn is not None:
            x = x + self.self_attn(
                self.input_layernorm(x), rotary, window_mask if self.windowed else mask, cache
            )
        if self.mamba is not None:
            x = x + self.mamba(self.input_layernorm(x), documents, cache)
        if self.mlp is not None and not (cache is not None and cache.output_unused):
            normed = self.post_attention_layernorm(x)
            x = x + (self.mlp(normed, documents) if isinstance(self.mlp, MoE) else self.mlp(normed))
        return x


class Decoder(nn.Module):
    """Token ids in, logits out; or, with a `head`, whatever that makes of the last hidden states.

    A pipeline stage holds only some `layers`; the `first` stage has the embedding, the `last` the
    final norm and the head, and the others take and return hidden states. With tied embeddings,
    first and last each have the matrix.
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
        # over so many ranks tensor parallelism splits a row's hidden states between layers
        self.sequence_split = 1
        # context parallelism replaces it by one that knows where this rank's tokens are
        self.make_mask = make_mask
        hidden = config.hidden_size
        vocab = config.vocab_size
        tied = config.tie_word_embeddings
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
        cache=None,
    ) -> Tensor:
        """Logits [batch, seq, vocab] of tokens, int [batch, seq]; or head(hidden [batch, seq,
        hidden], weight, labels).

        x: the tokens; in a pipeline, all stages but the first get hidden states, and all but the
        last return them.
        positions: int [batch, seq], for rotary or learned embeddings; 0, 1, 2, ... if not given.
        documents: int [batch, seq]; tokens see only those with the same number (packed sequences).
        Below 0: padding.
        head: called inside the forward pass, where a sharded head weight [vocab, hidden] is whole.
        cache: what each layer keeps of earlier tokens, by its number (rollout/caches.py). The
        tokens are then one row of pieces of sequences, and the cache knows which are whose; they
        need positions, and no documents.
        """
        if positions is None:
            positions = torch.arange(
                x.shape[1] * (1 if self.first else self.sequence_split), device=x.device
            )[None]
        if self.first:
            x = self.model.embed_tokens(x)
            if self.config.position_embedding == "learned":
                x = x + self.model.embed_positions(positions)
        mask, window_mask = (
            self._masks(positions.shape[1], x.device, documents) if cache is None else (None, None)
        )
        rotary = self._rotary(positions, cache)
        for number, layer in self.model.layers.items():
            x = layer(x, rotary, mask, documents, window_mask, cache and cache[int(number)])
        if not self.last:
            return x
        x = self.model.norm(x)
        weight = self.head_weight
        return F.linear(x, weight) if head is None else head(x, weight, labels)

    def _masks(
        self, length: int, device: torch.device, documents: Tensor | None
    ) -> tuple[Mask, Mask | None]:
        """What layers may see, and what windowed ones may, if there are any."""
        window = self.config.sliding_window
        mask = self.make_mask(length, device, documents, plain=not self.config.sinks)
        return mask, self.make_mask(length, device, documents, window=window) if window else None

    def _rotary(self, positions: Tensor, cache=None) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.position_embedding != "rotary":
            return None
        shape = config.rotary_dim, config.rope_theta, config.rope_scaling, positions.device
        frequencies = (rotary_frequencies if cache is None else cache.frequencies)(*shape)
        return rotary_tables(positions, frequencies, rotary_magnitude(config.rope_scaling))

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
        """Fill `tensor`, the whole parameter called `name`: matrices at random, norms with 1, all
        else with 0.
        """
        if ".mamba." in name and initialize_mamba(name.rpartition(".mamba.")[2], tensor, generator):
            return
        if tensor.ndim > 1 and not name.endswith("bias"):
            tensor.normal_(0, self._initial_std(name), generator=generator)
        elif name.endswith("norm.weight") and self.config.norm != "layernorm1p":
            tensor.fill_(1)
        else:
            tensor.zero_()

    def _initial_std(self, name: str) -> float:
        """GPT-2's rule, where the config asks for it, keeps the residual stream's size from growing
        with depth.
        """
        config = self.config
        outputs = (
            RESIDUAL_OUTPUTS if config.moe_latent_size else (*RESIDUAL_OUTPUTS, "experts.down_proj")
        )
        if not config.scaled_residual_init or not name.endswith(outputs):
            return config.initializer_range
        writers = sum(
            part is not None for layer in range(config.num_layers) for part in config.parts(layer)
        )
        return config.initializer_range * writers**-0.5
