"""Files that hold keys."""

from __future__ import annotations

import pytest

from gateway.settings.key_file import read_keys
from gateway.settings.user_error import UserError


def test_keys_stand_one_a_line(tmp_path):
    """Comments, empty lines and spaces around are no part of them."""
    file = tmp_path / "keys"
    file.write_text("# operators\n\n  one  \ntwo\n")
    assert read_keys(str(file), "admin.key_file") == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "cannot be read"), (b"# none\n", "holds no key"), (b"\xff\n", "cannot be read")],
)
def test_a_file_without_keys_is_a_mistake_with_its_setting(tmp_path, content, word):
    """Missing, empty, or no text."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"admin.key_file: .*{word}"):
        read_keys(str(file), "admin.key_file")
