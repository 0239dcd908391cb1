# SPDX-License-Identifier: Apache-2.0
"""Prints the names of the KV connectors that a wheel offers to vLLM, one a line, sorted.

    pip download --no-deps vllm==0.33.0
    python3 classes.py vllm-0.33.0-*.whl > vllm-0.33.0.txt

The names are those that the wheel registers with KVConnectorFactory. A wheel that registers none (LMCache) is loaded by
kv_connector_module_path, so its names are the classes of its folder integration/vllm that derive from
KVConnectorBase_V1. Nothing of the wheel is imported or installed, and only names are kept in this folder.
"""

import ast
import re
import sys
import zipfile

REGISTERED = re.compile(r"\bKVConnectorFactory\.register_connector\(\s*\"(\w+)\"")


def classes(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            if any(isinstance(b, ast.Name) and b.id == "KVConnectorBase_V1" for b in node.bases):
                yield node.name


def names(wheel):
    registered, derived = set(), set()
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if not name.endswith(".py"):
                continue
            source = files.read(name).decode("utf-8", "replace")
            registered.update(REGISTERED.findall(source))
            if "/integration/vllm/" in name:
                derived.update(classes(source))
    return registered or derived


for wheel in sys.argv[1:]:
    print("\n".join(sorted(names(wheel))))
