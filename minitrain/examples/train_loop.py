"""Train a small model to write Python, byte by byte: all of training on one screen.

python -m minitrain.examples.train_loop                              # about 20 s on a CPU
torchrun --nproc_per_node 4 -m minitrain.examples.train_loop tp=2    # the same losses
%run -m minitrain.examples.train_loop steps=9    # in a notebook, which then has `model`
"""

import os
import sys

import torch
import torch.distributed as dist

from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.data.text.text_rows import open_data
from minitrain.formats.hf import save_tensors
from minitrain.models.zoo import empty_model, model_config
from minitrain.parallel import compiling, context, expert, fsdp, mesh, recompute, shards
from minitrain.parallel.collectives import sum_over_
from minitrain.parallel.tensor_decoder import tensor_parallel
from minitrain.settings import Data, Optim
from minitrain.training.build import initialize
from minitrain.training.loss import IGNORE, linear_cross_entropy
from minitrain.training.optim import clip_gradients, learning_rate, make_optimizer, update_weights
from minitrain.training.packing import rows

words = dict(word.split("=") for word in sys.argv[1:])
assert words.keys() <= {"model", "cp", "tp", "ep", "recompute", "compile", "steps", "out"}, words
cp, tp, ep = (int(words.get(name, 1)) for name in ("cp", "tp", "ep"))
batch, micro, seq_len, steps = 16, 4, 256, int(words.get("steps", 40))
if "RANK" not in os.environ:  # started without torchrun: a world of one process
    os.environ |= dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
dist.is_initialized() or dist.init_process_group()  # NCCL or gloo; a notebook may run this twice
meshes = mesh.build_meshes("cuda" if torch.cuda.is_available() else "cpu", cp=cp, tp=tp, ep=ep)

# any technique may be left out; pipelines are in parallel/parallelize.py
config = model_config(words.get("model", "llama3-8b-tiny"), vocab_size=258)  # bytes, begin, end
model = empty_model(config)  # on the meta device: no rank ever holds all of it
if ep > 1:
    expert.expert_parallel(model, meshes.experts["ep"])
if tp > 1:
    tensor_parallel(model, meshes.tp)
if cp > 1:
    context.context_parallel(model, meshes.cp, "allgather")
recompute.recompute(model.blocks, words.get("recompute", "none"))
if "compile" in words:  # outside recomputation, which the compiler must see; inside FSDP's hooks
    compiling.compile_blocks(model.blocks, dynamic=False, communicates=max(cp, tp, ep) > 1)
if dist.get_world_size() > 1:  # FSDP also sums the gradients that tp leaves as Partial
    fsdp.shard(model, model.blocks, meshes.parameters, for_experts=meshes.experts)
model.to_empty(device=meshes.device)
initialize(model, seed=0)  # values depend on the seed and a parameter's name, not on the layout

data, _ = open_data(Data(kind="text", path="{stdlib}/*.py"), seq_len, config.vocab_size, seed=0)
optimizer = make_optimizer(model, optim := Optim(lr=3e-3, schedule="cosine", warmup=5))
rank, ranks = meshes.batch.get_local_rank(), meshes.batch.size()  # cp and tp ranks share rows
assert batch % (ranks * micro) == 0, f"{ranks} ranks take {micro} rows at a time, of {batch}"
for step in range(steps):
    own = range(batch * step + rank, batch * (step + 1), ranks)
    batches = (rows(data, own[i : i + micro]) for i in range(0, len(own), micro))
    batches = (context.local_tokens(each, meshes.cp, "allgather") for each in batches)
    batches = [{key: x.to(meshes.device) for key, x in each.items()} for each in batches]
    count = sum_over_(meshes.loss, sum((each["labels"] != IGNORE).sum() for each in batches))
    loss = torch.zeros((), device=meshes.device)  # one mean over the tokens of all ranks
    for each in batches:
        part = model(each.pop("tokens"), **each, head=linear_cross_entropy) / count
        part.backward()
        loss += part.detach()
    sum_over_(meshes.loss, loss)
    norm = clip_gradients(list(model.parameters()), optim.clip)  # one norm over all meshes
    for group in optimizer.param_groups:
        group["lr"] = lr = learning_rate(step, steps, optim)
    update_weights(optimizer, loss.isfinite() & norm.isfinite())
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss:.6f}, norm {norm:.6f}, learning rate {lr:.6f}")

tensors = list(shards.full_tensors(model, lambda name: True))  # all gather, rank 0 keeps
if dist.get_rank() == 0:
    save_tensors(tensors, config, torch.float32, folder := words.get("out", "out/train-loop"))
    ByteTokenizer().save(folder)  # transformers loads both
