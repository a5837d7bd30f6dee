"""The page of ``rllib inspect`` as a test uses it, in a browser that Selenium drives."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from rllib_nlac.inspector import page
from rllib_nlac.inspector.bundle import bundle
from rllib_nlac.inspector.run import read_run

SECONDS = 60  # for anything to happen on a busy machine
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")
CONTRAST = """
const channel = (each) => { const c = each / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(channel);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const element = document.querySelector(arguments[0]);
let behind = element;
while (/, 0\\)|transparent/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
const both = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
"""


def start_browser() -> Any:
    """A browser without a window.

    Raises:
        FileNotFoundError: There is none, or no Selenium.
    """
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        raise FileNotFoundError("no browser is here: apt-get install chromium chromium-driver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise FileNotFoundError("Selenium is not installed: pip install rllib_nlac[web]") from error
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


class Page:
    """What a test does with the page in the browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get("about:blank")  # else only the part after # changes
        self.driver.get(address)
        self.until("return document.documentElement.dataset.ready || !document.getElementById('loading')")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """What a script returns as soon as that is something."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.js(script, *arguments)):
            assert time.monotonic() < deadline, f"it did not come to that: {script}\n{self.text[:2000]}"
            time.sleep(0.05)
        return found

    def go(self, fragment: str) -> None:
        self.js("location.hash = arguments[0]", fragment)
        self.js("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()
        self.js("return new Promise((done) => setTimeout(done, 60))")

    def set(self, name: str, value: str | bool) -> None:
        """Fills in one of the filters, as a person would, and waits until the list has taken it."""
        self.js(
            """const input = document.getElementById("f-" + arguments[0]), value = arguments[1];
            if (input.type === "checkbox") input.checked = value; else input.value = value;
            input.dispatchEvent(new Event("input")); input.dispatchEvent(new Event("change"));
            return new Promise((done) => setTimeout(done, 250));""",
            name,
            value,
        )

    def clear(self) -> None:
        self.js("document.getElementById('reset').click()")

    @property
    def keys(self) -> list[str]:
        """The keys of the transitions in the list, in order."""
        return self.js("return app.list.order.map((i) => app.run.key(i))")

    @property
    def text(self) -> str:
        return self.js("return document.body.innerText")

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def choose(self, element: str, value: str) -> None:
        """Picks an entry of a list by its id."""
        self.js(
            """const own = document.getElementById(arguments[0]);
            own.value = arguments[1];
            own.dispatchEvent(new Event("change", {bubbles: true}));""",
            element,
            value,
        )

    def all(self, selector: str, what: str = "textContent") -> list[Any]:
        """A property of all elements."""
        return self.js("return [...document.querySelectorAll(arguments[0])].map((each) => each[arguments[1]])", selector, what)

    def contrast(self, selector: str) -> float:
        """The ratio of text and background, by the web's accessibility guidelines (WCAG 2)."""
        return self.js(CONTRAST, selector)


def save(folder: Path, *runs: Path) -> str:
    """Writes the page of runs and returns its address."""
    file = folder / "page.html"
    file.write_bytes(page.render(page.packed(bundle([read_run(run) for run in runs])), "a run"))
    return file.as_uri()


def key(line: dict[str, Any]) -> str:
    """What a transition is called in a link."""
    return f"{line['iteration']}.{line['id']}"
