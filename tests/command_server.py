"""A process that has imported all that the ``rllib`` command imports, and runs commands in forks of itself.

Importing takes longer than most of what the commands of the tests do. Each command is a process of its own all the same, in a
session of its own, with a folder, an environment and an exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules


def run(job: dict) -> None:
    """In the command's own process, as ``python -m rllib_nlac.command`` would; does not return."""
    os.setsid()
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    import_module("ray._raylet").Config.initialize("")  # reads Ray's variables again, as it did when it was imported
    for number, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
        opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["rllib", *job["arguments"]]
    sys.path[0] = job["cwd"]
    runpy.run_module("rllib_nlac.command", run_name="__main__", alter_sys=True)
    sys.exit()


def watch(job: dict) -> None:
    """Starts a command, and writes down its process and how it ended."""
    folder = Path(job["folder"])
    if (pid := os.fork()) == 0:
        run(job)
    _write(folder / "pid", pid)
    _write(folder / "status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _write(path: Path, number: int) -> None:
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def main() -> None:
    import_module("rllib_nlac.command.cli")  # first, as it sets Ray's variables before Ray is imported
    for module in iter_modules(import_module("rllib_nlac.command").__path__):
        if module.name != "__main__":
            import_module(f"rllib_nlac.command.{module.name}")
    import_module("ray.tune")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for line in sys.stdin:
        if os.fork() == 0:
            if os.fork() == 0:  # nobody has to wait for the watcher
                watch(json.loads(line))
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
