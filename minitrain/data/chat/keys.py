"""The keys that lines of chats have, in the data sets of the hub and for other trainers."""

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
# Keys of what templates and other trainers show to the model or have it say, and is not read here.
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "files", "attachments")
UNREAD_IN_LINE = (*MEDIA, "functions", "available_tools", "tool_definitions")
UNREAD_BESIDE_PROMPT = (
    *UNREAD_IN_LINE,
    "history",
    "document",
    "contexts",
    "passages",
    "passage",
    "paragraph",
    "article",
    "background",
    "knowledge",
    "evidence",
    "references",
    "premise",
    "schema",
    "table",
    "choices",
    "options",
)
UNREAD_BESIDE_MESSAGES = (*UNREAD_IN_LINE, "context")
UNREAD_IN_MESSAGE = (
    *MEDIA,
    "function_call",
    "function_calls",
    "functions",
    "tools",
    "tool_plan",
    "tool_results",
    "documents",
    "context",
    "refusal",
    "reasoning_details",
    "channel",
    "recipient",
)
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
# Keys of trainers and data sets that mask in another way, by token, by role or the other way round.
# They are refused: the first where they hold anything, the others where they hold 0 or false.
# Any other key is data.
MASKS = (
    "mask",
    "masked",
    "is_masked",
    "mask_history",
    "assistant_mask",
    "assistant_masks",
    "assistant_tokens_mask",
    "completion_mask",
    "response_mask",
    "ignore",
    "skip",
    "no_loss",
    "train_detail",
    "train_on_input",
    "train_on_inputs",
    "train_on_prompt",
    "token_weights",
    "rejected",
    "rejected_response",
    "rejected_messages",
)
MASKS_WHERE_0 = (
    "is_trainable",
    "train_on_turn",
    "training",
    "supervised",
    "loss",
    "calculate_loss",
    "step_loss_mask",
    "step_mask",
    "token_weight",
)
# ShareGPT's names of roles
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
