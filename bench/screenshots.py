"""Takes the pictures of the playground that the README and docs show: every view, light and dark, and a phone.

Drives Debian's Chromium through Playwright against a running server; knows element names of the page, nothing of
the server. Usage: python -m bench.screenshots http://127.0.0.1:8000/ docs/pictures
"""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Browser, Page, sync_playwright

QUESTION = "Explain in three short points why a river never runs dry, with one **bold** word in each."


def fill(page: Page, **values: str) -> None:
    """Set controls by name."""
    for name, value in values.items():
        field = page.locator(f"#control-{name}")
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        elif field.get_attribute("type") == "checkbox":
            field.check()
        else:
            field.fill(value)


def idle(page: Page) -> None:
    """Wait until the answer is complete."""
    page.wait_for_function("() => !document.getElementById('send').disabled", timeout=120_000)


def open_page(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    """A fresh page in one colour scheme."""
    dark = scheme == "dark"
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", device_scale_factor=1.5
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_function("() => document.getElementById('status').dataset.state === 'ready'")
    return page


def tour(page: Page, folder: Path, suffix: str) -> None:
    """Chat, X-ray, memory and service views, one picture each."""
    fill(page, max_tokens="220", temperature="0.8", top_k="40", top_p="0.92", min_p="0.03", seed="11")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    idle(page)
    page.screenshot(path=folder / f"chat{suffix}.png")
    page.click("#tab-xray")
    page.locator(".chip[data-index]").nth(12).click()
    page.screenshot(path=folder / f"xray{suffix}.png")
    fill(page, max_tokens="600", retention="sinks", window="256", ignore_eos="on")
    page.click("#tab-complete")
    page.fill("#completion-text", "Once upon a time, on the bank of a slow river,")
    page.click("#send")
    page.click("#tab-live")
    page.wait_for_timeout(2500)
    page.screenshot(path=folder / f"service{suffix}.png")
    page.click("#tab-memory")
    page.wait_for_selector("#memory-blocks .gap", timeout=120_000)
    page.screenshot(path=folder / f"memory{suffix}.png")
    page.click("#tab-complete")
    idle(page)


def main(
    url: Annotated[str, typer.Argument(help="Address of a running server.")] = "http://127.0.0.1:8000/",
    folder: Annotated[Path, typer.Argument(help="Where the pictures go.")] = Path("docs/pictures"),
) -> None:
    """Write chat, xray, service and memory pictures (light, dark), and the chat on a phone."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise typer.BadParameter("Chromium is not installed: apt-get install chromium, then try again.")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            tour(open_page(browser, url, scheme, 1280, 800), folder, suffix)
        phone = open_page(browser, url, "light", 375, 740)
        phone.fill("#prompt", QUESTION)
        phone.press("#prompt", "Enter")
        idle(phone)
        phone.screenshot(path=folder / "phone.png")
        browser.close()


if __name__ == "__main__":
    typer.run(main)
