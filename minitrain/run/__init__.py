"""Run from start to end: config, process group, checkpoints, metrics, health, commands."""
