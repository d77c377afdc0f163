"""The shape of a Wan video transformer as data: what decoder_config.py is to a decoder."""

from dataclasses import dataclass

from minitrain.errors import InputError
from minitrain.models.decoder_config import check_fields, check_size


@dataclass(frozen=True)
class WanConfig:
    """Everything that fixes the network's shape; names follow diffusers' config.json."""

    # beside those of DecoderConfig, and no field
    family = "wan"
    num_labels = 0
    num_attention_heads: int = 12  # heads of queries, keys and values
    attention_head_dim: int = 128  # channels of a head
    ffn_dim: int = 8960  # channels inside an MLP
    num_layers: int = 30  # blocks
    in_channels: int = 16  # of latents, with those of an image-to-video model's condition
    out_channels: int = 16  # of latents
    text_dim: int = 4096  # channels of text embeddings
    freq_dim: int = 256  # of the sinusoids of a timestep
    patch_size: tuple[int, int, int] = (1, 2, 2)  # frames, rows, columns
    eps: float = 1e-6  # of the norms
    image_dim: int | None = None  # of the CLIP features; None: no image cross-attention
    # initial text and time embedders; made for dim 5120: small models need about 0.1
    embedder_std: float = 0.02

    def __post_init__(self):
        """Raise InputError for sizes that no model can have."""
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        check_fields(self)
        check_size("dim", self.dim)
        for field in ("attention_head_dim", "freq_dim"):
            if getattr(self, field) % 2:
                raise InputError(f"model.{field}={getattr(self, field)} must be even")
        if len(self.patch_size) != 3 or not all(1 <= size <= 256 for size in self.patch_size):
            raise InputError(
                f"model.patch_size={list(self.patch_size)} must be three numbers from 1 to 256"
            )
        if self.image_dim is not None:
            check_size("image_dim", self.image_dim)

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim
