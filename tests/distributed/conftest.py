"""Fixtures of tests over several ranks."""

from unittest import mock

import pytest

from tests.helpers.adapters import random_adapter


@pytest.fixture
def random_adapters():
    with mock.patch("minitrain.training.build.initialize_adapter", random_adapter):
        yield
