"""Ways to split a model over ranks: one technique per file, to take home with what it imports.

Here: ranks as meshes (mesh); data (fsdp, with fsdp_fp8), tensor (tensor, for our models
tensor_decoder and tensor_wan), context, expert and pipeline parallelism (pipeline, with
pipeline_split, _stage and _moves); recompute, activation_offload and compiling of blocks; what they
share (parts, shards, collectives, agreement). parallelize applies them in their order.
That is at most three files from outside this folder: errors, models/variants, models/quantize; but
fsdp_fp8 needs our FP8 Linears, too.
Not here: losses, optimizers, settings; techniques take the values they need, and find a model's
exchange points by name. What is for our models alone takes a Config: parallelize, and
pipeline_split.local_stages, of it the layout.

To read: mesh, fsdp, parts, tensor; then any other. A head says what moves, what it costs and what
a model must have; tests/distributed/test_own_model.py and test_own_parts.py use them for other
models.
"""
