"""Ways to split a model over ranks: one technique per file, which can be taken home alone.

Here: ranks as meshes (mesh); data (fsdp, with fsdp_fp8), tensor (tensor, for our models
tensor_decoder and tensor_wan), context, expert and pipeline parallelism (pipeline, with
pipeline_split, _stage and _moves); recompute and compiling of blocks; what they share (parts,
shards, collectives, agreement). parallelize applies them in their order.
Not here: losses, optimizers, settings; techniques take the values they need, and find a model's
exchange points by name.

To read: mesh, fsdp, parts, tensor; then any other. A head says what moves, what it costs and what
a model must have; tests/distributed/test_own_model.py and test_own_parts.py use them for other
models.
"""
