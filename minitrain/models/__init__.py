"""Model definitions in plain PyTorch: nothing here knows about processes, meshes or training."""
