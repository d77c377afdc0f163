"""What turns a model and data into a trained model: data, loss, optimizer, loop, checkpoints, metrics."""
