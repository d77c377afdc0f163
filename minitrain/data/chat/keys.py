"""The keys of a line of chats that are read, as the data sets of the hub and other trainers have them.

Of several the first that holds something counts. Keys that are refused: data/faults/unread_keys.py.
"""

# Keys of a line, by what they hold. Of several the first that holds something counts.
CHATS = ("messages", "conversations")
PROMPTS = ("prompt", "instruction", "question", "problem", "query", "input")
RESPONSES = (
    "response",
    "completion",
    "output",
    "answer",
    "solution",
    "generated_solution",
    "expected_answer",
)
SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction")
THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "thoughts",
    "think",
    "chain_of_thought",
    "cot",
)
# of what a template is shown beside the messages
SHOWN = ("tools", "documents", "enable_thinking", "chat_template_kwargs")
# of a tool call: OpenAI's, then what Llama 3 writes, LangChain's, and Anthropic's
ARGUMENTS = ("arguments", "parameters", "args", "input")
# Keys of what is learned: nothing of a line, or of a message, where one is 0 or false.
LEARNED_LINE = (
    "train",
    "trainable",
    "learn",
    "learnable",
    "weight",
    "loss_weight",
    "loss_mask",
    "loss_scale",
    "compute_loss",
    "sample_weight",
)
LEARNED_MESSAGE = (*LEARNED_LINE, "training", "loss", "step_loss_mask")
# ShareGPT's names of roles
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
