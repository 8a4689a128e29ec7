"""python -m libfsdp.checkpoint: looks at checkpoints of libfsdp's, safetensors, torch and TensorPlay, verifies,
compares and converts them. Exit code 0: fine; 1: there are differences, or damage; 2: a wrong command, or it can't be
done.
"""

import argparse
import json
import math
import signal
import sys
import warnings

from .. import abi
from ..dtypes import TABLE
from ..errors import Corrupt, FsdpError
from . import compare, convert, formats
from .table import Progress, count, human, parse_bytes, printable, shape_text, table

_FORMATS = """\
Kinds of checkpoints, all found out by looking:
  libfsdp's folders; .safetensors files and Hugging Face folders; folders of torch.distributed.checkpoint's and of
  TensorPlay's; files of torch.save's and tensorplay.save's (.pt, .mega), also one for each rank, with DTensors or
  ShardedTensors, in one folder.
"""
_EXAMPLES = """\
examples:
  python -m libfsdp.checkpoint list run/last
  python -m libfsdp.checkpoint list model.safetensors --json
  python -m libfsdp.checkpoint verify run/last
  python -m libfsdp.checkpoint compare run/last other/run --names '!optimizer/*'
  python -m libfsdp.checkpoint compare run/last small.safetensors --rtol 1e-2
  python -m libfsdp.checkpoint convert run/last model.safetensors --names '!optimizer/*' --dtype bfloat16
  python -m libfsdp.checkpoint convert bert/ run/start --to sharded --ranks 4
"""
_CONVERT_EXAMPLES = """\
examples, from SRC to DST:
  run/last model.safetensors                       whole tensors in one file
  run/last hf/ --to full --max-file-size 5GB --names '!optimizer/*'
                                                   a Hugging Face folder of weights, with an index
  hf/ run/start --to sharded --ranks 8             a file for each of 8 ranks (any number of ranks can load it)
  run/last dcp/ --to dcp                           for torch.distributed.checkpoint.load
  dcp/ run/start --to sharded                      and from there
  run/last model.pt                                for torch.load: {"model": ..., "optim": ...}
  ranks/ whole.safetensors                         a folder of one file for each rank, of torch.save's
  run/last model.pt --to tensorplay                for tensorplay.load

A model alone becomes a plain state dict; with an optimizer or JSON values beside it, {"model": ..., "optim": {"state":
..., "param_groups": ...}, name: value}. What DST has no place for is said on the error output, in a line each: "left
out: NAME: reason". Needs as much memory as the tensors of one checkpoint have bytes, at most.
"""


def main(arguments=None):
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the frameworks', of there being no process group, say
            return options.run(options)
    except BrokenPipeError:  # whoever read the output has enough
        sys.stdout = None
        return 2
    except Corrupt as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was changed", 2)
    except abi.LibraryNotFound as error:
        return _fail(" ".join(str(error).split()), 2)
    except FsdpError as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(f"{error.filename or 'the output'}: {error.strerror or error}", 2)
    except Exception as error:  # of a framework, for a file of which it makes nothing
        return _fail(f"{type(error).__name__}: {formats.first_line(error)}", 2)


def _fail(error, code):
    _say(formats.first_line(error))
    return code


def _say(text):
    if sys.stderr is not None:  # print would take the output for it
        print(f"libfsdp.checkpoint: {printable(text)}", file=sys.stderr)


def _parse(arguments):
    def parser_for(name, run, help, **more):
        parser = commands.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", formatter_class=formatter, **more
        )
        parser.add_argument(
            "--trust", action="store_true", help="let pickles run what they hold: for files of your own"
        )
        parser.set_defaults(run=run)
        return parser

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m libfsdp.checkpoint",
        description="Look at checkpoints, verify, compare and convert them.\n\n" + _FORMATS,
        epilog=_EXAMPLES + "\nexit code: 0 fine, 1 differences or damage, 2 a wrong command, or it can't be done",
        formatter_class=formatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    listed = parser_for("list", _list, "what a checkpoint is, and its tensors")
    listed.add_argument("path", metavar="PATH", help="a checkpoint of any kind")
    listed.add_argument("--parts", action="store_true", help="also where in which file each tensor lies")
    listed.add_argument("--json", action="store_true", help="as JSON, for programs")
    verified = parser_for("verify", _verify, "read all of a checkpoint, and compare it with its checksums")
    verified.add_argument("path", metavar="PATH", help="a checkpoint of any kind")
    compared = parser_for("compare", _compare, "how two checkpoints, of any kinds, differ")
    compared.add_argument("a", metavar="A", help="a checkpoint of any kind")
    compared.add_argument("b", metavar="B", help="and another, of the same kind or not")
    for name, what in (("--rtol", "of |b|"), ("--atol", "by itself")):
        compared.add_argument(
            name,
            type=_tolerance,
            metavar="X",
            help=f"let values differ by so much, {what}: where |a-b| <= ATOL + RTOL * |b| they are the same, in any dtype",
        )
    _add_names(compared)
    converted = parser_for("convert", _convert, "write a checkpoint as another kind", epilog=_CONVERT_EXAMPLES)
    converted.add_argument("src", metavar="SRC", help="a checkpoint of any kind")
    converted.add_argument("dst", metavar="DST", help="the file or folder to make")
    targets = "; ".join(f"{name}: {what}" for name, what in formats.TARGETS.items())
    converted.add_argument("--to", choices=formats.TARGETS, help=f"{targets}. Without it, by DST's ending")
    converted.add_argument(
        "--ranks", type=_positive, metavar="N", help="with --to sharded: files for so many ranks (1)"
    )
    converted.add_argument(
        "--max-file-size",
        type=_bytes,
        metavar="SIZE",
        help="with --to full: begin another file rather than exceed this, 5GB say",
    )
    floats = [name for name in TABLE if "float" in name]
    converted.add_argument("--dtype", choices=floats, help="cast the model's floats to it; not the optimizer's")
    _add_names(converted)
    converted.add_argument("--force", action="store_true", help="replace DST, if it is a checkpoint")
    options = parser.parse_args(arguments)
    if options.run is _convert:
        _check(converted, options)
    return options


def _add_names(parser):
    parser.add_argument(
        "--names",
        metavar="GLOB",
        action="append",
        default=[],
        help="only tensors whose names match; '!GLOB' leaves those out that match: '!optimizer/*' all of the optimizer's, "
        "its JSON too. May be given several times",
    )


def _positive(text):
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 to 4096")
    return int(text)


def _tolerance(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance; give a number such as 1e-6")
    return value


def _bytes(text):
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(parser, options):
    try:
        options.to = convert.target_of(options.dst, options.to)
    except FsdpError as error:
        parser.error(str(error))
    if options.ranks is not None and options.to != "sharded":
        parser.error(f"--ranks: goes with --to sharded, not {options.to}")
    if options.max_file_size is not None and (options.to != "full" or options.dst.endswith(".safetensors")):
        parser.error("--max-file-size: goes with --to full and a folder")


# ---- list ------------------------------------------------------------------------------------------------------------


def _list(options):
    content = formats.open_any(options.path, options.trust)
    if options.json:
        json.dump(_described(content), sys.stdout, indent=1)
        print()
        return 0
    print(f"{content.path}: {content.kind}")
    for what, text in [*content.facts, ("tensors", f"{len(content.items)}, {human(content.nbytes)}")]:
        print(f"{what:<10} {text}")
    print()
    rows = []
    for name, item in content.items.items():
        rows += _rows(name, item, options.parts)
    own = []
    for rank, name, item in content.of_ranks:
        own += _rows(f"{name} of rank {rank}", item, options.parts)
    for title, lines in (("name", rows), ("entry of a rank", own)):
        if lines:
            table(lines, [title, "dtype", "shape", "size", "parts"], right=(3, 4))
            print()
    for name, value in content.json.items():
        text = json.dumps(value)
        print(printable(f"JSON {name}: {text if len(text) <= 200 else text[:197] + '...'}"))
    for text in content.left_out:
        print(printable(f"has no place in libfsdp's checkpoints: {text}"))
    return 0


def _rows(name, item, parts):
    if item.tied_to is not None:
        return [[name, item.dtype, shape_text(item.shape), "", f"= {item.tied_to}"]]
    lines = [
        [name, item.dtype, shape_text(item.shape), human(item.nbytes), "" if item.parts is None else len(item.parts)]
    ]
    for file, offset, length, nbytes in item.parts or () if parts else ():
        lines.append([f"  {file}", f"at {shape_text(offset)}", shape_text(length), human(nbytes), ""])
    return lines


def _described(content):
    def described(item):
        parts = [
            {"file": file, "offset": offset, "length": length, "bytes": nbytes}
            for file, offset, length, nbytes in item.parts or ()
        ]
        return {"dtype": item.dtype, "shape": item.shape, "bytes": item.nbytes, "tied_to": item.tied_to, "parts": parts}

    return {
        "path": content.path,
        "kind": content.kind,
        "ranks": content.ranks,
        "bytes": content.nbytes,
        **dict(content.facts),
        "tensors": {name: described(item) for name, item in content.items.items()},
        "of_ranks": [{"name": name, "rank": rank, **described(item)} for rank, name, item in content.of_ranks],
        "json": content.json,
        "left_out": content.left_out,
    }


# ---- The other commands ----------------------------------------------------------------------------------------------


def _verify(options):
    content = formats.open_any(options.path, options.trust)
    with Progress("verifying") as progress:
        damage = content.check(progress)
    for line in damage:
        print(f"damaged: {printable(line)}")
    if damage:
        print(f"{options.path}: damaged in {count(len(damage), 'place')}")
        return 1
    checked = dict(content.facts).get("checksums", "none") != "none"
    how = "all checksums are right" if checked else "all could be read (there are no checksums in it)"
    print(f"{options.path}: {count(len(content.items), 'tensor')}, {human(content.nbytes)}: {how}")
    return 0


def _compare(options):
    pair = [formats.open_any(path, options.trust) for path in (options.a, options.b)]
    if options.names:
        pair = [formats.select(content, options.names, None) for content in pair]
    given = options.rtol is not None or options.atol is not None
    return 1 if compare.compare(*pair, (options.rtol or 0.0, options.atol or 0.0) if given else None) else 0


def _convert(options):
    content, left_out = convert.convert(
        options.src,
        options.dst,
        to=options.to,
        ranks=options.ranks or 1,
        max_file_bytes=options.max_file_size,
        dtype=options.dtype,
        names=options.names,
        force=options.force,
        trust=options.trust,
    )
    for text in left_out:
        _say(f"left out: {text}")
    print(convert.summary(content, options.dst))
    return 0


def _ended(number, frame):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)  # so that what was begun is removed then, too
    sys.exit(main())
