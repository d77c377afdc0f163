"""Data: text, tokens, chats, latents -> rows by number."""
