#!/usr/bin/env python3
"""Writes what follows from the prototypes in abi/fsdp.h, so that no list is kept twice:

- the function table `struct fsdp_api` in fsdp.h itself (slots keep their places; new functions are appended),
- abi/fsdp.map, the version script,
- plugin/api_table.inc, the table's initialiser and the assertions that pin its slots.

`generate.py` rewrites them; `generate.py --check` fails when one is out of date.
"""
import pathlib
import re
import sys

here = pathlib.Path(__file__).resolve().parent
header_path = here / "fsdp.h"
BEGIN, END = "/* generated: table */\n", "/* generated: end */\n"


def prototypes(text):
    """name -> (return type, parameter list), in the header's order."""
    code = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    found = {}
    for match in re.finditer(r"^FSDP_API\s+(.*?)\b(fsdp_\w+)\s*\(([^;]*)\);", code, flags=re.M | re.S):
        returns, name, params = (" ".join(part.split()) for part in match.groups())
        found[name] = (returns, params)
    return found


def slot_line(name, returns, params):
    star = "" if returns.endswith("*") else " "
    return f"    {returns}{star}(*{name.removeprefix('fsdp_')})({params});\n"


def main():
    check = "--check" in sys.argv[1:]
    text = header_path.read_text()
    before, rest = text.split(BEGIN)
    old_table, after = rest.split(END)
    functions = prototypes(before)
    functions.pop("fsdp_get_api")
    order = ["fsdp_" + slot for slot in re.findall(r"\(\*(\w+)\)\(", old_table)]
    gone = [name for name in order if name not in functions]
    if gone and "--renew" not in sys.argv[1:]:
        sys.exit(f"generate.py: {', '.join(gone)}: a released slot can't be removed (--renew before a first release)")
    if gone:
        order = []
    order += [name for name in functions if name not in order]

    table = "struct fsdp_api {\n    size_t struct_size;\n    int32_t major;\n    int32_t minor;\n"
    table += "".join(slot_line(name, *functions[name]) for name in order) + "};\n"

    init = "/* Written by abi/generate.py: the table's slots, and their places. */\n"
    init += "".join(f"SLOT({name.removeprefix('fsdp_')}, {index})\n" for index, name in enumerate(order))
    exported = "".join(f"        {name};\n" for name in sorted([*order, "fsdp_get_api"]))
    version_map = f"FSDP_0 {{\n    global:\n{exported}    local:\n        *;\n}};\n"

    outputs = {
        header_path: before + BEGIN + table + END + after,
        here / "fsdp.map": version_map,
        here.parent / "plugin" / "api_table.inc": init,
    }
    stale = [path for path, content in outputs.items() if not path.exists() or path.read_text() != content]
    if check:
        if stale:
            sys.exit(f"out of date: {', '.join(map(str, stale))}: run abi/generate.py")
        return
    for path in stale:
        path.write_text(outputs[path])


main()
