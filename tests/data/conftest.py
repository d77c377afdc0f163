"""Fixtures of tests of data."""

import datetime

import pytest
import transformers.utils.chat_template_utils

from minitrain.data.chat.jinja import DATE


@pytest.fixture
def same_date(monkeypatch):
    """Give transformers the date that our templates are rendered with."""
    today = type("Today", (datetime.datetime,), {"now": staticmethod(lambda: DATE)})
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", today)
