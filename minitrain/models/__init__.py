"""Plain networks in PyTorch, with the parameter names of the hub's checkpoints.

Here: shapes as data (decoder_config, wan_config) and the published ones (shapes, zoo); the language
model (decoder, with attention, mla, moe, router, mamba, delta, mtp, layers) and the diffusion
transformer (wan, video); kernels (flex, merged_attention, grouped_mm, quantize);
variants of modules (variants; lora, frozen; fp8, fp8_forms); cpu.py, the only file that knows a
CPU's library.
Not here: processes, meshes, losses, files. Models name the points where those take hold: see the
head of variants.py, the three ways of changing a model.

To read: layers, variants, attention, decoder; then what the model at hand has, moe with router, mla,
mamba or delta; lora, frozen and fp8 last.
"""
