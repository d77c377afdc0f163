"""Read, check and explain settings."""
