"""Make tiny Wan models, ours and diffusers', with the same weights."""

import torch
from diffusers import WanTransformer3DModel

from minitrain.formats.wan_names import rename_to_ours
from minitrain.models.wan import Wan, WanConfig

TINY = dict(
    num_attention_heads=2,
    attention_head_dim=16,
    ffn_dim=48,
    num_layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    freq_dim=32,
    eps=1e-3,
    patch_size=(1, 2, 2),
)

CONFIGS = {
    "t2v": WanConfig(**TINY),
    "i2v": WanConfig(**TINY | dict(in_channels=9, image_dim=20, patch_size=(1, 2, 1))),
}


def diffusers_twin(config: WanConfig, seed: int = 0) -> WanTransformer3DModel:
    """Return diffusers' model with random parameters, including norms and biases, so that swapped ones are noticed."""
    image = (
        dict(image_dim=config.image_dim, added_kv_proj_dim=config.dim) if config.image_dim else {}
    )
    fields = {key: getattr(config, key) for key in TINY}
    generator = torch.manual_seed(seed)
    model = WanTransformer3DModel(**fields, **image)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.ndim > 1 else parameter + noise * 0.3)
    return model


def pair(kind: str) -> tuple[WanTransformer3DModel, Wan]:
    """Return diffusers' model and ours, with the same weights."""
    theirs = diffusers_twin(CONFIGS[kind])
    ours = Wan(CONFIGS[kind])
    ours.load_state_dict(rename_to_ours(theirs.state_dict(), ours.state_dict()))
    return theirs, ours


def inputs(
    config: WanConfig, batch: int = 2, grid=(3, 6, 10), seed: int = 1
) -> dict[str, torch.Tensor]:
    """Return random inputs. Image-to-video models get 512 text tokens, as diffusers expects, which splits there."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    values = dict(
        latents=draw(batch, config.in_channels, *grid),
        timestep=torch.linspace(998.39, 20.5, batch),
        text=draw(batch, 512 if config.image_dim else 7, config.text_dim),
    )
    return values | (dict(image=draw(batch, 5, config.image_dim)) if config.image_dim else {})


def run_diffusers(model, latents, timestep, text, image=None):
    return model(latents, timestep, text, encoder_hidden_states_image=image, return_dict=False)[0]
