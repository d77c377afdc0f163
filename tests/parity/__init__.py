"""Against transformers: the same logits, the same gradients, the same files."""
