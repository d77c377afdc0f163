"""Do what a run is for, step by step.

Read train_model.py first, a run from its config to what it exports; then task.py, the loop around
all steps, and what a task is; rows_task.py and grpo_task.py are the two. The rest is called by them:
exports.py at the end, exact_match.py and draw_videos.py to validate, rollout_files.py for GRPO's
responses. Not here: the step itself, which is training/loop.py, and GRPO's in grpo/.
"""
