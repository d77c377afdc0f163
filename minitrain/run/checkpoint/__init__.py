"""Store a run's state, and continue the run exactly from it.

    checkpointer        save, load, resume (read this first)
    checkpoint_state    the tensors that are stored, and whether they fit a model
    checkpoint_files    the description of a checkpoint's files, and whether they are undamaged
    checkpoint_index    the files of tensors, and their index
    checkpoint_folders  the folders of a run's checkpoints
    fingerprint         notice data, code and settings that have changed since the run began
    durable             write files that survive a power cut

Not here: models in Hugging Face layout, which tasks/exports.py writes through formats/.
"""
