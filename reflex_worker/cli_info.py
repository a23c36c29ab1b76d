"""`reflex info GGUF`: what the file holds and whether it will run, from its header alone."""

from __future__ import annotations

from .cli_args import Option, UsageError, parse
from .cli_args import usage as usage_text
from .cli_model import demo_path
from .cli_output import result_line

OPTIONS = [
    Option("--demo", help="the bundled model"),
    Option("--metadata", help="every metadata entry too"),
    Option("--json", help="one JSON object"),
]


def usage(name):
    return usage_text(name, "GGUF | --demo", OPTIONS, "Exit status 3 when the file will not run.")


def enough(_name):
    return False


def main(name, argv):
    from ._native import report_lost_files
    from .api import describe
    from .cli import write

    values, positional = parse(argv, OPTIONS, 1)
    if values["demo"]:
        path = demo_path()
    elif positional:
        path = positional[0]
    else:
        raise UsageError(f"{name}: expected a GGUF file (or --demo)")
    report_lost_files()
    info = describe(path)
    if values["json"]:
        if not values["metadata"]:
            info.pop("metadata")
        write(1, result_line("REFLEX_INFO_OK", info, True))
    else:
        write(1, text(info, values["metadata"]))
    return 0 if info["runs"] else 3


def text(info, with_metadata):
    types = ", ".join(f"{n} {t}" for t, n in sorted(info["tensor_types"].items(), key=lambda x: -x[1]))
    rows = [
        ("file", f"{info['path']} (GGUF v{info['gguf_version']}, {info['n_parts']} part(s))"),
        ("name", info["name"] or "-"),
        ("architecture", info["architecture"] or "-"),
        ("size", f"{info['file_bytes'] / 1e6:.1f} MB, {info['n_params'] / 1e6:.1f} M parameters"),
        ("file type", info["file_type"] or "-"),
        ("tensors", f"{info['n_tensors']} ({types})" if types else "0"),
    ]
    if info["n_layers"]:
        rows += [
            ("layers", f"{info['n_layers']}, width {info['n_embd']}"),
            ("heads", f"{info['n_heads']} query, {info['n_kv_heads']} key/value, size {info['head_dim']}"),
            ("context", f"{info['n_ctx_train']} tokens"),
        ]
    known = ""
    if not info["tokenizer_known"] and not info["tokenizer_error"]:
        known = " (not known to the native tokenizer, words split by the tokenizers package)"
    rows += [
        (
            "tokenizer",
            f"{info['tokenizer_model'] or '-'} / {info['tokenizer_pre'] or '-'}, "
            f"{info['n_tokens']} tokens{known}",
        ),
        ("chat template", f"{len(info['chat_template'])} characters" if info["chat_template"] else "none"),
        ("runs", "yes" if info["runs"] else f"no [{info['error_kind']}]: {info['error']}"),
    ]
    out = "".join(f"{k:14} {v}\n" for k, v in rows)
    if with_metadata:
        out += "\n" + "".join(f"{k} = {v!r}\n" for k, v in info["metadata"].items())
    return out
