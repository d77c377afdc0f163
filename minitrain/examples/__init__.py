"""Toy worlds to try things on."""
