"""Tiny matrices as large ones."""

import pytest

from minitrain.rollout import cpu


@pytest.fixture
def pack_everything(monkeypatch):
    """Tiny matrices are multiplied as large ones are."""
    monkeypatch.setattr(cpu, "MIN_PACKED_ELEMENTS", 0)
