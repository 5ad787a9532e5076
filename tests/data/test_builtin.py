"""The built-in domains. Their text changes with the versions installed, so no figure of it is fixed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_async.data import BUILTIN_DOMAINS, builtin_documents
from moe_async.data.builtin import _docstrings, _is_rich_in_docstrings, _package_folder
from moe_async.errors import DataError
from moe_async.recipe import DataSection

CAP = 300_000


@pytest.mark.parametrize("domain", BUILTIN_DOMAINS)
def test_a_domain_yields_the_same_documents_twice_up_to_its_cap(domain: str) -> None:
    documents = list(builtin_documents(domain, CAP, 4096))
    assert documents == list(builtin_documents(domain, CAP, 4096))
    assert CAP - 3 <= sum(len(document.text) for document in documents) <= CAP
    assert {document.domain for document in documents} == {domain}
    assert max(len(document.text) for document in documents) <= 2 * 4096
    assert all(document.text.decode().strip() for document in documents)
    assert len({document.origin for document in documents}) > 2


def test_a_smaller_cap_is_a_prefix() -> None:
    few = list(builtin_documents("python", 30_000))
    many = list(builtin_documents("python", 60_000))
    assert few[:-1] == many[: len(few) - 1]


def test_the_cap_takes_a_spread_of_files() -> None:
    initials = {Path(document.origin).name[0] for document in builtin_documents("python", 300_000)}
    assert len(initials) > 5


def test_python_and_english_share_no_file() -> None:
    python, english = (
        {document.origin for document in builtin_documents(domain, 1_000_000)} for domain in ("python", "english")
    )
    assert python.isdisjoint(english)
    assert any(origin.endswith(".py") for origin in english)
    assert not any({"test", "tests", "site-packages", "pydoc_data"} & set(Path(origin).parts) for origin in python)


def test_headers_written_by_machine_are_left_out() -> None:
    assert not any(b"@generated" in document.text[:512] for document in builtin_documents("cpp", 1_000_000))


@pytest.mark.parametrize(("domain", "package"), [("cpp", "torch"), ("maths", "sympy")])
def test_packages_are_read_without_importing_them(domain: str, package: str) -> None:
    script = (
        "import sys; from moe_async.data import builtin_documents; "
        f"assert list(builtin_documents('{domain}', 20_000)); assert '{package}' not in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    # Another working folder would lose the package when it is not installed; this one is the checkout's.
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=root)


def test_an_unknown_domain_and_a_missing_package_are_refused() -> None:
    with pytest.raises(DataError, match="'latin' is not a domain; use one of python, english, cpp, maths"):
        next(builtin_documents("latin", None))
    with pytest.raises(DataError, match="no_such_package, which is not installed"):
        _package_folder("no_such_package", "cpp")


def test_the_recipe_knows_the_same_domains() -> None:
    section = DataSection.model_validate({"source": "builtin"})
    assert [entry.builtin for entry in section.source] == list(BUILTIN_DOMAINS)


LONG = "word " * 50
SOURCE = f'''
"""module {LONG}"""
def short():
    """Too short."""
class A:
    r"""class {LONG}"""
    async def method(self):
        """méthode {LONG}
        indented"""
        def inner():
            """inner {LONG}"""
    text = """not a docstring {LONG}"""
def last():
    \'\'\'last {LONG}\'\'\'
'''


def test_docstrings_come_in_order_and_unindented() -> None:
    found = _docstrings(SOURCE.encode())
    assert [text.split()[0] for text in found] == ["module", "class", "méthode", "inner", "last"]
    assert found[2].endswith("\nindented")


def test_a_file_that_does_not_parse_has_no_docstrings() -> None:
    assert _docstrings(b"def broken(:\n") == []
    assert _docstrings(b"x = '\0'") == []


def test_a_share_of_long_docstrings_makes_a_file_rich() -> None:
    assert _is_rich_in_docstrings(SOURCE.encode())
    assert not _is_rich_in_docstrings(b'"""short"""\n' + b"x = 1\n" * 10)
    assert not _is_rich_in_docstrings(SOURCE.encode() + b"x = 1\n" * 10_000)
