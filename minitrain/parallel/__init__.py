"""Parallelism from torch.distributed alone: one technique per file, none importing another."""
