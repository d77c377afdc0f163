"""Toy worlds to try things on: arithmetic, shapes."""
