"""One Chromium, driven through Selenium: started, given windows, and killed. The only file that imports Selenium."""

from __future__ import annotations

import contextlib
import importlib.resources
import math
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rllib_nlac.envs.base import EpisodeLost

INSTALL = "pip install 'rllib_nlac[web]'"
INSTALL_BROWSER = "apt-get install chromium chromium-driver"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver")
START_S = 120.0
# Pages are files of a package, they reach no network and no other file; a sandbox is what containers and root cannot have.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--disable-features=MediaRouter,OptimizationHints,Translate",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-first-run",
    "--lang=en-US",
    "--window-size=800,800",
    "--enable-automation",
)


class BrowserGone(EpisodeLost):
    """The browser died, or was killed because a page did not answer; whoever had a window in it loses an episode."""


@dataclass(frozen=True)
class Programs:
    """What a browser is made of.

    Attributes:
        browser: Path of Chromium or Chrome.
        driver: Path of the ChromeDriver of the same version.
        timeout_s: How long a page may take to answer.
    """

    browser: str
    driver: str
    timeout_s: float

    @classmethod
    def found(cls, browser: str | None, driver: str | None, timeout_s: float) -> Programs:
        """Those that are installed here, or the ones that are given.

        Raises:
            ValueError: Selenium, the browser or the driver is missing; the text says how to install it.
        """
        if find_spec("selenium") is None:
            raise ValueError(f"the environment MiniWoB needs the package selenium: {INSTALL}")
        return cls(
            _program(browser, "browser", BROWSERS, "the browser Chromium"),
            _program(driver, "driver", DRIVERS, "the driver of Chromium, chromedriver"),
            timeout_s,
        )


def _program(given: str | None, key: str, names: tuple[str, ...], what: str) -> str:
    if given is not None:
        path = shutil.which(given)
        if path is None:
            raise ValueError(f"env_config.{key} is {given!r}, and there is no such program")
        return path
    for name in names:
        if path := shutil.which(name):
            return path
    raise ValueError(f"the environment MiniWoB needs {what}: {INSTALL_BROWSER} (or set env_config.{key} to its path)")


class Browser:
    """A running browser. Its commands are made one at a time; windows of it may be used by several threads.

    Args:
        programs: What to start.

    Raises:
        BrowserGone: It did not start.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._lock = threading.RLock()
        self._current: str | None = None
        self._session: Any = None
        self.is_dead = False
        keeper = importlib.resources.files(__package__).joinpath("keeper.py")
        # A session of its own: Ctrl-C in a terminal goes to the program, which decides when the browser ends.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(keeper), programs.driver, "--port=0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._session = self._connect(self._port())
            self._blank = self._session.current_window_handle
            self._current = self._blank
        except BaseException as error:
            self.kill()
            if isinstance(error, Exception):
                raise BrowserGone("browser_failure", f"{programs.browser} did not start: {_first_line(error)}") from error
            raise

    @property
    def process(self) -> int:
        """The id of the process above all processes of this browser."""
        return self._keeper.pid

    def _port(self) -> int:
        assert self._keeper.stdout is not None
        driver = self._programs.driver
        ready, _, _ = select.select([self._keeper.stdout], [], [], START_S)
        if not ready:
            raise OSError(f"{driver} did not say within {START_S:g} s on which port it listens")
        said = os.read(self._keeper.stdout.fileno(), 1000).decode(errors="replace").strip()
        if not said.isdigit():
            cause = said or "it said nothing"
            raise OSError(f"{driver} ended at once (try '{driver} --version'; to install it: {INSTALL_BROWSER}): {cause}")
        return int(said)

    def _connect(self, port: int) -> Any:
        from selenium.webdriver import ChromeOptions, Remote
        from selenium.webdriver.chrome.remote_connection import ChromeRemoteConnection
        from selenium.webdriver.common.proxy import Proxy, ProxyType
        from selenium.webdriver.remote.client_config import ClientConfig

        options, timeout = ChromeOptions(), self._programs.timeout_s
        options.binary_location = self._programs.browser
        for flag in FLAGS:
            options.add_argument(flag)
        # A proxy of the machine's is for others than this machine.
        client = ClientConfig(
            remote_server_addr=f"http://127.0.0.1:{port}",
            timeout=math.ceil(max(START_S, timeout)),
            proxy=Proxy({"proxyType": ProxyType.DIRECT}),
        )
        session: Any = Remote(
            command_executor=ChromeRemoteConnection(client.remote_server_addr, keep_alive=True, client_config=client),
            options=options,
        )
        session.command_executor.client_config.timeout = timeout + 1  # the driver gives up first, where it knows how
        session.set_script_timeout(timeout)
        session.set_page_load_timeout(timeout)
        return session

    @contextlib.contextmanager
    def _commands(self, window: str | None = None) -> Iterator[Any]:
        """The session, for commands to one window; whatever goes wrong between it and the browser is the browser's end."""
        from selenium.common.exceptions import TimeoutException, WebDriverException
        from urllib3.exceptions import HTTPError, TimeoutError

        with self._lock:
            if self.is_dead:
                raise BrowserGone("browser_lost", "the browser is gone")
            try:
                if window is not None and window != self._current:
                    self._session.switch_to.window(window)
                    self._current = window
                yield self._session
            except (TimeoutException, TimeoutError) as error:
                self.kill()
                raise BrowserGone("page_timeout", f"a page did not answer within {self._programs.timeout_s:g} s") from error
            except (WebDriverException, HTTPError, OSError) as error:
                self.kill()
                raise BrowserGone("browser_lost", f"the browser is gone: {_first_line(error)}") from error

    def open_window(self, script: str) -> Window:
        """A new window in which a script runs before those of every page."""
        with self._commands(self._blank) as session:
            session.switch_to.new_window("tab")
            window = self._current = session.current_window_handle
            for command, parameters in (
                ("Page.addScriptToEvaluateOnNewDocument", {"source": script}),
                # Else only one window at a time would have the focus, and with it the events.
                ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            ):
                session.execute("executeCdpCommand", {"cmd": command, "params": parameters})
        return Window(self, window)

    def kill(self) -> None:
        """Ends the browser with all its processes; returns when they are gone."""
        self.is_dead = True
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.command_executor.close()
        with contextlib.suppress(OSError):
            if self._keeper.stdin is not None and not self._keeper.stdin.closed:
                # Not the end of the pipe alone: a forked process may hold it open.
                self._keeper.stdin.write(b"end\n")
                self._keeper.stdin.close()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        try:
            self._keeper.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


class Window:
    """A window of a browser, which belongs to one environment at a time."""

    def __init__(self, browser: Browser, handle: str) -> None:
        self.browser, self._handle = browser, handle

    def load(self, address: str) -> None:
        """Loads a page, anew where it is there."""
        with self.browser._commands(self._handle) as session:
            session.get(address)

    def call(self, function: str, *arguments: Any) -> Any:
        """What a function of ``page.js`` returns.

        Raises:
            BrowserGone: The page hangs, or the browser is gone.
        """
        with self.browser._commands(self._handle) as session:
            return session.execute_script(f"return window.rllibPage.{function}(...arguments)", *arguments)

    def send(self, command: str, **parameters: Any) -> None:
        """Sends a command of the DevTools protocol, by which input comes as from a user's hands."""
        with self.browser._commands(self._handle) as session:
            session.execute("executeCdpCommand", {"cmd": command, "params": parameters})

    def close(self) -> None:
        """Closes the window; the browser stays."""
        if self.browser.is_dead:
            return
        with contextlib.suppress(BrowserGone), self.browser._commands(self._handle) as session:
            session.close()
            self.browser._current = None


def _first_line(error: BaseException) -> str:
    text = str(getattr(error, "msg", None) or error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
