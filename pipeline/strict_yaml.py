"""YAML as people mean it: a key that is given twice is an error, where PyYAML lets the last one win."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # On the nodes as they are written: a merge (`<<`) may repeat a key, and joins them only later.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: key {key.value!r} is given twice")
            seen.add((key.tag, key.value))
        return node


def load(text: str) -> Any:
    """Plain data of one YAML document. Raises yaml.YAMLError, also for a key given twice in one mapping."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:  # a date such as 2026-13-01; brackets without end
        raise yaml.YAMLError(str(error)) from None
