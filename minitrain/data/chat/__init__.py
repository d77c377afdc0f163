"""Chats as rows. Read sft.py first, then chats.py and rendering.py.

A line of JSON becomes messages:
    keys               the names under which a line may have what is read
    messages           a chat as Python objects
    read_chats         a line -> messages, for fine-tuning
    read_pairs         a line -> two chats, for DPO and reward models
    read_problems      a line -> a prompt and its answer, for GRPO
    read_tools         what a line has of tools, and of calls of them
Messages become text, and text tokens:
    jinja              compile a template
    chat_templates     the template of a tokenizer, or a built-in one
    rendering          messages -> text, cut where replies begin and end
    chats              messages -> tokens, and which of them are learned
    reply_counts       what a template leaves out or writes otherwise
Tokens become rows:
    sample_rows        which chats share a row
    sft                the dataset for fine-tuning
    preferences        pairs of replies
    problems           prompts with answers
Chats that a model goes on with:
    dialogs            a sample's chat with its environment, in tokens
    tool_calls         calls of tools in a reply's text
    chat_tokenizer     what minitrain.load_tokenizer returns

Rewards are not here: they are in grpo/.
"""
