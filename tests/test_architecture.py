"""The rules of the package's layout, read from its syntax trees.

Each rule is a function from a `Source` to the lines that break it. The first half of the tests feeds the rules made-up
sources that break them, so that a rule which finds nothing any more is noticed; the second half feeds them the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moe_async"

# A module imports from layers to its left, or from its own package; those of one layer do not import one another.
LAYERS = (
    {"errors", "tables"},
    {"recipe", "topology", "data"},
    {"ops", "plan"},
    {"comm"},
    {"moe", "sync", "observe"},
    {"model"},
    {"engine", "report"},
    {"train", "syncer", "launch"},
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
ENTRY_POINTS = {"train.py", "syncer.py", "launch.py"}
MAX_LINES = 350

Finding = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """A module's text.

    Attributes:
        path: below the package, such as ``ops/routing.py``.
        text: its content.
    """

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """The sub-package or module that it belongs to; empty for the package's own ``__init__``."""
        first = Path(self.path).parts[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @property
    def parents(self) -> list[str]:
        """Names of the packages around it, outermost first."""
        return ["moe_async", *Path(self.path).parts[:-1]]


@dataclass(frozen=True)
class Import:
    """An import of ``name``, dotted down to what is taken; ``for_types``: only type checkers see it."""

    line: int
    name: str
    for_types: bool

    def within(self, package: str) -> bool:
        return self.name == package or self.name.startswith(f"{package}.")


def imports(source: Source) -> list[Import]:
    """All imports, at any depth, ``importlib.import_module`` and ``__import__`` of a literal name among them."""
    found: list[Import] = []

    def visit(node: ast.AST, for_types: bool) -> None:
        if isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING":
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, for_types)
            return
        found.extend(Import(node.lineno, name, for_types) for name in imported_names(node, source.parents))
        for child in ast.iter_child_nodes(node):
            visit(child, for_types)

    visit(source.tree, False)
    return found


def imported_names(node: ast.AST, parents: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = parents[: len(parents) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def uses(source: Source, package: str) -> Iterator[int]:
    """Lines that import ``package``, or reach it as an attribute."""
    yield from (found.line for found in imports(source) if found.within(package))
    yield from (node.lineno for node in ast.walk(source.tree) if dotted(node) == package)


def import_order(source: Source) -> Iterator[Finding]:
    """Imports of the package's own modules that are not from the left. The root imports for type checkers alone."""
    for found in imports(source):
        if not found.within("moe_async"):
            continue
        target = found.name.removeprefix("moe_async").removeprefix(".").split(".")[0]
        if target and target == source.part:
            continue
        if found.for_types and (target == "recipe" or not source.part):
            # What a recipe section is called may be said anywhere: it costs nothing at run time.
            continue
        levels = LAYER_OF.get(target), LAYER_OF.get(source.part)
        if None in levels or levels[0] >= levels[1]:
            yield found.line, f"imports {found.name}"


def torch_distributed(source: Source) -> Iterator[Finding]:
    """Uses of ``torch.distributed`` outside ``comm``; checkpoints may use its ``checkpoint``."""
    if source.part == "comm":
        return
    lines = set(uses(source, "torch.distributed"))
    if source.path == "engine/checkpoint.py":
        lines -= set(uses(source, "torch.distributed.checkpoint"))
    yield from ((line, "uses torch.distributed") for line in lines)


def deepspeed(source: Source) -> Iterator[Finding]:
    """Imports of deepspeed outside the bridge."""
    if source.path != "engine/deepspeed_bridge.py":
        yield from ((found.line, "imports deepspeed") for found in imports(source) if found.within("deepspeed"))


def torch_free(source: Source) -> Iterator[Finding]:
    """Imports of torch where recipes and integers are."""
    if source.part in ("recipe", "topology", "errors", "tables", "plan"):
        yield from ((found.line, "imports torch") for found in imports(source) if found.within("torch"))


def no_cuda(source: Source) -> Iterator[Finding]:
    """One vendor's accelerators by name: ``torch.cuda``, ``tensor.cuda()``, ``"cuda:0"``."""
    yield from ((line, "uses torch.cuda") for line in uses(source, "torch.cuda"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield node.lineno, "calls cuda()"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            yield node.lineno, "names the device cuda"


def pure_maths(source: Source) -> Iterator[Finding]:
    """Parameters, modules and communication in ``ops``."""
    if source.part != "ops":
        return
    for package in ("torch.distributed", "moe_async.comm", "moe_async.topology"):
        yield from ((line, f"uses {package}") for line in uses(source, package))
    for node in ast.walk(source.tree):
        name = dotted(node).split(".")[-1]
        if name in ("Parameter", "Module", "Buffer", "register_buffer", "register_parameter"):
            yield node.lineno, f"uses {name}"


def clean_library(source: Source) -> Iterator[Finding]:
    """``print``, ``global``, bare ``except`` and the environment, which belong into entry points if anywhere."""
    if source.path in ENTRY_POINTS:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield node.lineno, "prints"
        elif isinstance(node, ast.Global):
            yield node.lineno, "has a global statement"
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "has a bare except"
    if source.path != "comm/groups.py":
        for name in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"):
            yield from ((line, f"uses {name}") for line in uses(source, name))


def docstrings(source: Source) -> Iterator[Finding]:
    """The module, public classes and functions, and public methods of public classes, without a docstring."""
    tree = source.tree
    if not ast.get_docstring(tree):
        yield 1, "the module has no docstring"
    yield from undocumented(tree.body)


def undocumented(body: list[ast.stmt]) -> Iterator[Finding]:
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.lineno, f"{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body)


def length(source: Source) -> Iterator[Finding]:
    """Modules that are too long to be one idea."""
    lines = len(source.text.splitlines())
    if lines > MAX_LINES:
        yield lines, f"has {lines} lines, more than {MAX_LINES}"


RULES = [
    import_order, torch_distributed, deepspeed, torch_free, no_cuda, pure_maths, clean_library, docstrings, length
]  # fmt: skip


def broken(rule, path: str, text: str) -> list[int]:
    """Lines of a made-up module that break a rule."""
    return sorted(line for line, _ in rule(Source(path, text)))


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("ops/routing.py", "from moe_async.comm import Group"),
        ("ops/routing.py", "import moe_async.engine.step"),
        ("ops/routing.py", "from moe_async import engine"),
        ("ops/routing.py", "from ..engine import step"),
        ("ops/routing.py", "from .. import engine"),
        ("ops/routing.py", "def f():\n  from moe_async.moe import MoELayer"),
        ("ops/routing.py", "import importlib\nimportlib.import_module('moe_async.model')"),
        ("ops/routing.py", "__import__('moe_async.model')"),
        ("ops/routing.py", "if TYPE_CHECKING:\n  from moe_async.comm import Group"),
        ("ops/routing.py", "import typing\nif typing.TYPE_CHECKING:\n  from moe_async.comm import Group"),
        ("ops/routing.py", "from moe_async import MoELayer"),
        ("ops/routing.py", "import moe_async"),
        ("ops/routing.py", "from moe_async.newcomer import x"),
        ("newcomer.py", "from moe_async.errors import MoeAsyncError"),
        ("moe/layer.py", "from moe_async.observe import LoadWindow"),
        ("observe/load.py", "from moe_async.moe import MoELayer"),
        ("sync/gate.py", "from moe_async.moe import MoELayer"),
        ("recipe/schema.py", "from moe_async.topology import divisors"),
        ("topology.py", "from moe_async.recipe import Recipe"),
        ("data/corpus.py", "from moe_async.recipe import DataSection"),
        ("errors.py", "from moe_async.topology import divisors"),
        ("train.py", "from moe_async.launch import main"),
        ("__init__.py", "from moe_async.topology import Topology"),
    ],
)
def test_imports_from_the_right_are_found(path, statement):
    assert broken(import_order, path, statement) == [len(statement.splitlines())]


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("ops/routing.py", "from moe_async.ops.sums import RoutingSums\nfrom moe_async.errors import MoeAsyncError"),
        ("ops/routing.py", "from .sums import RoutingSums\nfrom . import load\nfrom ..topology import Topology"),
        ("ops/routing.py", "import torch\nimport moe_async_other"),
        ("data/corpus.py", "if TYPE_CHECKING:\n  from moe_async.recipe import DataSection"),
        ("model/build.py", "from moe_async.data.tokenizer import make_tokenizer"),
        ("moe/layer.py", "from moe_async.comm import World"),
        ("train.py", "from moe_async.engine.loop import Trainer"),
        ("__init__.py", "if TYPE_CHECKING:\n  from moe_async.engine.step import MicroBatch"),
    ],
)
def test_imports_from_the_left_are_not(path, statement):
    assert broken(import_order, path, statement) == []


def test_the_else_of_a_type_checking_block_runs():
    text = "if TYPE_CHECKING:\n  from moe_async.recipe import Recipe\nelse:\n  from moe_async.recipe import Recipe\n"
    assert broken(import_order, "data/corpus.py", text) == [4]


@pytest.mark.parametrize(
    ("rule", "path", "text", "lines"),
    [
        (torch_distributed, "moe/layer.py", "import torch.distributed as dist", [1]),
        (torch_distributed, "moe/layer.py", "from torch import distributed", [1]),
        (torch_distributed, "moe/layer.py", "from torch.distributed import all_reduce", [1]),
        (torch_distributed, "moe/layer.py", "import torch\n\ntorch.distributed.barrier()", [3]),
        (torch_distributed, "engine/loop.py", "import torch.distributed.checkpoint", [1]),
        (torch_distributed, "engine/checkpoint.py", "from torch.distributed import barrier", [1]),
        (torch_distributed, "engine/checkpoint.py", "import torch.distributed.checkpoint as dcp", []),
        (torch_distributed, "engine/checkpoint.py", "from torch.distributed import checkpoint", []),
        (torch_distributed, "engine/checkpoint.py", "torch.distributed.checkpoint.x\ntorch.distributed.x", [2]),
        (torch_distributed, "comm/groups.py", "import torch.distributed as dist", []),
        (deepspeed, "engine/loop.py", "def f():\n  import deepspeed", [2]),
        (deepspeed, "engine/loop.py", "from deepspeed.accelerator import get_accelerator", [1]),
        (deepspeed, "engine/loop.py", "if TYPE_CHECKING:\n  import deepspeed", [2]),
        (deepspeed, "engine/deepspeed_bridge.py", "import deepspeed", []),
        (deepspeed, "engine/loop.py", "from moe_async.engine.deepspeed_bridge import DeepSpeedBridge", []),
        (torch_free, "recipe/schema.py", "from torch import nn", [1]),
        (torch_free, "topology.py", "if TYPE_CHECKING:\n  import torch", [2]),
        (torch_free, "data/batches.py", "import torch", []),
        (no_cuda, "moe/layer.py", "import torch\ntorch.cuda.synchronize()", [2]),
        (no_cuda, "moe/layer.py", "from torch.cuda import amp\nfrom torch import cuda", [1, 2]),
        (no_cuda, "moe/layer.py", "x = x.cuda()\ny = torch.device('cuda:0')\nz = 'not cuda'", [1, 2]),
        (pure_maths, "ops/ffn.py", "class A(nn.Module):\n  w = nn.Parameter(x)\n  b = Parameter(x)", [1, 2, 3]),
        (pure_maths, "ops/ffn.py", "import torch\ntorch.distributed.all_reduce(x)", [2]),
        (pure_maths, "ops/ffn.py", "from moe_async.topology import Topology", [1]),
        (pure_maths, "moe/experts.py", "class A(nn.Module):\n  pass", []),
        (clean_library, "ops/ffn.py", "print(1)\ndef f():\n  global x", [1, 3]),
        (clean_library, "ops/ffn.py", "try:\n  pass\nexcept:\n  pass", [3]),
        (clean_library, "ops/ffn.py", "import os\nos.environ['A']\nos.getenv('A')", [2, 3]),
        (clean_library, "ops/ffn.py", "from os import environ", [1]),
        (clean_library, "comm/groups.py", "import os\nos.environ['A']\nprint(1)", [3]),
        (clean_library, "train.py", "print(1)\nimport os\nos.environ['A']", []),
        (clean_library, "data/train.py", "print(1)", [1]),
        (clean_library, "ops/ffn.py", "try:\n  pass\nexcept ValueError:\n  sprint(1)", []),
        (docstrings, "a.py", "x = 1", [1]),
        (docstrings, "a.py", "'''M.'''\ndef f():\n  pass\nclass C:\n  def g(self):\n    pass", [2, 4, 5]),
        (docstrings, "a.py", "'''M.'''\nclass C:\n  '''C.'''\n  class D:\n    '''D.'''\n    def g(self): ...", [6]),
        (docstrings, "a.py", "'''M.'''\nclass C:\n  '''C.'''\n  async def g(s): ...\n  def __init__(s): ...", [4]),
        (docstrings, "a.py", "'''M.'''\ndef _f(): ...\nclass _C:\n  def g(self): ...", []),
        (docstrings, "a.py", "'''M.'''\ndef f():\n  '''F.'''\n  def inner(): ...", []),
        (length, "a.py", "\n" * MAX_LINES, []),
        (length, "a.py", "\n" * (MAX_LINES + 1), [MAX_LINES + 1]),
    ],
)  # fmt: skip
def test_rules_find_what_breaks_them(rule, path, text, lines):
    assert broken(rule, path, text) == lines


MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def test_the_package_is_there():
    assert {"__init__.py", "topology.py", "train.py", "ops/routing.py", "engine/deepspeed_bridge.py"} <= set(MODULES)
    assert {Source(path, "").part for path in MODULES} - {""} <= set(LAYER_OF)


@pytest.mark.parametrize("path", MODULES)
def test_the_package_keeps_the_rules(path):
    source = Source(path, (PACKAGE / path).read_text())
    findings = [f"{path}:{line}: {what} ({rule.__name__})" for rule in RULES for line, what in rule(source)]
    assert findings == []


def test_no_folder_of_tests_is_skipped(pytestconfig):
    """pytest leaves out folders called dist unless told otherwise."""
    tests = Path(__file__).parent
    skipped = pytestconfig.getini("norecursedirs")
    folders = [path.relative_to(tests) for path in tests.rglob("*") if path.is_dir() and any(path.glob("test_*.py"))]
    assert Path("dist") in folders
    assert not [path for path in folders for part in path.parts for name in skipped if fnmatch(part, name)]
