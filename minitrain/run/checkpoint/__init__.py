"""Continue a run exactly, from what it has stored.

Read checkpointer.py first: save, load, resume. checkpoint_state.py says what is stored and whether
it fits, checkpoint_files.py how it lies on disk and whether it is whole. fingerprint.py notices data,
code and settings that have changed in between; durable.py writes what survives a power cut. Not
here: models in Hugging Face layout, which formats/ writes and tasks/exports.py asks for.
"""
