"""Names of keys in a line of data, by what they hold. Of several the first that holds something counts.

hidden: what templates and other trainers show to the model or have it say, and is not read here;
hidden_line, hidden_beside and hidden_inside: more of them in a line, beside a prompt, and in a
message. learned: a line or a reply is not learned if they are 0 or false; learned_inside: more of
them in a reply. masked: keys that say so in another way, as do others with a word of LEARNING.
"""

# how words of a key begin that is about what is learned: of train_on_input, not of constraints
LEARNING = ("train", "learn", "loss", "mask", "weight", "supervis", "ignor", "skip")

CHAT_KEYS = {
    name: words.split()
    for name, words in {
        "chats": "messages conversations",
        "prompts": "prompt instruction question problem query input",
        "responses": """
            response completion output answer solution generated_solution expected_answer
        """,
        "systems": "system system_prompt system_message system_instruction",
        "thoughts": """
            reasoning_content reasoning thinking thought thoughts think chain_of_thought cot
        """,
        "answers": "expected_answer answer ground_truth solution response output completion",
        "hidden": "images image videos video audios audio files attachments",
        "hidden_line": "functions available_tools tool_definitions",
        "hidden_beside": """
            history document contexts passages passage paragraph article background
            knowledge evidence references premise schema table choices options
        """,
        "hidden_inside": """
            function_call function_calls functions tools tool_plan tool_results documents
            context refusal reasoning_details channel recipient
        """,
        "learned": """
            train trainable learn learnable weight loss_weight loss_mask loss_scale
            compute_loss sample_weight
        """,
        "learned_inside": "training loss step_loss_mask",
        "masked": """
            mask masked is_masked completion_mask assistant_masks ignore skip rejected
            rejected_response rejected_messages train_detail token_weights
        """,
    }.items()
}
