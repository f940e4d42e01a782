"""How a notebook shows what was generated: a table of the rows, and the histogram of accepted drafts."""

import html
from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 200  # characters of a text


def generation_html(stats: Any, texts: Sequence[str] | None, token_ids: Sequence[Sequence[int]], finish_reasons: Sequence[str]) -> str:
    """The fields of a `Generation` as HTML; stats: its `Stats`."""
    heads = ("", "text", "new tokens", "ended by", "accepted / drafted", "tokens a round", "rounds", "flushes")
    rows = []
    for i, (row, ids, reason) in enumerate(zip(stats.rows, token_ids, finish_reasons, strict=True)):
        text = ", ".join(map(str, ids)) if texts is None else texts[i]
        shown = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
        counts = f"{row.num_accepted_draft_tokens} / {row.num_draft_tokens}"
        rate = "-" if row.draft_acceptance_rate is None else f"{row.draft_acceptance_rate:.1%} ({counts})"
        length = "-" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}"
        cells = (str(i), shown, f"{row.new_tokens:,}", reason, rate, length, f"{row.num_spec_steps:,}", f"{row.flushes:,}")
        cell = '<td style="text-align: left; white-space: pre-wrap; max-width: 40em">{}</td>'
        rows.append("<tr>" + "".join(cell.format(html.escape(each)) for each in cells) + "</tr>")
    head = "".join(f'<th style="text-align: left">{each}</th>' for each in heads)
    times = f"{stats.tokens_per_second:,.1f} tokens/s; prefill {stats.prefill_s:.2f} s, decode {stats.decode_s:.2f} s"
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{_histogram(stats.acceptance_histogram)}<p>{times}</p>"


def _histogram(counts: Sequence[int]) -> str:
    """A bar for each number of accepted drafts; nothing without drafts."""
    if not counts:
        return ""
    rounds, bars = sum(counts) or 1, []
    for accepted, count in enumerate(counts):
        bar = f'<div style="background: #2a7f62; height: 0.8em; width: {18 * count / rounds:.2f}em"></div>'
        cells = f"{accepted}", bar, f"{count:,} ({count / rounds:.0%})"
        bars.append("<tr>" + "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells) + "</tr>")
    head = '<tr><th style="text-align: left">drafts accepted</th><th></th><th style="text-align: left">rounds</th></tr>'
    return f"<table>{head}{''.join(bars)}</table>"
