"""One self-contained page of executed notebooks: contents, headline numbers, text, code, figures with alt text and table twins.

plotly.js is in it once; a content security policy keeps the page from asking any host for anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from masw.report.display import ENVIRONMENT_MIME, PLOTLY_MIME, headline_text, value_text
from masw.report.extras import need

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
_STATUS = {"ok": "complete", "failed": "stopped at an error", "timeout": "ran out of time", "dead": "kernel died"}


@dataclass
class _Body:
    """What one notebook becomes; `sections` are (anchor, text) of its second-level headings."""

    html: list[str] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)


def page(sidecar: Mapping[str, Any], notebooks: Mapping[str, Any]) -> str:
    """The page for a side-car (see `masw.report.sidecar`) and its executed notebooks by name."""
    need("plotly", "mistune", "pygments", "nbconvert")
    from plotly.offline import get_plotlyjs
    from pygments.formatters import HtmlFormatter

    bodies = {name: _body(name, notebook) for name, notebook in notebooks.items()}
    about = {entry["name"]: entry for entry in sidecar["notebooks"]}
    here = files("masw.report")
    colours = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(':root[data-theme="dark"] .code')
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(sidecar['title'])}</title>",
        f"<style>{colours}\n{dark}\n{(here / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">Skip to the notebooks</a>',
        _head(sidecar),
        _contents(bodies, about),
        _numbers(sidecar["notebooks"]),
        '<main id="main">',
    ]
    for name, body in bodies.items():
        parts.append(f'<article id="{_anchor(name)}" aria-labelledby="{_anchor(name)}-title">')
        if about[name]["status"] != "ok":
            parts.append(f'<p class="failed" role="note">{escape(about[name]["error"])}</p>')
        parts += [*body.html, '<p class="back"><a href="#contents">Back to contents</a></p></article>']
    parts.append("</main>")
    if any(PLOTLY_MIME in output.get("data", {}) for n in notebooks.values() for output in _outputs(n)):
        library = get_plotlyjs().replace("</script", "<\\/script")
        parts.append(f"<script>{library}</script>")
    parts.append(f"<script>{(here / 'page.js').read_text(encoding='utf-8')}</script>\n</body>\n</html>\n")
    return "\n".join(parts)


def _head(sidecar: Mapping[str, Any]) -> str:
    environment = sidecar["environment"]
    facts = " · ".join(
        escape(str(fact))
        for fact in (
            sidecar["created"],
            f"masw {environment['masw']}" + (f" ({environment['commit']})" if environment.get("commit") else ""),
            environment["device"],
            f"torch {environment['torch']}",
        )
    )
    return (
        f"<header><div><h1>{escape(sidecar['title'])}</h1><p>{facts}</p></div>"
        '<button type="button" id="theme" aria-pressed="false">Dark colours</button></header>'
    )


def _contents(bodies: Mapping[str, _Body], about: Mapping[str, Any]) -> str:
    rows = []
    for name, body in bodies.items():
        entry = about[name]
        inner = "".join(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in body.sections)
        mode = f"{entry['parameters'].get('mode')} mode, " if entry["parameters"].get("mode") else ""
        rows.append(
            f'<li><a href="#{_anchor(name)}">{escape(entry["title"])}</a> <span class="aside">{escape(name)}: {mode}'
            f"{_STATUS.get(entry['status'], entry['status'])}, {entry['seconds']:.1f} s</span>"
            + (f"<p>{escape(entry['summary'])}</p>" if entry.get("summary") else "")
            + (f"<ul>{inner}</ul>" if inner else "")
            + "</li>"
        )
    return (
        f'<nav id="contents" aria-labelledby="contents-title"><h2 id="contents-title">Contents</h2><ol>{"".join(rows)}</ol></nav>'
    )


def _numbers(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for entry in entries:
        for record in entry["headlines"]:
            value, aside = value_text(record), headline_text(record).partition(" (")[2].removesuffix(")")
            rows.append(
                f'<tr><th scope="row">{escape(record["name"])}</th><td>{escape(value)}</td><td>{record["kind"]}</td>'
                f'<td>{escape(aside)}</td><td><a href="#{_anchor(entry["name"])}">{escape(entry["name"])}</a></td></tr>'
            )
    if not rows:
        return ""
    return (
        '<section aria-labelledby="numbers"><h2 id="numbers">Headline numbers</h2><p>A value repeats exactly with the same parameters; '
        "a timing depends on the machine; a prediction comes from a formula.</p><details><summary>All "
        f'{len(rows)} numbers</summary><div class="masw-scroll" tabindex="0" role="region" aria-label="Headline numbers"><table><thead><tr>'
        '<th scope="col">number</th><th scope="col">value</th><th scope="col">kind</th><th scope="col">n, spread, note</th>'
        f'<th scope="col">notebook</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></details></section>'
    )


def _body(name: str, notebook: Any) -> _Body:
    body, figures = _Body(), 0
    markdown = _markdown(name, body.sections)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "papermill-error-cell-tag" in tags:
            continue
        if cell.cell_type == "markdown":
            body.html.append(markdown(cell.source))
            continue
        if cell.cell_type != "code":
            continue
        if cell.source.strip():
            label = "Values of this run" if "injected-parameters" in tags else "Parameters" if "parameters" in tags else "Code"
            body.html.append(f"<details class='input'><summary>{label}</summary>{_code(cell.source)}</details>")
        for output in cell.get("outputs", []):
            figures += PLOTLY_MIME in output.get("data", {})
            body.html.append(_output(output, f"{_anchor(name)}-figure-{figures}"))
    if not any("<h2" in part for part in body.html):
        body.html.insert(0, f'<h2 id="{_anchor(name)}-title">{escape(name)}</h2>')
    return body


def _output(output: Any, figure_id: str) -> str:
    from nbconvert.filters import ansi2html

    if output.output_type == "stream":
        return f'<pre class="stream" tabindex="0">{ansi2html(output.text)}</pre>'
    if output.output_type == "error":
        return f'<pre class="stream failed" tabindex="0">{ansi2html(chr(10).join(output.traceback))}</pre>'
    data, about = output.data, output.get("metadata", {})
    if PLOTLY_MIME in data:
        alt = about.get(PLOTLY_MIME, {}).get("masw", {}).get("alt") or "Figure without a description."
        # "<" never stands in the data as such, so that no text of a token can close the element.
        packed = json.dumps(data[PLOTLY_MIME], separators=(",", ":")).replace("<", "\\u003c")
        title = data[PLOTLY_MIME].get("layout", {}).get("title", {}).get("text", "")
        title = _unescape(re.sub(r"<[^>]+>", " ", title))
        heading = f'<p class="plot-title">{escape(title)}</p>' if title else ""
        height = data[PLOTLY_MIME].get("layout", {}).get("height") or 450
        return (
            f'<figure id="{figure_id}">{heading}<p class="sr" id="{figure_id}-alt">{escape(alt)}</p>'
            f'<div class="wide" tabindex="0"><div class="plot" role="group" aria-roledescription="figure" aria-describedby="{figure_id}-alt" '
            f'aria-label="{escape(title) or "Figure"}" style="min-height:{int(height)}px"></div></div>'
            f'<script type="application/json">{packed}</script></figure>'
        )
    if "text/html" in data:
        kind = "card" if ENVIRONMENT_MIME in data else "html"
        return f'<div class="output {kind}">{data["text/html"]}</div>'
    for mime in ("image/png", "image/jpeg"):
        if mime in data:
            alt = escape(about.get(mime, {}).get("alt", "Image without a description."))
            return f'<img alt="{alt}" src="data:{mime};base64,{"".join(data[mime].split())}">'
    return f'<pre class="stream" tabindex="0">{escape(data["text/plain"])}</pre>' if "text/plain" in data else ""


def _code(source: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    made: str = highlight(source, PythonLexer(), HtmlFormatter(cssclass="code"))
    return made.replace('<div class="code"><pre>', '<div class="code"><pre tabindex="0">', 1)


def _markdown(name: str, sections: list[tuple[str, str]]) -> Any:
    """Markdown to HTML; the page's own heading is above, so that a notebook's `#` becomes <h2>."""
    import mistune

    used: set[str] = {f"{_anchor(name)}-title"}

    class Renderer(mistune.HTMLRenderer):
        def heading(self, text: str, level: int, **attrs: Any) -> str:
            plain = re.sub(r"<[^>]+>", "", text)
            if level == 1 and not any(anchor.endswith("-title") for anchor in seen):
                anchor = f"{_anchor(name)}-title"
            else:
                anchor = base = f"{_anchor(name)}-{_anchor(plain)}"
                count = 1
                while anchor in used:
                    count += 1
                    anchor = f"{base}-{count}"
                if level == 2:
                    sections.append((anchor, _unescape(plain)))
            used.add(anchor)
            seen.add(anchor)
            return f'<h{min(level + 1, 6)} id="{anchor}">{text}</h{min(level + 1, 6)}>\n'

        def block_code(self, code: str, info: str | None = None) -> str:
            return f'<pre class="stream" tabindex="0">{escape(code)}</pre>\n'

        def table(self, text: str) -> str:
            return f'<div class="masw-scroll" tabindex="0" role="region" aria-label="Table"><table>{text}</table></div>\n'

    seen: set[str] = set()
    renderer = Renderer(escape=False)
    made = mistune.create_markdown(renderer=renderer, plugins=["table", "strikethrough"])
    return made


def _unescape(text: str) -> str:
    from html import unescape

    return unescape(text)


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", _unescape(text).lower()).strip("-") or "section"


def _outputs(notebook: Any) -> Iterable[Any]:
    return (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.get("outputs", []))
