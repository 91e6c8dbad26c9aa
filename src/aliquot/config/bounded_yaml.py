"""PyYAML's loaders for text of strangers, in which aliases cannot repeat a few lines a billion times."""

from __future__ import annotations

import yaml

_MOST_REPEATED = 10_000  # nodes that aliases repeat, in one document


class _Bounded:
    """A mixin for loaders: each document passes through these two methods, whoever composes it."""

    def get_node(self) -> yaml.Node | None:
        return _checked(super().get_node())  # type: ignore[misc]

    def get_single_node(self) -> yaml.Node | None:
        return _checked(super().get_single_node())  # type: ignore[misc]


class BoundedLoader(_Bounded, yaml.SafeLoader):
    """As yaml.SafeLoader; raises MarkedYAMLError where aliases repeat too much, or a node is within itself."""


class BoundedTextLoader(_Bounded, yaml.BaseLoader):
    """As yaml.BaseLoader, for which each scalar is text, with the bounds of BoundedLoader."""


class BoundedFastLoader(_Bounded, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """As BoundedLoader, in C where PyYAML has it: for megabytes."""


def _checked(root: yaml.Node | None) -> yaml.Node | None:
    sizes: dict[int, int] = {}  # of each distinct node, with all that is in it
    if root is not None and _size(root, sizes) - len(sizes) > _MOST_REPEATED:
        raise yaml.MarkedYAMLError(
            problem=f"aliases repeat more than {_MOST_REPEATED} nodes: write the values out",
            problem_mark=root.start_mark,
        )
    return root


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    if id(node) not in sizes:
        sizes[id(node)] = 0  # while its own nodes are counted
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = isinstance(node, yaml.MappingNode)
        sizes[id(node)] = 1 + sum(_size(each, sizes) for item in inner for each in (item if pairs else (item,)))
    elif sizes[id(node)] == 0:
        raise yaml.MarkedYAMLError(problem="an alias within its own anchor", problem_mark=node.start_mark)
    return sizes[id(node)]
