"""Videos as latents."""
