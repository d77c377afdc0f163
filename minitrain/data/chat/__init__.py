"""Chats as rows. Read chats.py first, then chat_templates.py and sft.py.

    chats.py             a line of JSON -> messages -> tokens, and which of them are learned
    chat_templates.py    messages -> text, by a template in Jinja
    sft.py               the dataset for fine-tuning
    preferences.py       pairs of replies, for DPO
    problems.py          prompts with answers, for GRPO
    dialogs.py           a sample's chat with its environment, in tokens
    tool_calls.py        calls of tools in a reply's text
    chat_tokenizer.py    what minitrain.load_tokenizer returns

Rewards are not here: they are in grpo/.
"""
