"""Files in and out: Hugging Face, PEFT, diffusers and original Wan, GPT-2, safetensors."""
