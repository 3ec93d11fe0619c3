"""The report in a browser: nothing goes wrong, nothing is asked of the network, and it can be read on a phone, in the
dark and on paper."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from test_report import Page, curve, images, whole

from fedprior.report.html import render

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome on the PATH"),
]

PHONE, DESK = 390, 1280  # pixels
CONTRAST = 4.5  # of text, WCAG 2.2 level AA


def crowded():
    """Six arms and names as long as they come."""
    classes = ("an_uncommonly_long_class_name_without_a_single_space", "b & c")
    first = whole()
    arms = [
        replace(first.arms[i % 2], name=f"fedavg+balance+adapt+guide ({i})", curves=[curve([0.1, 0.2 + i / 10])] * 3)
        for i in range(6)
    ]
    shown = {name: images(8, side=32) for name in classes}
    bad = [{"client": 1, "reason": "/a/path/that/has/no/place/to/break/" * 5}]
    arms[0].curves[0][0]["refused"] = bad
    return replace(first, arms=arms, classes=classes, real=shown, synthetic=shown, title="x" * 120)


def many_rows():
    rows = np.random.default_rng(0).integers(0, 50, (100, 60))
    return replace(
        whole(),
        arms=[replace(whole().arms[0], confusion=rows[:60] + 1)],
        classes=tuple(f"class {i}" for i in range(60)),
        before=rows,
        after=rows + 1,
        real={},
        synthetic={},
    )


PAGES = {"two arms": whole, "long names": crowded, "many classes": many_rows}


@pytest.fixture(scope="module", params=PAGES)
def page(request):
    data = PAGES[request.param]()
    if request.param == "many classes":
        per_class = [0.5] * len(data.classes)
        data = replace(
            data, arms=[replace(data.arms[0], curves=[curve([0.1, 0.2], per_class=per_class)] * 3, clients=[])]
        )
    return render(data)


def browse(folder, text, *options):
    """Loads a page without a network -> (its DOM afterwards, what its console said, the addresses that were asked)."""
    (folder / "page.html").write_text(text, encoding="utf-8")
    log = folder / "net.json"
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--v=0",
            "--virtual-time-budget=5000",
            f"--log-net-log={log}",
            *options,
            "--dump-dom",
            (folder / "page.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    # an event a line; what the browser asks of its own accord (the time, dictionaries) has no page as its origin
    asked = re.findall(r'"initiator":"(?!not an origin)[^"]*".*?"url":"([^"]+)"', log.read_text())
    return done.stdout, said, {url for url in asked if not url.startswith(("file:", "data:"))}


def framed(page, script, width=PHONE):
    """A page that shows `page` so many pixels wide and then writes what `script`, a function of its document, finds."""
    return (
        f'<!doctype html><meta charset="utf-8"><iframe style="width: {width}px; height: 800px; border: 0" '
        f'srcdoc="{html.escape(page)}"></iframe><pre id="found"></pre>'
        f"<script>const frame = document.querySelector('iframe'); frame.onload = () => {{ "
        f"document.querySelector('#found').textContent = JSON.stringify(({script})(frame.contentDocument)); "
        "};</script>"
    )


def found(dom):
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))


def test_nothing_goes_wrong_and_nothing_is_asked_of_the_network(page, tmp_path):
    dom, said, asked = browse(tmp_path, page)
    assert said == []
    assert asked == set()
    assert Page(page).all("h2")
    assert len(re.findall("<h2", dom)) == len(Page(page).all("h2"))  # the browser kept all of it


def test_a_request_or_an_error_would_be_seen(tmp_path):
    text = "<!doctype html><img src='http://example.org/x.png'><script>console.error('oh')</script>"
    _, said, asked = browse(tmp_path, text)
    assert any("oh" in line for line in said)
    assert asked == {"http://example.org/x.png"}


OVERFLOWING = """(page) => {
  page.querySelectorAll("details").forEach((x) => { x.open = true; });
  const scrolls = (x) => x.closest("svg") || (x.parentElement && x.parentElement.closest(".scroll, pre"));
  const wide = [...page.body.querySelectorAll("*")].filter((x) => !scrolls(x)
    && x.getBoundingClientRect().right > page.documentElement.clientWidth + 0.5);
  return {
    width: page.documentElement.clientWidth,
    needed: page.documentElement.scrollWidth,
    wide: wide.map((x) => x.outerHTML.slice(0, 80)),
  };
}"""


def test_nothing_is_wider_than_a_phone(page, tmp_path):
    dom, _, _ = browse(tmp_path, framed(page, OVERFLOWING), "--hide-scrollbars")
    got = found(dom)
    assert got == {"width": PHONE, "needed": PHONE, "wide": []}


def test_what_is_wider_than_a_phone_would_be_seen(tmp_path):
    text = "<!doctype html><body style='margin: 0'><p style='width: 400px'>x</p>"
    dom, _, _ = browse(tmp_path, framed(text, OVERFLOWING), "--hide-scrollbars")
    assert found(dom)["needed"] == 400
    assert len(found(dom)["wide"]) == 1


SCROLLING = """(page) => {
  page.querySelectorAll("details").forEach((x) => { x.open = true; });
  const all = [...page.querySelectorAll(".scroll")];
  return [all.length, all.filter((x) => x.scrollWidth > x.clientWidth).map((x) => x.innerText.slice(0, 80))];
}"""


@pytest.mark.parametrize("alphas", [(0.05, 0.5), (0.01, 0.05, 0.5)])
def test_tables_of_settings_with_long_names_fit_on_a_desk(alphas, tmp_path):
    data = whole()
    classes = ("zero", "one", "two", "three")
    rows = np.arange(12).reshape(3, 4) + 50
    arms = [
        replace(
            data.arms[i % 2],
            name=f"fedavg+balance (partition.alpha={alpha}, local.lr=0.05)",
            curves=[curve([0.5, 0.9], per_class=[0.5] * 4)] * 3,
            clients=[replace(held, real=rows) for held in data.arms[i % 2].clients],
            confusion=np.full((4, 4), 7),
        )
        for i, alpha in enumerate(alphas)
    ]
    page = render(replace(data, arms=arms, classes=classes, before=rows, after=rows + 1, real={}, synthetic={}))
    dom, _, _ = browse(tmp_path, framed(page, SCROLLING, DESK), f"--window-size={DESK + 50},900", "--hide-scrollbars")
    tables, scrolling = found(dom)
    assert tables == 8
    assert scrolling == []


# the colour of every text and of the nearest ground behind it; numbers in a heat map stand on an image
COLOURS = """(page) => {
  const view = page.defaultView, out = {};
  const ground = (x) => {
    for (; x; x = x.parentElement) {
      const colour = view.getComputedStyle(x).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  page.querySelectorAll("details").forEach((x) => { x.open = true; });
  for (const x of page.body.querySelectorAll("*")) {
    const own = [...x.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const style = view.getComputedStyle(x);
    const colour = x.tagName === "text" ? style.fill : style.color;
    const heat = x.tagName === "text" && ["rgb(0, 0, 0)", "rgb(255, 255, 255)"].includes(colour);
    if (own && !heat && x.tagName !== "TITLE") out[colour + "|" + ground(x)] = x.outerHTML.slice(0, 80);
  }
  return out;
}"""


def luminance(colour):
    """Relative luminance of "rgb(r, g, b)", as WCAG defines it."""
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(scheme, tmp_path):
    option = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    dom, _, _ = browse(tmp_path, framed(render(whole()), COLOURS), option)
    pairs = {tuple(both.split("|")): where for both, where in found(dom).items()}
    grounds = {luminance(ground) for _, ground in pairs}
    assert max(grounds) < 0.05 if scheme == "dark" else min(grounds) > 0.8
    assert len(pairs) > 4
    for (text, ground), where in pairs.items():
        high, low = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= CONTRAST, (text, ground, where)


def test_what_is_folded_away_is_printed(tmp_path):
    def pages(text):
        out = tmp_path / "out.pdf"
        browse(tmp_path, text, f"--print-to-pdf={out}")
        return len(re.findall(rb"/Type\s*/Page\b", out.read_bytes()))

    long = render(replace(whole(), config='key = "value"\n' * 200))  # some three sheets
    assert pages(long) >= pages(render(whole())) + 2
