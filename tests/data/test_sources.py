"""Files, folders, globs and JSON Lines; and what is said when they cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_async.data import Document, read_documents
from moe_async.errors import DataError


def entry(path: Path | str | None = None, **fields: Any) -> Any:
    """A source entry as the recipe would give it."""
    given = {"builtin": None, "field": None, "domain": "d", "weight": 1.0, "max_bytes": None, "document_bytes": 16384}
    return SimpleNamespace(**(given | {"path": None if path is None else str(path)} | fields))


def read(path: Path | str | None = None, **fields: Any) -> list[Document]:
    return list(read_documents(entry(path, **fields)))


def texts(path: Path | str, **fields: Any) -> list[str]:
    return [document.text.decode() for document in read(path, **fields)]


def refused(path: Path | str | None = None, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **fields)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """b.txt, a.md, sub/c.txt and files that are hidden."""
    for name in ("b.txt", "a.md", "sub/c.txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    return tmp_path


def test_a_file_is_a_document(folder: Path) -> None:
    assert read(folder / "b.txt") == [Document(b"text of b.txt", "d", str(folder / "b.txt"))]


def test_a_folder_is_all_its_visible_files_in_order(folder: Path) -> None:
    assert texts(folder) == ["text of a.md", "text of b.txt", "text of sub/c.txt"]


def test_a_glob_goes_down_with_two_stars(folder: Path) -> None:
    assert texts(folder / "*.txt") == ["text of b.txt"]
    assert texts(folder / "**" / "*.txt") == ["text of b.txt", "text of sub/c.txt"]
    assert texts(folder / "*") == ["text of a.md", "text of b.txt"]


def test_a_file_with_brackets_in_its_name_is_no_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("text")
    assert texts(tmp_path / "a[1].txt") == ["text"]


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert texts("~/b.txt") == ["text of b.txt"]
    assert "Write the folder out instead of ~" in refused("~nobody-of-this-name/b.txt")


def test_a_long_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("paragraph one\n\nparagraph two\n\nthree")
    assert texts(tmp_path / "long.txt", document_bytes=10) == ["paragraph one\n\n", "paragraph two\n\n", "three"]


def test_blank_text_and_byte_order_marks_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbftext")
    (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "json"}\n')
    assert sorted(texts(tmp_path)) == ["json", "text"]


def test_max_bytes_caps_the_entry_and_reads_no_further(folder: Path) -> None:
    (folder / "c.bin").write_bytes(b"\xff")
    assert texts(folder, max_bytes=16) == ["text of a.md", "text"]


def test_a_builtin_takes_the_domain_and_sizes_of_its_entry() -> None:
    documents = read(builtin="python", domain="code", max_bytes=20_000, document_bytes=1000)
    assert {document.domain for document in documents} == {"code"}
    assert max(len(document.text) for document in documents) <= 2000
    assert 19_990 < sum(len(document.text) for document in documents) <= 20_000


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "één", "n": 1}\n\n  \n{"text": ""}\n{"text": "two\\nlines"}')
    assert texts(path) == ["één", "two\nlines"]
    assert [document.origin for document in read(path)] == [f"{path}:1", f"{path}:5"]


def test_a_field_makes_any_file_json_lines_and_of_a_folder_only_those(tmp_path: Path) -> None:
    for name in ("a.json", "b.ndjson", "c.jsonl", "d.data"):
        (tmp_path / name).write_text(json.dumps({"body": name}))
    (tmp_path / "README.md").write_text("not json")
    assert texts(tmp_path / "d.data", field="body") == ["d.data"]
    assert texts(tmp_path, field="body") == ["a.json", "b.ndjson", "c.jsonl"]


def test_without_a_field_a_json_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": 1}')
    assert texts(tmp_path) == ['{"text": 1}']


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"title": "x", "body": "y"}', ["no key 'text'", "'title', 'body'", "Set field:"]),
        ("{}", ["no key 'text'", "keys found are none"]),
        ('["x"]', ["array", "must be an object", '{"text": "..."}']),
        ("null", ["null", "must be an object"]),
        ('{"text": 3, "id": "x"}', ["'text' holds a JSON number", "'text', 'id'", "Set field:"]),
        ('{"text": true}', ["holds a JSON true or false"]),
        ('{"text": "x"', ["not JSON", "mend the line"]),
        ('{"text": "\\ud800"}', ["surrogate"]),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, parts: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line)
    message = refused(path)
    for part in [f"{path}, line 3", *parts]:
        assert part in message


def test_text_that_is_not_utf8_is_located(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\n\ntwo\n\nthr\xe9e\n")
    for document_bytes in (3, 16384):
        message = refused(path, document_bytes=document_bytes)
        for part in (str(path), "line 5", "byte offset 13", "0xe9", "not UTF-8", "iconv"):
            assert part in message
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    assert "line 2, byte offset 24" in refused(tmp_path / "latin.jsonl")


def test_a_character_cut_off_by_the_end_of_the_file_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes("abé".encode()[:-1])
    assert "byte offset 2" in refused(tmp_path / "cut.txt")


def test_missing_files_are_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "gone.txt")
    assert f"{tmp_path / 'gone.txt'} does not exist" in message and "Correct path" in message


def test_broken_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    for path in (tmp_path / "link.txt", tmp_path, tmp_path / "*.txt"):
        message = refused(path)
        assert f"{tmp_path / 'link.txt'} is a broken link" in message and "gone.txt" in message


def test_unreadable_files_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be read (Not a directory)" in refused(folder / "b.txt" / "inside.txt")

    def deny(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", deny)
    message = refused(folder)
    assert f"{folder / 'a.md'} cannot be read (Permission denied)" in message and "chmod" in message


def test_empty_file_sets_are_refused(tmp_path: Path) -> None:
    assert "the glob matches no file" in refused(tmp_path / "*.txt")
    (tmp_path / ".hidden").write_text("x")
    assert "no file that is not hidden" in refused(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    assert "no .jsonl, .ndjson or .json file" in refused(tmp_path, field="text")
