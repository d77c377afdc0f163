"""Toy worlds to try things on: sums as dialogues, digits to reverse, shapes that move."""
