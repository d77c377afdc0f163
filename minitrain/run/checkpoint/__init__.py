"""Store a run's state, and continue the run exactly from it.

    checkpointer       save, load, resume (read this first)
    checkpoint_state   the tensors that are stored, and whether they fit a model
    checkpoint_files   the files of a checkpoint, and whether they are undamaged
    fingerprint        notice data, code and settings that have changed since the run began
    durable            write files that survive a power cut

Not here: models in Hugging Face layout, which tasks/exports.py writes through formats/.
"""
