"""Tell what is wrong with data, where, and what would be right. Nothing here reads a row.

wording        the words of messages: settings of `train`, or options of a command
wrong_text     what a text is that is not UTF-8, not JSON or not YAML
"""
