"""All of training on one screen (train_loop.py), and toy worlds: sums as dialogues, digits to
reverse, shapes that move.
"""
