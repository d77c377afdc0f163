"""Stand-ins for the models, tokenizers and rewards that the recipes in configs/train download."""

SHORT_ANSWER = "def reward(response, answer, row):\n    return float(answer in response) - len(response) / 1000\n"


# recipe -> settings that make it valid at full size without downloads
STAND_INS = {
    "sft-chats": ["model=qwen2.5-7b", "data.tokenizer=bytes"],
    "lora-8b-24gb": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "dpo": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "reward-model": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "full-8b-8gpu": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "full-8b-80gb": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    # any model will do
    "full-1b-12gb": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "pretrain-tokens": ["data.tokenizer=bytes"],
    "pretrain-mixed": ["data.tokenizer=bytes"],
    "pretrain-muon": ["data.tokenizer=bytes"],
    "continued-pretraining": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "grpo-gsm8k": ["model=qwen2.5-7b", "data.tokenizer=bytes"],
    "grpo-own-reward": ["model=llama3.1-8b", "data.tokenizer=bytes"],
    "wan-lora": ["model=wan2.1-1.3b"],
}
