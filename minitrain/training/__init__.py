"""A training step, from rows of a dataset to new weights, for all objectives and layouts.

Here: rows packed to batches (packing); what is learned (objectives: next tokens, flow with
sigmas, dpo), by the head's loss in chunks (loss, log_probs); the model on its rank (build), which
must fit (footprint); optimizers (optim: adamw, muon) and averages (ema); loop, which joins them.
Not here: where rows come from (data), checkpoints and what surrounds a step (run), reinforcement
learning (grpo), which takes this step with an objective of its own.

To read: loop from `Trainer.step` down, objectives, loss; then build and optim.
"""
