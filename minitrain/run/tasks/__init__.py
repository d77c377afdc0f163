"""What a run does, step by step."""
