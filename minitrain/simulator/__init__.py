"""Predict a step's time and memory without GPUs: fake world, trace, timeline."""
