"""Functions of a user, which settings name: by module, or by file."""

import json
import pickle
import sys

import pytest

from minitrain.errors import InputError
from minitrain.user_code import load_function

EXAMPLE = {"x": 1}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_file_named_as_another_module_is_the_one_that_is_loaded(tmp_path):
    (tmp_path / "json.py").write_text(
        "from beside_json import double\n\n\ndef f(x):\n    return double(x) + 1\n"
    )
    (tmp_path / "beside_json.py").write_text("def double(x):\n    return 2 * x\n")
    found = load_function("s", f"{tmp_path}/json.py:f", EXAMPLE)
    assert found(3) == 7
    assert sys.modules["json"] is json and json.loads("[1]") == [1]
    # processes of a pool get it by name
    assert pickle.loads(pickle.dumps(found)) is found


def test_files_of_one_name_are_two_and_one_file_is_run_once(tmp_path):
    files = [tmp_path / name / "mine.py" for name in "ab"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(
            f"seen = []\n\n\ndef f(x):\n    seen.append(x)\n    return {number}, len(seen)\n"
        )
    first, second, again = (
        load_function("s", f"{file}:f", EXAMPLE) for file in [*files, files[0]]
    )
    length = len(sys.path)
    assert [first(1), second(1), again(1)] == [(0, 1), (1, 1), (0, 2)]
    for _ in range(3):
        load_function("s", f"{files[1]}:f", EXAMPLE)
    assert len(sys.path) == length


@pytest.mark.parametrize("text", [None, "1 / 0", "raise SystemExit(3)"])
def test_a_file_that_fails_is_one_line_and_is_tried_again(tmp_path, text):
    file = tmp_path / "later.py"
    if text:
        file.write_text(text)
    with pytest.raises(
        InputError, match="^reward=later cannot be imported: .*Error|^reward.*SystemExit"
    ):
        load_function("reward=later", f"{file}:f", EXAMPLE)
    file.write_text("def f(x):\n    return x  # repaired, and so of another size\n")
    assert load_function("reward=later", f"{file}:f", EXAMPLE)(5) == 5
