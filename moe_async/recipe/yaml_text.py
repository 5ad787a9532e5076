"""YAML text to plain data and back, with the changes to PyYAML that recipes need.

* `3e-4` is a number. (YAML 1.1 reads it as text.)
* A key given twice is an error. (PyYAML keeps the last one without a word.)
* A merge key is an error. (Through a chain of merges PyYAML 6.0.4 takes the value that was overridden.)

The changes live in subclasses, so other users of PyYAML in the process see none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from moe_async.errors import RecipeError

_FLOAT_TAG = "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first_line: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == _MERGE_TAG:
                problem = "merge keys (<<) are not read here; write the entries out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if (key.tag, key.value) in first_line:
                line = first_line[key.tag, key.value]
                problem = f"the key {key.value!r} appears twice in one mapping, first in line {line}; remove one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first_line[key.tag, key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # an anchor in a resolved recipe would only puzzle its reader


def _represent_list(dumper: _Dumper, data: list[Any]) -> yaml.SequenceNode:
    one_line = not any(isinstance(entry, (list, dict)) for entry in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=one_line)


# The dumper needs the float pattern too: it must quote a text such as "1e5" that the loader would read as a number.
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))
_Dumper.add_representer(list, _represent_list)


def parse_yaml(text: str, source: str) -> Any:
    """Gives the data of one YAML document.

    Args:
        text: the document.
        source: what an error message calls it, such as its path.

    Raises:
        RecipeError: if it is not YAML, repeats a key in a mapping or needs more than plain data; names the place.
    """
    try:
        # _Loader adds checks and a float pattern to SafeLoader: it builds plain data and runs nothing.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = "; ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{source}{place}: this is not valid YAML: {problem}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{source}: this is not valid YAML: {error}") from error


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Gives a mapping as YAML in its own order, with lists of plain values on one line."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
