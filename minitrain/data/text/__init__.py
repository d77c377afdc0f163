"""Texts and tokens as rows."""
