"""Train a model: objectives and losses, optimizer, a training step."""
