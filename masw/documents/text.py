"""Bytes -> characters -> clean text. Encodings, and the characters that should not reach a model or a terminal.

The encoding is, in this order: given by the caller; a byte order mark; declared in an HTML page; UTF-8 where the bytes are valid;
UTF-16 without a mark where zeros alternate; else the best guess of charset-normalizer among common encodings, with its ties between
Western and Central European ones settled by which language's letters the text has.
"""

from __future__ import annotations

import codecs
import io
import re
from dataclasses import dataclass

from masw.documents.record import EncodingNeeded, plural
from masw.errors import UsageError

# Longest first: the UTF-32 mark begins with the UTF-16 one.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# Alphabets of one byte that share letters with each other, in the order of how common they are: it settles ties.
LATIN = ("cp1252", "cp1250", "iso8859_2", "cp1254", "cp1257", "cp850", "cp437", "mac_roman")
GUESSES = (
    *LATIN, "cp1251", "cp1253", "cp1255", "cp1256", "iso8859_5", "iso8859_6", "koi8_r", "cp866", "cp874",
    "cp932", "euc_jis_2004", "iso2022_jp", "gb18030", "big5", "cp949",
)  # fmt: skip
# For a list to choose from; any of Python's text encodings may be given.
ENCODINGS = (
    "utf-8", "utf-16", "cp1252", "latin-1", "iso8859-15", "cp1250", "iso8859-2", "cp1251", "koi8-r", "cp1253", "cp1254", "cp1255",
    "cp1256", "cp1257", "cp874", "shift_jis", "euc_jp", "iso2022_jp", "gb18030", "big5", "euc_kr", "cp437", "cp850", "cp866", "mac_roman",
)  # fmt: skip
_NOT_TEXT = {"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "mbcs", "oem"}

# Letters beyond ASCII of languages that the encodings in LATIN serve.
LETTERS = tuple(
    frozenset(letters + letters.upper())
    for letters in (
        "àâæçèéêëîïôœùûüÿ", "äöüß", "áéíñóúüçàèòï", "áâãàçéêíóôõú", "àèéìíîòóù", "éëïöüèêáóúí", "åäöæøéü", "áðéíóúýþæö",
        "ąćęłńóśźż", "áčďéěíňóřšťúůýžĺľŕäô", "áéíóöőúüű", "čćđšž", "ăâîșțşţ", "çğıiöşüâîû", "ąčęėįšųūž", "āčēģīķļņšūž", "äõöüšž",
    )
)  # fmt: skip
_PUNCTUATION = frozenset("‘’‚“”„«»‹›–—…•·°§©®™€£¥¢¿¡ªº¹²³¼½¾×÷±µ¶†‡\xa0\xad´¨¸¬¯¦")
_CONTROL = bytes(c for c in range(32) if c not in b"\t\n\r\f\v\b\x1b")
_SAMPLE = 2**18  # bytes that detection looks at


@dataclass(frozen=True)
class Decoded:
    text: str
    encoding: str
    detected: str
    warnings: tuple[str, ...] = ()


def is_plain(data: bytes) -> bool:
    """Whether decoding needs no guess: a byte order mark, or valid UTF-8."""
    if any(data.startswith(mark) for mark, _ in MARKS):
        return True
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def head(data: bytes, size: int = 8192) -> str:
    """The beginning of plain text, for a look at it."""
    encoding = next((e for mark, e in MARKS if data.startswith(mark)), "utf-8")
    return data[:size].decode(encoding, "replace")


def decode(data: bytes, name: str, encoding: str | None = None) -> Decoded:
    """`data` in characters; UsageError for what is not text. `name` is for messages."""
    if encoding is not None:
        return Decoded(_strictly(data, _known(encoding), name), encoding, "given")
    for mark, marked in MARKS:
        if data.startswith(mark):
            return Decoded(_strictly(data, marked, name), marked.removesuffix("-sig"), "bom")
    wide = _wide(data)
    if wide is not None:
        return Decoded(_strictly(data, wide, name), wide, "detected")
    _refuse_binary(len(data) - len(data.translate(None, _CONTROL)), len(data), name)
    declared = _declared(data)
    if declared is not None:
        try:
            return Decoded(_strictly(data, declared, name), declared, "declared")
        except UsageError:
            pass  # pages lie about themselves; the bytes decide
    if re.search(rb"\x1b\$[@B]", data):
        try:
            return Decoded(data.decode("iso2022_jp"), "iso2022_jp", "detected")
        except UnicodeDecodeError:
            pass
    try:
        return Decoded(data.decode("utf-8"), "utf-8", "utf-8")
    except UnicodeDecodeError:
        return _damaged_utf8(data) or _guess(data, name)


def _known(encoding: str) -> str:
    try:
        info = codecs.lookup(encoding)
        io.TextIOWrapper(io.BytesIO(), encoding=encoding)  # refuses the codecs that are not text, such as zip
    except (LookupError, ValueError, UnicodeError):
        info = None
    if info is None or info.name.replace("-", "_") in _NOT_TEXT:
        raise EncodingNeeded(
            f"encoding {encoding[:40]!r} is unknown; use one such as {', '.join(ENCODINGS[:6])}, shift_jis, gb18030"
        )
    return info.name


def _strictly(data: bytes, encoding: str, name: str) -> str:
    wide = encoding.startswith(("utf-16", "utf-32", "utf_16", "utf_32"))
    try:
        # A lone surrogate in UTF-16 is one bad character, replaced by `clean`, and no reason to refuse the text.
        return data.decode(encoding, "surrogatepass" if wide else "strict")
    except UnicodeDecodeError as error:
        kind = "UTF-8" if encoding.startswith("utf-8") else encoding.upper()
        where = f"byte {error.start:,}"
    except (UnicodeError, ValueError) as error:  # stateful codecs raise their own
        kind, where = encoding, str(error)[:80]
    raise EncodingNeeded(f"{name} is not {kind} text ({where}); save it as UTF-8, or name another encoding with --encoding")


def _wide(data: bytes) -> str | None:
    """UTF-16 without a mark: in most scripts' text, half of the bytes (of spaces and newlines at least) are zeros, all on one side."""
    head = data[: 2**16]
    if b"\0" not in head or len(data) % 2:
        return None
    even, odd = head[::2].count(0), head[1::2].count(0)
    half = len(head) / 2
    if max(even, odd) > 0.2 * half and min(even, odd) < 0.01 * half:
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _declared(data: bytes) -> str | None:
    """The encoding that an HTML or XML page names in its first bytes."""
    from masw.documents.sniff import is_html

    head = data[:4096].decode("latin-1")
    if not is_html(head):
        return None
    found = re.search(r"<\?xml[^>]*encoding=[\"']([\w:.-]+)", head, re.I) or re.search(
        r"<meta[^>]+charset=[\"'\s]*([\w:.-]+)", head, re.I
    )
    if found is None:
        return None
    label = found[1].lower()
    if label.startswith(("utf-16", "utf-32", "utf-7")):  # the page could not have said so in these bytes
        return None
    # Browsers read these labels as their supersets.
    label = {"iso-8859-1": "cp1252", "latin1": "cp1252", "us-ascii": "cp1252", "gb2312": "gb18030", "shift_jis": "cp932"}.get(
        label, label
    )
    try:
        return None if _known(label).replace("_", "-") == "utf-8" else label
    except UsageError:
        return None


def _damaged_utf8(data: bytes) -> Decoded | None:
    """UTF-8 with few bad bytes: cut within a character, or joined from parts. None where the rest says otherwise."""
    try:
        text = data.decode("utf-8", "surrogatepass")  # surrogates in UTF-8, as some programs write them; joined where paired
        return Decoded(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), "utf-8", "utf-8")
    except UnicodeError:
        text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    good = sum(1 for _ in re.finditer(r"[^\x00-\x7f\ufffd]", text))
    if bad > max(1, good // 50) or good < 8:
        return None
    return Decoded(text, "utf-8", "utf-8", (f"{plural(bad, 'bad character')} in the UTF-8 text replaced",))


def _guess(data: bytes, name: str) -> Decoded:
    from charset_normalizer import from_bytes

    sample = data if len(data) <= _SAMPLE else data[: data.rfind(b"\n", _SAMPLE // 2, _SAMPLE) + 1 or _SAMPLE]
    match = from_bytes(sample, cp_isolation=list(GUESSES)).best()
    encoding = None if match is None else match.encoding
    if _is_euc_jp(sample):
        encoding = "euc_jp"
    elif encoding in LATIN or _is_sparse(sample):
        scores = {e: _latin_score(sample, e) for e in LATIN}
        best = max(LATIN, key=lambda e: scores[e])
        encoding = best if encoding in LATIN or scores[best] > 0.9 else encoding
    if encoding is not None:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            text = data.decode(encoding, "replace")
            bad = text.count("\ufffd")
            if bad > len(text) // 1000:
                encoding = None
    if encoding is None:
        raise EncodingNeeded(
            f"{name} is not a text file (no encoding fits its bytes); if it is one, name its encoding with --encoding"
        )
    bad = text.count("\ufffd")
    notes = (f"{plural(bad, 'character')} not in {encoding} replaced",) if bad else ()
    return Decoded(text, encoding, "detected", notes)


def _is_euc_jp(data: bytes) -> bool:
    """Kana lie where Thai has letters and GB 2312 and KS X 1001 have nearly nothing: a fifth of them says Japanese."""
    try:
        text = data.decode("euc_jp")
    except UnicodeDecodeError:
        return False
    high = sum(1 for c in text if c > "\x7f")
    return sum(1 for c in text if "\u3041" <= c <= "\u30fe") > max(3, high // 5)


def _is_sparse(data: bytes) -> bool:
    """Bytes beyond ASCII stand alone among ASCII letters, as no script but the Latin one has them."""
    high = len(data) - len(data.translate(None, bytes(range(128, 256))))
    lone = len(re.findall(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])", data))
    return lone > 0.8 * high and len(re.findall(rb"[A-Za-z]", data)) > high


def _latin_score(data: bytes, encoding: str) -> float:
    """Share of the characters beyond ASCII that are punctuation in its place or letters of the one language that fits best."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return -1.0
    letters: dict[str, int] = {}
    fine = total = 0
    for found in re.finditer(r"[^\x00-\x7f]", text):
        c, at = found[0], found.start()
        total += 1
        before, after = text[at - 1 : at], text[at + 1 : at + 2]
        if c.isalpha() and c not in "ªºµ":
            # A capital behind a small letter is the mark of a wrong table.
            if not (c.isupper() and before.islower()):
                letters[c] = letters.get(c, 0) + 1
        elif c in _PUNCTUATION:
            fine += not (before.isalpha() and after.isalpha() and c not in "’·–—\xad´…\xa0")
    return (fine + max(sum(n for c, n in letters.items() if c in known) for known in LETTERS)) / max(1, total)


# --- what should not reach a model or a terminal ------------------------------------------------------------------------------------

_ESCAPES = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff\ufffe\uffff]+")
_BREAKS = re.compile("\r\n?|[\f\v\x85\u2028\u2029]")
_OVERRIDES = re.compile("[\u202d\u202e]+")
_BIDI = re.compile("[\u200e\u200f\u061c\u202a-\u202c\u2066-\u2069]+")
_TAG_CHARACTERS = re.compile("[\U000e0000-\U000e007f]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_RTL = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
_BLANK = " \t\n\u3000\xa0\u200b\u200c\u200d\u2060\ufffd"


def clean(text: str) -> tuple[str, tuple[str, ...]]:
    """Text with newlines alone between lines and no invisible commands, and what was taken out.

    Control characters and terminal escapes go; lone surrogates become U+FFFD. Bidirectional overrides, which make a text read
    differently from what it says, and invisible tag characters go; the other bidirectional marks stay in text of a right-to-left script
    and go elsewhere.
    """
    notes = []

    def drop(pattern: re.Pattern[str], what: str) -> None:
        nonlocal text
        shorter = pattern.sub("", text)
        if len(shorter) < len(text):
            notes.append(f"{plural(len(text) - len(shorter), what)} removed")
            text = shorter

    text = _BREAKS.sub("\n", text.removeprefix("\ufeff"))
    text = _ESCAPES.sub("", text)
    drop(_CONTROLS, "control character")
    if text.isascii():
        return text, tuple(notes)
    drop(_OVERRIDES, "bidirectional override")
    drop(_TAG_CHARACTERS, "invisible tag character")
    if not _RTL.search(text):
        drop(_BIDI, "bidirectional mark")
    if _SURROGATES.search(text):
        text, count = _SURROGATES.subn("\ufffd", text)
        notes.append(f"{plural(count, 'lone surrogate')} replaced")
    return text, tuple(notes)


def is_blank(text: str) -> bool:
    return not text.strip(_BLANK).strip()


def refuse_control(text: str, name: str) -> None:
    """Refuses decoded text that is mostly control characters."""
    _refuse_binary(sum(len(run) for run in re.findall("[\x00-\x07\x0e-\x1a\x1c-\x1f]+", text)), len(text), name)


def _refuse_binary(odd: int, total: int, name: str) -> None:
    # Stray control characters are forgiven, a few of them even where they are many for a short text, but not most of a scrap.
    if odd > max(min(16, total // 8), total // 20):
        raise UsageError(
            f"{name} is not a text file (binary: {plural(odd, 'control character')} of {total:,}); give a text, PDF, DOCX, HTML or EPUB file"
        )
