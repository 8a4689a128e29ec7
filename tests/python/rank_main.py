"""One rank of a test: rank_main.py MODULE_FILE FUNCTION '[[arguments], {settings of libfsdp.init}]'."""

import importlib.util
import json
import pathlib
import sys

import libfsdp

path, function, text = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(path).parent))
spec = importlib.util.spec_from_file_location("test_module", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

arguments, settings = json.loads(text)
with libfsdp.init(**settings) as group:
    getattr(module, function)(group, *arguments)
