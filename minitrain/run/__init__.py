"""A training run from start to end, in rooms of one trade.

    config/      read, check and explain settings
    launch/      start, watch and end processes
    checkpoint/  continue exactly
    monitor/     a run's numbers: metrics, progress, health, FLOPs, hardware, curves
    tasks/       what a run does, step by step

A room imports those above it. To follow a run, begin with tasks/train_model.py. A training step is
not here but in training/loop.py, and one of GRPO in grpo/; what a user types is in commands/.
"""
