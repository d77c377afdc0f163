"""All of training on one screen (train_loop.py); toy worlds: sums as dialogues (arithmetic), digits
to reverse (reversal), shapes that move (shapes); environments for GRPO (calculator, guessing); a
logger (wandb_log).
"""
