"""Run a training from its config to the exported model.

    train_model     the whole run (read this first)
    task            the loop over all steps, and the protocol `Task`
    rows_task       the task that trains on rows of a dataset; grpo_task: the task of GRPO
    initial_weights build the models with the weights that the config names
    exports         write the model, or its adapters, at the end
    exact_match, draw_videos   validate by generating; rollout_files: GRPO's responses on disk

Not here: a training step (training/loop.py), a GRPO step (grpo/policy_loop.py).
"""
