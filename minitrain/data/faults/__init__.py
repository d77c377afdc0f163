"""Tell what is wrong with data, where, and what would be right. Nothing here reads a row.

skips          leave out what is unusable and count it, or raise its error
wording        the words of messages: settings of `train`, or options of a command
wrong_text     what a text is that is not UTF-8, not JSON or not YAML
no_files       what there is where a path finds no data
other_task     a line that is data for another task
unread_keys    keys of chats that hold something which no model would see or learn
"""
