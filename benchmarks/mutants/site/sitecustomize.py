"""Loads a changed module in place of that of the package, in this process and those it starts.

MUTANT is a JSON object with the module's name, its file, and the file with its changed source.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.source).read_text()
        code: CodeType = compile(text, self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, path: str, source: str) -> None:
        self.module, self.path, self.source = module, path, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        loader = _Loader(fullname, self.path, self.source)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


if "MUTANT" in os.environ:
    sys.meta_path.insert(0, _Finder(**json.loads(os.environ["MUTANT"])))
