"""All of training on one screen (train_loop.py), and toy worlds to try things on."""
