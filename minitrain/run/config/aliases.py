"""Map other trainers' names of settings to ours, for error messages.

The trainers are TRL, torchtune, Axolotl, LLaMA-Factory, Megatron, verl and nanoGPT.
"""

import difflib
from collections.abc import Iterable

# each line: our setting = their names
TABLE = """
model = model_name_or_path pretrained_model_name_or_path base_model model_name model_path pretrained_model load
steps = max_steps train_steps num_steps training_steps max_iters total_steps total_training_steps iterations
epochs = num_epochs num_train_epochs epoch max_epochs total_epochs n_epochs
seed = seed random_seed rng_seed data_seed manual_seed
out_dir = run_name experiment_name \
output_dir out output save_dir output_path default_local_dir project_dir ckpt_dir checkpoint_dir log_dir
device=cpu = use_cpu no_cuda
device = accelerator
precision=bf16 = bf16 bfloat16 use_bf16
precision = dtype torch_dtype mixed_precision fp16 amp param_dtype model_dtype
compile = torch_compile use_compile
recompute=full = gradient_checkpointing activation_checkpointing checkpoint_activations enable_gradient_checkpointing
data.path = dataset dataset_name dataset_path data_path data_dir train_file train_files train_data
data.sources = datasets data_blend blend mixture data_mixture dataset_mixer
data.kind = dataset_type data_type
data.tokenizer = tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path
data.template = chat_template
data.packed = packing sample_packing pack
data.field = text_column text_field dataset_text_field text_key
data.validation_path = validation_file eval_file eval_dataset val_data eval_path val_path
data.validation = validation_split val_split val_size eval_split val_set_size test_size
grpo.prompt_key = prompt_column
batch.global = batch_size global_batch_size train_batch_size total_batch_size gbs total_train_batch_size
batch.micro = per_device_train_batch_size per_device_batch_size micro_batch_size mbs device_batch_size local_batch_size
batch.global, which is batch.micro x data-parallel ranks x accumulated micro-batches = gradient_accumulation_steps \
gradient_accumulation accumulate_grad_batches grad_accum grad_accum_steps gas accumulation_steps
batch.seq_len = seq_len seq_length max_seq_len max_seq_length max_length sequence_length sequence_len context_length \
block_size cutoff_len model_max_length ctx_len
optim.lr = lr learning_rate max_lr peak_lr base_lr
optim.name = optim optimizer optimizer_name optim_type
optim.weight_decay = wd weight_decay
optim.betas = betas beta1 beta2 adam_beta1 adam_beta2 adam_betas
optim.eps = eps epsilon adam_epsilon adam_eps
optim.clip = clip max_grad_norm grad_clip gradient_clip gradient_clipping gradient_clip_val clip_grad clip_grad_norm
optim.schedule = lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style
optim.warmup = warmup warmup_steps warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters
optim.warmup, in steps = warmup_ratio warmup_fraction lr_warmup_fraction
optim.final_lr, a share of optim.lr = min_lr lr_min min_lr_ratio
parallel.tp = tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size
parallel.cp = cp cp_size context_parallel context_parallel_size context_parallel_degree
parallel.pp = pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree \
pipeline_model_parallel_size
parallel.ep = ep ep_size expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size
parallel.dp_shard = dp dp_size fsdp fsdp_size data_parallel_size data_parallel_shard_degree deepspeed zero_stage
parallel.dp_replicate = data_parallel_replicate_degree ddp
parallel, and torchrun --nproc_per_node N = num_gpus num_processes nproc nproc_per_node world_size gpus devices
lora.rank = lora_r lora_rank r lora_dim
lora.alpha = lora_alpha
lora.dropout = lora_dropout
lora.targets = target_modules lora_target_modules lora_target lora_targets
task=lora, lora.base=nf4 = qlora load_in_4bit quantization_bit quantization bnb
task=lora, lora.base=fp8 = load_in_8bit
lora: {} = use_lora use_peft peft adapter
validation.every = eval_every eval_steps eval_interval eval_freq val_every val_interval val_check_interval
validation.every, in steps = eval_strategy evaluation_strategy
validation.batches = eval_iters eval_batches val_batches limit_val_batches
checkpoint.every = save_every save_steps save_interval save_freq checkpoint_every checkpoint_interval ckpt_interval
checkpoint.every, in steps = save_strategy
checkpoint.keep = save_total_limit keep_last save_top_k
checkpoint.resume = resume resume_from resume_from_checkpoint
out_dir/metrics.jsonl, which has every step = logging_steps log_every log_interval log_freq log_every_n_steps
out_dir/metrics.jsonl, or metrics.tensorboard=true = wandb use_wandb wandb_project report_to logger tensorboard_dir
grpo.kl, or dpo.beta = beta
grpo.kl = kl_coef kl_loss_coef
dpo.loss = loss_type
grpo.group = num_generations group_size num_samples rollout_n
grpo.clip_low and grpo.clip_high = clip_ratio cliprange clip_range
grpo.reward = reward_funcs reward_fn reward_function
rollout.max_tokens = max_new_tokens max_completion_length max_response_length response_length
"""
# the same for the keys of a model's config
MODEL_TABLE = """
num_layers = num_hidden_layers n_layer n_layers
hidden_size = n_embd d_model n_embed hidden_dim
num_attention_heads = n_head n_heads num_heads
num_key_value_heads = n_kv_heads
intermediate_size = d_ff ffn_hidden_size
max_position_embeddings = n_positions
path = model_name_or_path
num_experts = num_local_experts n_routed_experts
"""


def by_alias(table: str) -> dict[str, str]:
    """Return a dict from each of the other names in a table to our setting."""
    found = {}
    for line in table.strip().splitlines():
        ours, aliases = line.rsplit(" = ", 1)
        found |= dict.fromkeys(aliases.split(), ours)
    return found


ALIASES = by_alias(TABLE)
OF_MODEL = by_alias(MODEL_TABLE)


def advice(key: str, known: Iterable[str], where: str) -> str:
    """Return a hint in brackets: what to write in place of an unknown key of the section `where`.

    If nothing resembles the key, the hint says how to list all settings.
    """
    word = key.lower().replace("-", "_")
    aliases = OF_MODEL if where == "model" else ALIASES
    if word in aliases:
        return f"(use {aliases[word]})"
    return nearest(word, known) or "(minitrain train --help lists all settings)"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return in brackets the one of `known` most similar to `word`, ignoring case; "" if none is."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return f"(nearest: {names[near[0]]})" if near else ""
