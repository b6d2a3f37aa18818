"""The page that `profile` writes: figures as one HTML file with plots, which needs nothing beside it.

Owns how figures look, and nothing of how they come about; it imports no Spark.  Invariants:

- The page is whole: no script, no font, picture or style from elsewhere, so it may be opened from a disk or sent by mail.
- Topics, tags, keys and paths are what producers made of them.  All text goes through `shown`, which escapes what HTML gives a
  meaning and makes control and other invisible characters visible.
- Every plot has a title and a description that are read out, and a table or tips with its numbers.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Figures", "KeyFigures", "TopKey", "VolumeFigures", "page", "shown"]

_WIDTH, _HEIGHT = 920, 200
# So many bars can be told apart, and so many rows are read.
_MOST_BARS = 168
_MOST_ROWS = 30
_TEXT_SHOWN = 60
_HOUR = 3_600_000
# Hours in a bar of the plots over time.
_STEPS = (1, 2, 3, 6, 12, 24, 48, 168, 720, 2160, 8760)
# What lies outside of this share of the messages, on each side, does not stretch the axis of time.
_OUTLIERS = 0.001


@dataclass(frozen=True)
class VolumeFigures:
    """Sums over the messages of a topic, a tag or an hour, or over all.

    Attributes
    ----------
    messages, bytes : int
        Records, and bytes of the log that they take.
    body_bytes, stored_bytes : int
        Of bodies, decompressed and as they are stored.
    compressed, compressed_body_bytes, compressed_stored_bytes : int
        Messages whose body is compressed and could be decompressed, and the bytes of these alone.
    undecoded : int
        Messages whose body could not be decompressed; `body_bytes` does not have them.
    """

    messages: int = 0
    bytes: int = 0
    body_bytes: int = 0
    stored_bytes: int = 0
    compressed: int = 0
    compressed_body_bytes: int = 0
    compressed_stored_bytes: int = 0
    undecoded: int = 0


@dataclass(frozen=True)
class KeyFigures:
    """Keys of a topic.

    Attributes
    ----------
    topic : str
    messages, keys : int
        Messages that have keys, and how many keys they have together.
    distinct : int
        Different keys, estimated.
    """

    topic: str
    messages: int
    keys: int
    distinct: int


@dataclass(frozen=True)
class TopKey:
    """A key that many messages have: at least `messages`, at most `messages` + `uncounted`."""

    topic: str
    key: str
    messages: int
    uncounted: int


@dataclass(frozen=True)
class Figures:
    """What the page shows.

    Attributes
    ----------
    path : str
        The store.
    made_at : int
        When the figures were made, ms since epoch.
    total : VolumeFigures
    topics, tags : list
        (topic, VolumeFigures) and (topic, tag or None, VolumeFigures), the largest first; `topic_num` and `tag_num` say how
        many there are, where not all are listed.
    hours : list of (int, int, int)
        (ms since epoch at which an hour begins, messages, bytes), ascending.
    sizes : list of (int, int)
        (b, messages): bodies of 2**(b-1) to 2**b - 1 bytes, of none for b = 0; ascending.
    keys : list of KeyFigures
    top_keys : list of TopKey
    damaged, damaged_bytes : int
        Stretches of the log that hold no whole record, and their bytes.
    options : dict of str to str
        What was asked for beside the path.
    """

    path: str
    made_at: int
    total: VolumeFigures
    topics: Sequence[tuple[str, VolumeFigures]]
    topic_num: int
    tags: Sequence[tuple[str, str | None, VolumeFigures]]
    tag_num: int
    hours: Sequence[tuple[int, int, int]]
    sizes: Sequence[tuple[int, int]]
    keys: Sequence[KeyFigures] = ()
    top_keys: Sequence[TopKey] = ()
    damaged: int = 0
    damaged_bytes: int = 0
    options: dict[str, str] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------- texts


def shown(text: str | None, most: int = _TEXT_SHOWN) -> str:
    """str: `text` as HTML that says nothing but this text; longer ones are cut, invisible characters are spelt out."""
    if text is None:
        return "<i>none</i>"
    if text == "":
        return "<i>empty</i>"
    cut = text if len(text) <= most else text[: most - 1] + "…"
    visible = "".join(char if char.isprintable() else f"\\u{{{ord(char):x}}}" for char in cut)
    return html.escape(visible)


def _count(number: float) -> str:
    # Thin spaces between groups of three.
    return f"{number:,.0f}".replace(",", "\u202f")


def _short(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}\u202f{unit}"
    return f"{number:.3g}"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024:
            return f"{number:.0f}\u202fB" if unit == "B" else f"{number:.3g}\u202f{unit}"
        number /= 1024
    return f"{number:,.4g}\u202fPiB"


def _share(part: float, of: float) -> str:
    if not of or part == of:
        return "100\u202f%" if of else "–"
    percent = 100 * part / of
    return "&lt;\u202f0.01\u202f%" if 0 < percent < 0.01 else f"{percent:.3g}\u202f%"


def _time(timestamp: int) -> str:
    try:
        moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=timestamp)
    except OverflowError:
        return f"{timestamp} ms"
    return moment.strftime("%Y-%m-%d %H:%M")


# --------------------------------------------------------------------------------------------------------------- plots


def _nice(highest: float) -> float:
    # The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is not below a quarter of `highest`: four lines at most.
    power = 1.0
    quarter = max(highest / 4, 0.25)
    while power * 10 <= quarter:
        power *= 10
    while power > quarter:
        power /= 10
    return next(power * by for by in (1, 2, 2.5, 5, 10) if power * by >= quarter)


class _Plot:
    """An SVG with a title and a description; parts are added, `text` ends it."""

    number = 0

    def __init__(self, title: str, description: str):
        _Plot.number += 1
        self._parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="p{_Plot.number}t p{_Plot.number}d">'
            f'<title id="p{_Plot.number}t">{html.escape(title)}</title>'
            f'<desc id="p{_Plot.number}d">{html.escape(description)}</desc>'
        ]

    def text_at(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "label") -> None:
        """A text that is HTML already."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{text}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def bar(self, x: float, y: float, width: float, height: float, tip: str) -> None:
        """A bar with a tip, which is HTML already."""
        rounded = min(2.5, width / 3, height / 2)
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{max(height, 0):.1f}" rx="{rounded:.1f}" '
            f'class="bar"><title>{tip}</title></rect>'
        )

    def text(self) -> str:
        return "".join([*self._parts, "</svg>"])


def _columns(
    plot: _Plot, bars: Sequence[tuple[float, str]], ticks: dict[int, str], of: str, sizes: bool = False
) -> str:
    # Upright bars (value, tip), side by side; `ticks` are the labels below by the number of the bar, `of` names the values.
    left, top, bottom = 64, 32, _HEIGHT - 26
    highest = max((value for value, _ in bars), default=0) or 1
    if sizes:
        unit = 1
        while unit * 1024 <= highest:
            unit *= 1024
        step = _nice(highest / unit) * unit
    else:
        step = max(_nice(highest), 1)
    top_value = max(step, -(-highest // step) * step)
    plot.text_at(0, 13, html.escape(of), kind="axis")
    line = 0.0
    while line <= top_value:
        y = bottom - (bottom - top) * line / top_value
        plot.line(left, y, _WIDTH, y, "base" if line == 0 else "grid")
        plot.text_at(left - 8, y + 4, _size(line) if sizes else _short(line), "end")
        line += step
    each = (_WIDTH - left) / max(len(bars), 1)
    gap = min(each * 0.2, 6)
    for number, (value, tip) in enumerate(bars):
        tall = (bottom - top) * value / top_value
        if value:
            tall = max(tall, 1)
        plot.bar(left + number * each + gap / 2, bottom - tall, min(each - gap, 60), tall, tip)
    for number, label in ticks.items():
        x = left + number * each + min(each, 60 + gap) / 2
        # A label at the edge stays inside.
        x = min(max(x, left + 24), _WIDTH - 36)
        plot.text_at(x, bottom + 17, html.escape(label), "middle")
    return plot.text()


def _over_time(figures: Figures) -> str:
    hours = [each for each in figures.hours if each[1]]
    if not hours:
        return "<p>No messages.</p>"
    total = sum(messages for _, messages, _ in hours)
    first, last, seen = None, hours[-1][0], 0
    for hour, messages, _ in hours:
        seen += messages
        if first is None and seen > total * _OUTLIERS:
            first = hour
        if seen >= total * (1 - _OUTLIERS):
            last = hour
            break
    assert first is not None
    span = (last - first) // _HOUR + 1
    step = next((step for step in _STEPS if span <= step * _MOST_BARS), -(-span // _MOST_BARS)) * _HOUR
    first -= first % step
    sums = [[0, 0] for _ in range((last - first) // step + 1)]
    outside = 0
    for hour, messages, size in hours:
        place = (hour - first) // step
        if 0 <= place < len(sums):
            sums[place][0] += messages
            sums[place][1] += size
        else:
            outside += messages
    if len(sums) == 1:
        return f"<p>All messages were stored within one hour, from {_time(first)} UTC on.</p>"
    starts = [first + number * step for number in range(len(sums))]
    midnights = {number: _time(start)[:10] for number, start in enumerate(starts) if start % (24 * _HOUR) == 0}
    if len(midnights) > 1:
        ticks = dict(list(midnights.items())[:: -(-len(midnights) // 8)])
    else:
        ticks = {number: _time(starts[number]) for number in range(0, len(sums), max(len(sums) // 6, 1))}
    unit = step // _HOUR
    each = "hour" if unit == 1 else "day" if unit == 24 else f"{unit // 24} days" if unit % 24 == 0 else f"{unit} hours"
    span_text = f"from {_time(first)} to {_time(last + _HOUR)} UTC"
    parts = []
    for place, what, sizes in ((0, f"messages per {each}", False), (1, f"bytes per {each}", True)):
        bars = [
            (each_sum[place], f"{_time(start)}: {_count(each_sum[0])} messages, {_size(each_sum[1])}")
            for start, each_sum in zip(starts, sums)
        ]
        highest = max(range(len(sums)), key=lambda number, place=place: sums[number][place])  # type: ignore[misc]
        most = _size(sums[highest][1]) if sizes else _count(sums[highest][0])
        plot = _Plot(what.capitalize(), f"{what}, {span_text}; most, {most}, at {_time(starts[highest])}")
        parts.append(_columns(plot, bars, ticks, what, sizes))
    if outside:
        parts.append(f'<p class="note">{_count(outside)} messages with far earlier or later times are not drawn.</p>')
    return "".join(f"<figure>{part}</figure>" if part.startswith("<svg") else part for part in parts)


def _sizes(figures: Figures) -> str:
    if not figures.sizes:
        return "<p>No messages.</p>"
    by_bucket = dict(figures.sizes)
    buckets = list(range(min(by_bucket), max(by_bucket) + 1))
    bars = []
    for bucket in buckets:
        low, high = (0, 0) if bucket == 0 else (2 ** (bucket - 1), 2**bucket - 1)
        messages = by_bucket.get(bucket, 0)
        of = f"{_size(low)} to {_size(high)}" if bucket > 1 else _size(low)
        bars.append((messages, f"{of}: {_count(messages)} messages, {_share(messages, figures.total.messages)}"))
    ticks = {number: "0" if not bucket else f"≥ {_size(2 ** (bucket - 1))}" for number, bucket in enumerate(buckets)}
    if len(ticks) > 12:
        ticks = {number: label for number, label in ticks.items() if number % 2 == 0}
    average = figures.total.body_bytes / max(figures.total.messages - figures.total.undecoded, 1)
    plot = _Plot(
        "Sizes of bodies",
        f"Number of messages by the size of their decompressed body, in steps of powers of two; on average {_size(average)}",
    )
    return f"<figure>{_columns(plot, bars, ticks, 'messages by size of body')}</figure>"


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table of cells that are HTML already; the first `texts` columns are texts, the others numbers."""
    parts = [f'<div class="scroll"><table><caption>{html.escape(caption)}</caption><thead><tr>']
    parts += [
        f'<th scope="col"{"" if number < texts else " class=n"}>{html.escape(title)}</th>'
        for number, title in enumerate(header)
    ]
    parts.append("</tr></thead><tbody>")
    for row in rows:
        cells = [
            f'<th scope="row">{cell}</th>' if number == 0 else f"<td{'' if number < texts else ' class=n'}>{cell}</td>"
            for number, cell in enumerate(row)
        ]
        parts.append(f"<tr>{''.join(cells)}</tr>")
    parts.append("</tbody></table></div>")
    return "".join(parts)


def _more(num: int, of: str) -> str:
    # Below a table from which this many are left out.
    return f'<p class="note">and {_count(num)} more {of}; the Parquet files have all of them.</p>' if num > 0 else ""


def _bar_cell(value: float, highest: float, text: str) -> str:
    # A bar inside a cell, below its number.
    width = 100 * value / highest if highest else 0
    return (
        f'<span class="cell"><svg class="in" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar" width="{width:.2f}" height="10"/></svg><span>{text}</span></span>'
    )


def _volume_rows(rows: Sequence[tuple[list[str], VolumeFigures]], total: VolumeFigures) -> Iterable[list[str]]:
    most_messages = max((volume.messages for _, volume in rows), default=0)
    most_bytes = max((volume.bytes for _, volume in rows), default=0)
    for names, volume in rows:
        yield [
            *names,
            _bar_cell(volume.messages, most_messages, _count(volume.messages)),
            _share(volume.messages, total.messages),
            _bar_cell(volume.bytes, most_bytes, _size(volume.bytes)),
            _share(volume.bytes, total.bytes),
            _size(volume.bytes / volume.messages) if volume.messages else "–",
        ]


_VOLUME_HEADER = ("messages", "share", "bytes of log", "share", "per message")


def _topics(figures: Figures) -> str:
    listed = figures.topics[:_MOST_ROWS]
    return _table(
        "Topics by bytes of the log",
        ("topic", *_VOLUME_HEADER),
        _volume_rows([([shown(topic)], volume) for topic, volume in listed], figures.total),
    ) + _more(figures.topic_num - len(listed), "topics")


def _tags(figures: Figures) -> str:
    listed = figures.tags[:_MOST_ROWS]
    return _table(
        "Tags by messages",
        ("tag", "topic", *_VOLUME_HEADER),
        _volume_rows([([shown(tag), shown(topic)], volume) for topic, tag, volume in listed], figures.total),
        texts=2,
    ) + _more(figures.tag_num - len(listed), "pairs of topic and tag")


def _compression(figures: Figures) -> str:
    total = figures.total
    if not total.compressed:
        left = f" ({_count(total.undecoded)} could not be decompressed)" if total.undecoded else ""
        return f"<p>No body is compressed{left}.</p>"
    rows = []
    for topic, volume in figures.topics[:_MOST_ROWS]:
        if volume.compressed:
            rows.append(
                [
                    shown(topic),
                    _bar_cell(volume.compressed, volume.messages, _share(volume.compressed, volume.messages)),
                    _size(volume.compressed_body_bytes),
                    _size(volume.compressed_stored_bytes),
                    _bar_cell(
                        volume.compressed_stored_bytes,
                        volume.compressed_body_bytes,
                        _share(volume.compressed_stored_bytes, volume.compressed_body_bytes),
                    ),
                ]
            )
    saved = total.compressed_body_bytes - total.compressed_stored_bytes
    text = (
        f"<p>{_share(total.compressed, total.messages)} of the bodies are compressed, to "
        f"{_share(total.compressed_stored_bytes, total.compressed_body_bytes)} of their size on average; that saves "
        f"{_size(saved)}.</p>"
        if saved >= 0
        else f"<p>{_share(total.compressed, total.messages)} of the bodies are compressed; that costs {_size(-saved)}.</p>"
    )
    if total.undecoded:
        text += f'<p class="note">{_count(total.undecoded)} bodies could not be decompressed.</p>'
    header = ("topic", "compressed", "their bodies", "as stored", "of their size")
    return text + _table("Compressed bodies", header, rows)


def _keys(figures: Figures) -> str:
    if not any(each.keys for each in figures.keys):
        return "<p>No message has keys.</p>"
    messages = {topic: volume.messages for topic, volume in figures.topics}
    rows = []
    listed = figures.keys[:_MOST_ROWS]
    for each in listed:
        of = messages.get(each.topic, 0)
        rows.append(
            [
                shown(each.topic),
                _share(each.messages, of) if of else _count(each.messages),
                _count(each.keys),
                "≈ " + _count(min(each.distinct, each.keys)),
                f"{each.keys / each.distinct:.3g}" if each.distinct else "–",
            ]
        )
    parts = [
        _table(
            "Keys of topics",
            ("topic", "messages with keys", "keys", "different keys", "messages per key"),
            rows,
        ),
        _more(len(figures.keys) - len(listed), "topics"),
    ]
    if figures.top_keys:
        most = max(each.messages for each in figures.top_keys)
        parts.append(
            _table(
                "Keys that most messages have",
                ("key", "topic", "messages"),
                [
                    [
                        shown(each.key),
                        shown(each.topic),
                        _bar_cell(
                            each.messages,
                            most,
                            _count(each.messages)
                            + (f" to {_count(each.messages + each.uncounted)}" if each.uncounted else ""),
                        ),
                    ]
                    for each in figures.top_keys[:_MOST_ROWS]
                ],
                texts=2,
            )
        )
    return "".join(parts)


_STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1d2433;--soft:#5d6778;--line:#e3e7ee;--panel:#f6f8fb;
--bar:#2f6fde;--warn:#9a4b00}
@media (prefers-color-scheme:dark){:root{--back:#12161d;--ink:#e8ecf3;--soft:#9aa6b8;--line:#2a313d;--panel:#1a202a;
--bar:#6fa3ff;--warn:#ffb56b}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px}h2{font-size:19px;margin:44px 0 12px}
p{margin:0 0 12px}.sub,.note,caption{color:var(--soft)}.note{font-size:13px;margin-top:8px}.warn{color:var(--warn);font-weight:600}
code{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:24px 0 0;padding:0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile dt{color:var(--soft);font-size:13px}
.tile dd{margin:2px 0 0;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}
.tile dd small{display:block;font-size:12px;font-weight:400;color:var(--soft)}
figure{margin:0 0 14px}figure svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;margin-bottom:20px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;font-size:13px;padding-bottom:6px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:middle}
thead th{font-size:13px;font-weight:500;color:var(--soft);white-space:nowrap}
tbody th{font-weight:500;overflow-wrap:anywhere;min-width:9em;unicode-bidi:isolate}
td{unicode-bidi:isolate;overflow-wrap:anywhere}.n{text-align:right;white-space:nowrap}
.cell{display:flex;align-items:center;justify-content:flex-end;gap:10px}
.cell .in{width:90px;height:10px;flex:none;background:var(--panel);border-radius:3px}
.cell>span{min-width:5.5em;text-align:right}.bar{fill:var(--bar)}.bar:hover{opacity:.75}.grid{stroke:var(--line)}.base{stroke:var(--soft)}
.label,.axis{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}.axis{fill:var(--ink)}
footer{margin-top:48px;color:var(--soft);font-size:13px;border-top:1px solid var(--line);padding-top:12px}
@media print{.tile,figure,tr{break-inside:avoid}}
""".strip()


def _tiles(figures: Figures) -> str:
    total = figures.total
    bodies = total.messages - total.undecoded
    tiles = [
        (
            "messages",
            _short(total.messages) if total.messages >= 1e6 else _count(total.messages),
            _count(total.messages),
        ),
        ("bytes of log", _size(total.bytes), f"{_count(total.bytes)} B"),
        ("topics", _count(figures.topic_num), ""),
        ("body, on average", _size(total.body_bytes / bodies) if bodies else "–", f"{_size(total.body_bytes)} in all"),
        ("compressed", _share(total.compressed, total.messages), "of the bodies"),
    ]
    if figures.keys:
        distinct = sum(min(each.distinct, each.keys) for each in figures.keys)
        tiles.append(
            ("different keys", f"≈ {_short(distinct)}", f"of {_count(sum(each.keys for each in figures.keys))}")
        )
    parts = [
        f"<div class=tile><dt>{title}</dt><dd>{value}{f'<small>{more}</small>' if more and more != value else ''}</dd></div>"
        for title, value, more in tiles
    ]
    return f'<dl class="tiles">{"".join(parts)}</dl>'


def page(figures: Figures) -> str:
    """str: the figures as one HTML file.

    Parameters
    ----------
    figures : Figures
    """
    _Plot.number = 0
    hours = [hour for hour, messages, _ in figures.hours if messages]
    span = f"stored from {_time(hours[0])} to {_time(hours[-1] + _HOUR)} UTC" if hours else "without messages"
    asked = "".join(f"; {shown(name)} = {shown(value)}" for name, value in sorted(figures.options.items()))
    damage = (
        f'<p class="warn">{_count(figures.damaged)} damaged stretches or records of {_size(figures.damaged_bytes)} are in none '
        "of the figures.</p>"
        if figures.damaged
        else ""
    )
    sections = [
        ("Over time", _over_time(figures)),
        ("Topics", _topics(figures)),
        ("Tags", _tags(figures)),
        ("Sizes of bodies", _sizes(figures)),
        ("Compression", _compression(figures)),
        ("Keys", _keys(figures)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{text}</section>" for title, text in sections)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Whatever a text might do, nothing is loaded and nothing is run.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Profile of {shown(figures.path, 200)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>What is in this store</h1><p class="sub"><code>{shown(figures.path, 400)}</code><br>{span}{asked}</p>{damage}'
        f"{_tiles(figures)}{body}"
        f"<footer>Made by rmqstore on {_time(figures.made_at)} UTC. Times are UTC, sizes in units of 1024 bytes. A message is a "
        "record of the log, an inner batch one of them; bytes of log are those of whole records.</footer></main></body></html>\n"
    )
