"""Look at the built pages as readers do: on a desk and on a telephone, in light and in dark.

    sphinx-build -W docs docs/_build/html
    python docs/check_pages.py                       prints every fault, exits 1 if there is one
    python docs/check_pages.py --shots shots         keeps a picture of each page as well

Needs playwright (``python -m pip install playwright``) and a Chromium: that of the system, or the
one that ``--chromium`` names. Nothing is fetched: a page that asks for anything beyond its own
files is a fault.

Checked on every page and in every form:

- no page scrolls sideways, and no picture is wider than the page or too small to read;
- a table that is wider than the page fades where it goes on; code on a telephone is never wider;
- every link and anchor within the pages leads somewhere;
- every picture has a text, every page one title, a language, headings that skip no level;
- text stands out from what is behind it (WCAG AA, 4.5 to 1; 3 to 1 where it is large);
- by the keyboard: the first stop is the link to the content, and what has the focus shows it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

HERE = Path(__file__).parent
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
SCHEMES = ("light", "dark")
# Pages that Sphinx makes and nobody reads from top to bottom.
MACHINE_MADE = {"genindex.html", "search.html"}

FACTS = """() => {
  const article = document.querySelector('.bd-article') || document.body;
  const wide = [...article.querySelectorAll('*')].filter(e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let p = e.parentElement; p; p = p.parentElement) {
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
    }
    return true;
  });
  const beyond = [...article.querySelectorAll('table, pre')].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && e.getClientRects().length
    && parseFloat(getComputedStyle(e).getPropertyValue('--goes-on')) < 8);
  const code = [...article.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth + 1);
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = c => {
    const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || (c.length === 4 && c[3] > 0.95)) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const faint = {};
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, style = getComputedStyle(e);
    if (!walker.currentNode.textContent.trim() || !e.getClientRects().length) continue;
    if (style.visibility === 'hidden' || +style.opacity < 1 || e.closest('.headerlink')) continue;
    const [a, b] = [light(rgb(style.color).slice(0, 3)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && +style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      faint[`${e.tagName.toLowerCase()}.${e.className} ${style.color}`] = ratio.toFixed(1);
    }
  }
  return {
    scroll: document.documentElement.scrollWidth, inner: innerWidth,
    wide: wide.slice(0, 3).map(e => e.outerHTML.slice(0, 120)),
    beyond: beyond.slice(0, 3).map(e => e.innerText.slice(0, 60)),
    code: code.slice(0, 3).map(e => e.innerText.slice(0, 60)),
    pictures: [...article.querySelectorAll('img')].map(e => ({
      src: e.getAttribute('src'), alt: e.getAttribute('alt'), shown: e.clientWidth,
      natural: e.naturalWidth, inside: !!e.closest('.sphx-glr-thumbcontainer'),
    })),
    titles: document.querySelectorAll('h1').length,
    levels: [...article.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(e => +e.tagName[1]),
    language: document.documentElement.lang,
    ids: [...document.querySelectorAll('[id]')].map(e => e.id),
    links: [...document.querySelectorAll('a[href]')].map(e => e.getAttribute('href')),
    faint,
  };
}"""

FOCUS = """() => {
  const e = document.activeElement, style = getComputedStyle(e);
  return {
    text: (e.innerText || e.getAttribute('aria-label') || '').trim().slice(0, 40), tag: e.tagName,
    shown: style.outlineStyle !== 'none' || style.boxShadow !== 'none',
  };
}"""


def faults_of(name: str, form: str, facts: dict[str, Any], requests: list[str]) -> list[str]:
    """What is wrong with one page in one form."""
    found = [f"asks for {url}" for url in requests]
    if facts["scroll"] > facts["inner"]:
        found.append(f"scrolls sideways: {facts['scroll']} of {facts['inner']} px {facts['wide']}")
    elif facts["wide"]:
        found.append(f"is cut at the right: {facts['wide']}")
    found += [f"does not show that it goes on to the right: {text!r}" for text in facts["beyond"]]
    if form == "phone":
        found += [f"code is wider than the page: {text!r}" for text in facts["code"]]
    for picture in facts["pictures"]:
        if not picture["natural"]:
            found.append(f"picture {picture['src']} does not load")
        elif picture["shown"] < min(300, picture["natural"]) and not picture["inside"]:
            found.append(f"picture {picture['src']} is {picture['shown']} px wide")
        # A small picture beside its example's name says nothing that the name does not.
        if picture["alt"] is None or not (picture["alt"].strip() or picture["inside"]):
            found.append(f"picture {picture['src']} has no text")
    if facts["titles"] != 1:
        found.append(f"has {facts['titles']} titles")
    if not facts["language"]:
        found.append("names no language")
    if name not in MACHINE_MADE:
        for before, after in zip(facts["levels"], facts["levels"][1:], strict=False):
            if after > before + 1:
                found.append(f"a heading of level {after} after one of level {before}")
                break
        found += [f"faint text, {ratio} to 1: {text}" for text, ratio in facts["faint"].items()]
    return found


def dead_links(root: Path, pages: dict[str, dict[str, Any]]) -> list[str]:
    """Links within the pages that lead nowhere."""
    found = []
    for name, facts in pages.items():
        for link in facts["links"]:
            if link.startswith(("http:", "https:", "mailto:")):
                continue
            target, anchor = urldefrag(unquote(urljoin(name, link)))
            if not (root / target).exists():
                found.append(f"{name}: no file for {link}")
            elif anchor and target in pages and anchor not in pages[target]["ids"]:
                found.append(f"{name}: no place for {link}")
    return found


def keyboard(page: Any) -> list[str]:
    """The first stops of the tabulator key, from the top of a fresh page."""
    found = []
    for stop in range(6):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if stop == 0 and "skip" not in focus["text"].lower():
            found.append(f"the keyboard's first stop is {focus}, not the link to the content")
        if not focus["shown"]:
            found.append(f"the focus cannot be seen on {focus}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, default=HERE / "_build" / "html")
    parser.add_argument("--shots", type=Path, help="a folder for pictures of the pages")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chrome"))
    parser.add_argument("--pages", nargs="+", help="names of pages; default: all")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    root = options.html.resolve()
    every = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.html"))
    every = [name for name in every if not name.startswith("_")]
    if not every:
        print(f"no pages in {root}", file=sys.stderr)
        return 2
    found: dict[str, None] = {}
    pages: dict[str, dict[str, Any]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium)
        for form, (width, height) in SIZES.items():
            for scheme in SCHEMES:
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme
                )
                page = context.new_page()
                requests: list[str] = []

                def noted(request: Any, requests: list[str] = requests) -> None:
                    if not request.url.startswith(("file:", "data:", "about:")):
                        requests.append(request.url)

                page.on("request", noted)
                for name in options.pages or every:
                    requests.clear()
                    page.goto((root / name).as_uri())
                    facts = page.evaluate(FACTS)
                    pages[name] = facts
                    for fault in faults_of(name, form, facts, requests):
                        found[f"{name} ({form}, {scheme}): {fault}"] = None
                    if options.shots:
                        shot = options.shots / f"{name.replace('/', '_')}.{form}.{scheme}.png"
                        page.screenshot(path=shot, full_page=True)
                    if name == "index.html":
                        page.goto((root / name).as_uri())
                        for fault in keyboard(page):
                            found[f"{name} ({form}, {scheme}): {fault}"] = None
                context.close()
        browser.close()
    if not options.pages:
        found |= dict.fromkeys(dead_links(root, pages))
    for fault in found:
        print(fault)
    print(f"{len(pages)} pages in {len(SIZES) * len(SCHEMES)} forms, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
