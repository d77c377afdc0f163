"""The numbers of a run: metrics, progress, health, FLOPs, hardware, curves."""
