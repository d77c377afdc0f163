"""Names of keys in a line of data, by what they hold. Of several the first that holds something counts.

hidden: what templates and other trainers show to the model or have it say, and is not read here;
hidden_line, hidden_beside and hidden_inside: more of them in a line, beside a prompt, and in a
message. learned: a line or a reply is not learned if they are 0 or false; learned_inside: more of
them in a reply. masked: keys that say so in another way.
"""

CHAT_KEYS = {
    "chats": [
        "messages",
        "conversations",
    ],
    "prompts": [
        "prompt",
        "instruction",
        "question",
        "problem",
        "query",
        "input",
    ],
    "responses": [
        "response",
        "completion",
        "output",
        "answer",
        "solution",
        "generated_solution",
        "expected_answer",
    ],
    "systems": [
        "system",
        "system_prompt",
        "system_message",
        "system_instruction",
    ],
    "thoughts": [
        "reasoning_content",
        "reasoning",
        "thinking",
        "thought",
    ],
    "answers": [
        "expected_answer",
        "answer",
        "ground_truth",
        "solution",
        "response",
        "output",
        "completion",
    ],
    "hidden": [
        "images",
        "image",
        "videos",
        "video",
        "audios",
        "audio",
    ],
    "hidden_line": [
        "functions",
    ],
    "hidden_beside": [
        "history",
        "document",
        "contexts",
        "passages",
        "passage",
        "choices",
        "options",
    ],
    "hidden_inside": [
        "function_call",
        "channel",
        "recipient",
    ],
    "learned": [
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
    ],
    "learned_inside": [
        "training",
        "loss",
        "step_loss_mask",
    ],
    "masked": [
        "mask",
        "masked",
        "is_masked",
        "completion_mask",
        "assistant_masks",
        "ignore",
        "skip",
        "rejected",
        "rejected_response",
        "train_detail",
        "token_weights",
    ],
}
