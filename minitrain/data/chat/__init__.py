"""Chats as rows: fine-tuning, preferences, problems."""
