"""Facts from the values in the text of an error: versions, lengths, sizes, shapes, and logged reasons.

Functions of a match and a text are readers of entries. A reader that uses named groups of the match says which; the
patterns of an entry with this reader must have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_LENGTH = re.compile(
    r"(?:max_seqlen(?:_q|_kv|_k)?|(?:encoder[_-])?seq(?:uence)?[_ -]?len(?:gths?)?(?:_q|_kv|_k)?)"
    r"['\"]?\s*(?:[:=]|of|is)?\s*(\d{2,8})\b",
    re.IGNORECASE,
)
_HEAD_SIZE = re.compile(r"head[_ ]?(?:dim(?:ension)?|size)s?(?:_qk|_v)?['\"]?\s*(?:[:=]|of|is)?\s*(\d{1,4})\b", re.I)
_RANKS = re.compile(r"(?:cp_size|context[_ -]parallel[_ -]size)['\"]?\s*[:=]?\s*(\d{1,4})\b", re.I)
_SHAPE = re.compile(r"(?:torch\.Size\(|shape\s*[:=]?\s*)[\[(]+(\d+(?:, ?\d+){1,5})")
_VERSIONS = {
    "torch": r"\btorch[ '\":=v]{1,4}(\d+\.\d+[\w.+]*)",
    "flash-attn": r"flash[-_]attn(?:_version)?[ '\":=v]{1,4}(\d+\.\d+[\w.]*)",
    "TransformerEngine": r"transformer[_ -]?engine(?:_version)?[ '\":=v]{1,4}(\d+\.\d+[\w.+]*)",
    "transformers": r"\btransformers[ '\":=v]{1,4}(\d+\.\d+[\w.]*)",
    "xformers": r"\bxformers[ '\":=v]{1,4}(\d+\.\d+[\w.]*)",
    "CUDA": r"\bcuda(?:_version)?[ '\":=v]{1,4}(\d{2}\.\d+)",
}
_CUDNN = re.compile(r"cudnn(?:[_ ]version)?['\":= (v]{1,6}(?:(\d{1,2}\.\d+(?:\.\d+){0,2})|(8\d{3}|9\d{4,5})\b)", re.I)
_CAPABILITY = re.compile(r"(?:\bsm_?|compute[_ ]capability['\":= ]{0,4})\(?(\d{2,3}|\d{1,2}[.,] ?\d)\b", re.IGNORECASE)
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def observed(text: str) -> dict[str, str]:
    """The versions, sizes and shapes in a text, by name."""
    values: dict[str, Sequence[str]] = {
        name: re.findall(pattern, text, re.IGNORECASE) for name, pattern in _VERSIONS.items()
    }
    values["cuDNN"] = [version] if (version := cudnn(text)) else []
    values["compute capability"] = [_capability(word) for word in _CAPABILITY.findall(text)]
    values["length"] = [str(n) for n in lengths(text)]
    values["head size"] = _HEAD_SIZE.findall(text)
    values["shape"] = [f"[{shape}]" for shape in _SHAPE.findall(text)]
    return {name: ", ".join(dict.fromkeys(words)) for name, words in values.items() if words}


def lengths(text: str) -> list[int]:
    """Sequence lengths that the text names."""
    return list(dict.fromkeys(int(n) for n in _LENGTH.findall(text)))


def cudnn(text: str) -> str | None:
    """The version of cuDNN that the text names: ``cuDNN 8.9.7``, ``cudnn_version: 8.9.7`` and ``(v90100 70)`` alike."""
    match = _CUDNN.search(text)
    if match is None:
        return None
    if match[1]:
        return match[1]
    number, base = int(match[2]), 1000 if int(match[2]) < 10_000 else 10_000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _capability(word: str) -> str:
    digits = re.findall(r"\d+", word)
    return ".".join(digits) if len(digits) > 1 else f"{word[:-1]}.{word[-1]}"


def alignment(match: re.Match[str], text: str) -> list[str]:
    """Whether lengths fit cuDNN and context parallelism, and the reasons in the debug log."""
    version, facts = cudnn(text), []
    if version is None:
        consequence = "cuDNN before 9.0 refuses it."
    else:
        consequence = f"cuDNN {version} refuses it, 9.0 and later take any length."
    if version is None or int(version.split(".")[0]) < 9:
        for length in lengths(text):
            if rest := length % 64:
                following = length + 64 - rest
                facts.append(
                    f"Length {length} is {rest} over a multiple of 64 (the next is {following}): {consequence}"
                )
    return facts + ranks(match, text) + debug_log(match, text)


def ranks(match: re.Match[str], text: str) -> list[str]:
    """Whether lengths are multiples of twice the number of ranks."""
    sizes = [int(n) for n in _RANKS.findall(text) if int(n) > 1]
    return [
        f"Length {length} is not a multiple of 2 * {size} ranks = {2 * size}; the next is "
        f"{math.ceil(length / (2 * size)) * 2 * size}."
        for size in dict.fromkeys(sizes)
        for length in lengths(text)
        if length % (2 * size)
    ]


def debug_log(match: re.Match[str], text: str) -> list[str]:
    """The reasons that TransformerEngine's debug log gives."""
    reasons = re.findall(
        r"(Disabling (?:Flash|Fused|Unfused)\w*(?: \d)?(?: backend)? .{3,160}?)(?= ?\[| ?Traceback|$|\. )", text
    )
    return [f"The log says: {reason.strip().rstrip('.')}." for reason in dict.fromkeys(reasons)][:8]


def kernel_warnings(match: re.Match[str], text: str) -> list[str]:
    """The reasons that PyTorch's warnings give."""
    marks = (
        r"(?:Both|All) fused kernels|Flash [Aa]ttention (?:does not|requires|has been)|Mem\w* [Ee]fficient \w+ "
        r"(?:has been|does not)|For dense inputs?|Expected query, key and value to all be of dtype|"
        r"Nested tensors for query|Flash attention only supports gpu"
    )
    reasons = re.findall(rf"((?:{marks}).*?)(?= ?\(Triggered|\.(?: |$)| Traceback|$)", text)
    return [f"PyTorch says: {reason.strip().rstrip('.')}." for reason in dict.fromkeys(reasons)][:8]


def operator_reasons(match: re.Match[str], text: str) -> list[str]:
    """The reasons of xFormers, one per operator."""
    reasons = re.findall(r"`(\w+)(?:@[\w.+-]+)?` is not supported because: (.*?)(?= `\w+(?:@\S+)?` is not|$)", text)
    return [f"{name}: {' '.join(why.split())[:150]}" for name, why in reasons][:8]


def heads(match: re.Match[str], text: str) -> list[str]:
    """What the two sizes in the message are: numbers of heads, or other axes. Groups: a (queries), b (keys)."""
    q, k = int(match["a"]), int(match["b"])
    if k > 1 and q % k == 0:
        return [f"{q} and {k}: grouped-query attention, {q // k} query heads per key head."]
    return [
        f"{q} and {k}: {k} does not divide {q}, so this is not grouped-query attention. "
        "Either the axes are in another order ([B, S, H, D] was passed) or the mask has three dimensions."
    ]


def mask_sizes(match: re.Match[str], text: str) -> list[str]:
    """Which axis of the scores the mask does not fit. Groups: a (the size of the scores), b (of the mask), dim."""
    axis = "queries" if match["dim"] == "2" else "keys"
    return [f"The scores have {match['a']} {axis} and the mask {match['b']}."]


def head_size(match: re.Match[str], text: str) -> list[str]:
    """Which limit of flash-attn the head sizes exceed."""
    facts = []
    for size in dict.fromkeys(int(n) for n in _HEAD_SIZE.findall(text)):
        if size > 256:
            facts.append(f"Head size {size} is over flash-attn's 256.")
        if size % 8:
            facts.append(f"Head size {size} is {size % 8} over a multiple of 8 (the next is {size + 8 - size % 8}).")
    return facts


def allocation(match: re.Match[str], text: str) -> list[str]:
    """The sequence length whose scores have the size of the allocation. Groups: size, unit; None if not named."""
    if match["size"] is None:
        return []
    count = float(match["size"]) * _UNITS[match["unit"][0].lower()] / 4
    longest = math.isqrt(int(count / 32))
    return [
        f"{match['size']} {match['unit']} holds float32 scores of 32 heads up to length {longest:,} "
        "(4 * heads * Sq * Sk bytes per sequence)."
    ]


def input_error(match: re.Match[str], text: str) -> list[str]:
    """The message and the HINT of an `InputError`."""
    error = re.search(r"InputError: (.*?)(?: HINT: (.*?))?(?= \w+(?:\.\w+)*(?:Error|Exception): | Traceback|$)", text)
    if error is None:
        return []
    message, hint = error.groups()
    return [f"It says: {message}."] + ([f"Its HINT: {hint}."] if hint else [])


def own_hint(match: re.Match[str], text: str) -> list[str]:
    """The HINT of an error of this library."""
    hint = re.search(r"HINT: (.{1,200}?)(?= Traceback|$)", text)
    return [f"Its HINT: {hint[1]}."] if hint else []


def symbol(match: re.Match[str], text: str) -> list[str]:
    """What the missing symbol says about the cause. Groups: symbol."""
    name = match["symbol"]
    if "__cxx11" in name:
        return [
            "The symbol has __cxx11 in it: the wheel and PyTorch were built with different C++ ABIs. "
            "Install the wheel whose cxx11abi tag equals torch.compiled_with_cxx11_abi()."
        ]
    if "SetDevice" in name:
        return ["The symbol is c10::cuda::SetDevice, whose type changed in PyTorch 2.3: built for another version."]
    return []
