"""What one entry of `data.source` yields: documents of a built-in domain, of text files or of JSON Lines.

A path may name a file, a folder (all its files, hidden ones and links to folders left out) or a glob (`**` goes down
any number of folders). Files are read in the order of their paths. A file that cannot be read stops everything: text
that silently goes missing is found out much later.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moe_async.data.builtin import builtin_documents
from moe_async.data.documents import Document, cap_documents, cut_pieces
from moe_async.errors import DataError

if TYPE_CHECKING:
    from moe_async.recipe import SourceEntry

_JSON_LINES = (".jsonl", ".ndjson")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_documents(entry: SourceEntry) -> Iterator[Document]:
    """Yield the documents of one source entry, at most `entry.max_bytes` bytes of text.

    * `builtin`: the documents of that domain, cut like text files.
    * `path` of text files: each file in pieces of about `entry.document_bytes` bytes (`documents.cut_pieces`).
    * `path` of JSON Lines (`.jsonl`, `.ndjson`, or any file when `entry.field` is set; of a folder then only files
      that end in `.jsonl`, `.ndjson` or `.json`): one document a line, however long, the string at `entry.field`
      (`text` when not set). Blank lines are skipped.

    Raises DataError while iterating: no file there, a file that cannot be read, text that is not UTF-8, a line that is
    not a JSON object with that string; with the path, where in it, and the repair.
    """
    if entry.builtin is not None:
        for document in builtin_documents(entry.builtin, entry.max_bytes, entry.document_bytes):
            yield dataclasses.replace(document, domain=entry.domain)
        return
    yield from cap_documents(_path_documents(entry), entry.max_bytes)


def _path_documents(entry: SourceEntry) -> Iterator[Document]:
    given = _expand(str(entry.path))
    try:
        for path in _find_files(given, only_json=entry.field is not None):
            if entry.field is not None or path.suffix.lower() in _JSON_LINES:
                yield from _json_documents(path, entry.domain, entry.field or "text")
            else:
                yield from _text_documents(path, entry.domain, entry.document_bytes)
    except OSError as error:
        raise _unreadable(Path(error.filename or given), error) from error


def _expand(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"data.source path {path!r}: {error}. Write the folder out instead of ~.") from error


def _find_files(path: Path, only_json: bool) -> list[Path]:
    """The files that a path entry names, sorted; at least one."""
    if path.is_dir():
        files = _walk(path)
        if only_json:
            files = [file for file in files if file.suffix.lower() in (*_JSON_LINES, ".json")]
        if not files:
            kind = "no .jsonl, .ndjson or .json file (field is set)" if only_json else "no file that is not hidden"
            raise DataError(f"data.source path {str(path)!r}: the folder holds {kind}. Give another folder, or a glob.")
        return files
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        return [path]
    # A broken link is kept, so that reading it says so.
    # Path.glob takes no absolute pattern and yields hidden files.
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    files = sorted(match for match in matches if not match.is_dir())
    if not files:
        raise DataError(
            f"data.source path {str(path)!r}: the glob matches no file (seen from {Path.cwd()}). "
            "Correct it; ** is needed to go down into folders."
        )
    return files


def _walk(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, sorted. Links to folders are not followed: they may form a ring."""
    found: list[Path] = []

    def stop(error: OSError) -> NoReturn:
        raise error  # os.walk leaves out what it cannot list, unless told otherwise

    for parent, subfolders, files in os.walk(folder, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found.extend(Path(parent, name) for name in files if not name.startswith("."))
    # A broken link stays in, so that reading it says so; sockets and pipes do not.
    return sorted(file for file in found if file.is_file() or not file.exists())


def _unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return DataError(
            f"data.source: {path} is a broken link; it points to {path.readlink()}, which does not exist. "
            "Mend or delete the link."
        )
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"data.source: {path} does not exist (seen from {Path.cwd()}). Correct path: in the recipe, or write it "
            "from the root (/...)."
        )
    return DataError(
        f"data.source: {path} cannot be read ({error.strerror or error}). Make it readable for this user (chmod +r), "
        "or name other files."
    )


def _text_documents(path: Path, domain: str, document_bytes: int) -> Iterator[Document]:
    offset, line = 0, 1
    with path.open("rb") as stream:
        for piece in cut_pieces(stream, document_bytes):
            _check_utf8(piece, path, line, offset)
            text = piece.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else piece
            if text.strip():
                yield Document(text, domain, str(path))
            offset += len(piece)
            line += piece.count(b"\n")


def _check_utf8(text: bytes, path: Path, line: int, offset: int) -> None:
    """Raise DataError unless `text`, which starts at that line and byte offset of the file, is UTF-8."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line += text.count(b"\n", 0, error.start)
        raise DataError(
            f"data.source: {path}, line {line}, byte offset {offset + error.start}: byte "
            f"0x{text[error.start]:02x} is not UTF-8 ({error.reason}). Convert the file "
            "(iconv -f LATIN1 -t UTF-8, with the encoding it has), unpack it if it is an archive, or leave it out with "
            "a narrower path or glob."
        ) from error


def _json_documents(path: Path, domain: str, field: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            _check_utf8(line, path, number, offset)
            text = line.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else line
            offset += len(line)
            if text.strip():
                value = _field_of(text, field, f"data.source: {path}, line {number}")
                if value.strip():
                    yield Document(value, domain, f"{path}:{number}")


def _field_of(line: bytes, field: str, where: str) -> bytes:
    """The text at `field` of one line of JSON Lines, as UTF-8. Raises DataError that starts with `where`."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{where}: not JSON ({error}). JSON Lines has one whole object on each line; mend the line, or, if the "
            "file is plain text, remove field: and rename it to .txt."
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON {_json_type(record)}, but each line must be an object like {{{json.dumps(field)}: "
            '"..."}. Rewrite the file with one object a line.'
        )
    keys = ", ".join(repr(key) for key in record) or "none"
    if field not in record:
        raise DataError(f"{where}: no key {field!r}; the keys found are {keys}. Set field: to the one that holds text.")
    value = record[field]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {field!r} holds a JSON {_json_type(value)}, not a string; the keys found are {keys}. Set field: "
            "to the one that holds text."
        )
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {field!r} holds half of a surrogate pair (an escape like \\ud800), which is no character. "
            "Write the text without it."
        ) from error


def _json_type(value: object) -> str:
    names = {bool: "true or false", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
