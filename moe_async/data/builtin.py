"""Four domains of text that are on every machine that can train: no download, no cache file.

| domain | text | found at |
|---|---|---|
| python | source files of the standard library, without tests | `sysconfig` |
| english | the topics of Python's `help()`, then docstrings of the standard library | `pydoc_data`, `sysconfig` |
| cpp | headers that ship with torch | `importlib.util.find_spec("torch")`, torch is not imported |
| maths | docstrings of sympy | `importlib.util.find_spec("sympy")`, sympy is not imported |

Files are taken in the order of a hash of their relative path, so a cap on bytes takes a spread of the library rather
than the letter a, and the order is the same on every machine that has the same files. Reading stops at the cap.

Held-out text must not be near to training text, hence three rules. A file of the standard library gives its code to
`python` or its docstrings to `english`, never both: the share of docstrings in it decides. Machine-written headers
are left out, as thousands of them differ in a name only, and so are the character tables of `encodings`.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib.util
import io
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_async.data.documents import Document, cap_documents, cut_pieces
from moe_async.errors import DataError

LONG_DOCUMENT_BYTES = 64 * 1024
"""Texts longer than this are cut unless the caller says otherwise."""

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
_MIN_DOCSTRING = 200
# A tenth of the bytes between triple quotes. Below that share a file costs more time to parse than its docstrings
# are worth: at 0.1 the standard library keeps 88 % of its docstrings for 66 % of the parsing.
_DOCSTRING_SHARE = 0.1
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def builtin_documents(
    domain: str, max_bytes: int | None, document_bytes: int = LONG_DOCUMENT_BYTES
) -> Iterator[Document]:
    """Yield the documents of one built-in domain, in an order that depends on nothing but the installed files.

    Args:
        domain: one of BUILTIN_DOMAINS.
        max_bytes: stop when the texts add up to this many bytes; None yields all of them.
        document_bytes: a longer file is cut at a blank line (`cut_pieces`), so that it cannot be a split of its own.

    Raises DataError, at the first document, when the domain is not known or its files are not installed.
    """
    if domain not in _READERS:
        raise DataError(f"builtin: {domain!r} is not a domain; use one of {', '.join(_READERS)}.")
    return cap_documents(_cut_documents(domain, document_bytes), max_bytes)


def _cut_documents(domain: str, document_bytes: int) -> Iterator[Document]:
    for origin, text in _READERS[domain]():
        for piece in cut_pieces(io.BytesIO(text), document_bytes):
            yield Document(piece, domain, origin)


def _python_texts() -> Iterator[tuple[str, bytes]]:
    for origin, text in _files(_standard_library(), ".py"):
        if not _is_rich_in_docstrings(text):
            yield origin, text


def _english_texts() -> Iterator[tuple[str, bytes]]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "builtin: english reads the help topics of Python, and this Python has no module pydoc_data.topics. "
            "Install the whole standard library, or use another source."
        ) from error
    for name in sorted(topics, key=_spread):
        yield f"help topic {name}", topics[name].encode()
    yield from _docstring_texts(_standard_library())


def _cpp_texts() -> Iterator[tuple[str, bytes]]:
    for origin, text in _files(_package_folder("torch", "cpp") / "include", ".h"):
        if b"@generated" not in text[:512]:
            yield origin, text


def _maths_texts() -> Iterator[tuple[str, bytes]]:
    return _docstring_texts(_package_folder("sympy", "maths"))


_READERS: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "python": _python_texts,
    "english": _english_texts,
    "cpp": _cpp_texts,
    "maths": _maths_texts,
}
BUILTIN_DOMAINS: tuple[str, ...] = tuple(_READERS)
"""The names that `builtin:` takes."""


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _package_folder(package: str, domain: str) -> Path:
    """Where a package is installed, without importing it (importing torch takes seconds)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise DataError(
            f"builtin: {domain} reads text of the package {package}, which is not installed. "
            f"Install it (pip install {package}), or leave this source out."
        )
    return Path(spec.origin).parent


def _files(root: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files below `root` that are UTF-8 text, in spread order."""
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        below = "" if folder == str(root) else f"{Path(folder).relative_to(root).as_posix()}/"
        # A build of Python writes its own options into _sysconfigdata: a table of paths, not code.
        names.extend(below + name for name in files if name.endswith(suffix) and not name.startswith("_sysconfigdata"))
    if not names:
        raise DataError(
            f"no {suffix} file below {root}, where this built-in domain reads its text; the installation there has "
            "none. Use another built-in domain, or a path source."
        )
    for name in sorted(names, key=_spread):
        if not (root / name).is_file():
            # A link that leads nowhere.
            continue
        text = (root / name).read_bytes()
        if _is_utf8(text) and text.strip():
            yield str(root / name), text


def _spread(name: str) -> bytes:
    """A sort key unrelated to the alphabet."""
    return hashlib.sha256(os.fsencode(name)).digest()


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_rich_in_docstrings(source: bytes) -> bool:
    """Whether long strings between triple quotes are a good share of a Python file; a guess that parses nothing."""
    quoted = source.split(b'"""')[1::2]
    return sum(len(text) for text in quoted if len(text) > _MIN_DOCSTRING) >= _DOCSTRING_SHARE * len(source)


def _docstring_texts(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, docstrings) of each Python file that is rich in them, the docstrings a blank line apart."""
    for origin, source in _files(root, ".py"):
        if _is_rich_in_docstrings(source):
            docstrings = _docstrings(source)
            if docstrings:
                yield origin, "\n\n".join(docstrings).encode("utf-8", errors="replace")


def _docstrings(source: bytes) -> list[str]:
    """The docstrings longer than 200 characters of modules, classes and functions, from top to bottom."""
    try:
        with warnings.catch_warnings(), _collector_paused():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []  # a template, or a file for another version of Python
    texts: list[str] = []
    pending: list[_Definition] = [tree]
    while pending:
        node = pending.pop()
        text = ast.get_docstring(node)
        if text is not None and len(text) > _MIN_DOCSTRING:
            texts.append(text)
        # Direct children only: ast.walk visits every expression too and takes ten times as long, for the one percent
        # of docstrings that stand below an `if` or a `try`.
        pending.extend(child for child in reversed(node.body) if isinstance(child, _Definition))
    return texts


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the cycle collector out of a block that makes many objects and no cycles.

    A syntax tree is millions of objects, and each full collection walks all that the process holds: with torch
    imported, parsing takes more than twice as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
