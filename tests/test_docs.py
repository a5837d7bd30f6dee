"""The documentation: it builds without a warning, its links lead somewhere, and what its code blocks show exists and runs."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import typer.main
import yaml
from conftest import NEEDS
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.scripts.scripts import cli as rays_command
from rooms import FLOORS

from benchmarks import gpu
from rllib_nlac.ablations import ABLATIONS
from rllib_nlac.command.experiment import describe, load_experiments, tune_arguments
from rllib_nlac.envs.tools import ToolTasks
from rllib_nlac.inputs import examples
from rllib_nlac.nlac import NLAC, PRESETS, NLACConfig

ROOT = Path(__file__).parent.parent
DOCS, RESEARCH = ROOT / "docs", ROOT / "research"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
COMMAND = re.search(r'"rllib = ([\w.]+):app"', (ROOT / "setup.py").read_text())[1]
# What a reader puts a path of their own for.
PLACEHOLDERS = {"EXPERIMENT.yaml", "my_game.yaml"}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list:
    """Every fenced block of a language, with its page's name as the test's id."""
    found = [(page, code) for page in PAGES for kind, code in FENCE.findall(page.read_text()) if kind == language]
    return [pytest.param(code, id=f"{page.stem}-{number}") for number, (page, code) in enumerate(found)]


def named_block(name: str) -> str:
    """The README's fenced block whose first line is the comment with this file's name."""
    (found,) = re.findall(rf"```\w+\n# {re.escape(name)}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


def commands_of(code: str) -> list[list[str]]:
    """The words of each command line, without comments."""
    return [words for line in code.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


@pytest.fixture
def my_game(tmp_path, monkeypatch) -> Path:
    """A folder in which the README's two files and the bases of the examples lie, and where the command is run."""
    for name in ("my_game.py", "my_game.yaml", "my_tools.py"):
        (tmp_path / name).write_text(named_block(name))
    shutil.copytree(ROOT / "tuned_examples" / "bases", tmp_path / "bases")  # as the pages say for who extends one
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MY_KEY", "none")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Guess."}\n')
    return tmp_path


@pytest.fixture
def config_reference(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("config_reference")


@pytest.mark.process
def test_the_site_builds_without_a_warning(tmp_path):
    """Links between pages, to headings and to files are among what Sphinx warns of."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-d", str(tmp_path / "trees"), str(DOCS)]
    built = subprocess.run([*command, str(tmp_path / "html")], capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    reference = (tmp_path / "html" / "configuration.html").read_text()
    assert all(key in reference for key in ("num_futures", "episodes_per_task", "gpu_memory_utilization"))
    assert "One transition, in words" in (tmp_path / "html" / "index.html").read_text()


LINKS = re.compile(r"\]\((?!https?://)([^)\s]+)\)")


@pytest.mark.parametrize("page", [*PAGES, *sorted(RESEARCH.glob("*.md"))], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_that_sphinx_does_not_check_lead_somewhere(page):
    """Links of the pages outside the site, and links from the site to ``research/``."""

    def slug(heading: str) -> str:
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

    for target in LINKS.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        if page.is_relative_to(DOCS) and "research/" not in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
        labels = re.findall(r"^\(([\w-]+)\)=$", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {*map(slug, headings), *labels}, target


#: Words that a page may have; ``developing`` includes CONTRIBUTING.md.
BUDGETS = {
    "README": 1000,
    "install": 350,
    "quick_start": 450,
    "real_model": 500,
    "concepts": 900,
    "your_environment": 1200,
    "your_model": 1500,
}
BUDGETS |= {"running": 1300, "reading_a_run": 1400, "inspector": 500, "offline_data": 400, "troubleshooting": 1300}
BUDGETS |= {"algorithms": 1500, "environments": 900, "configuration": 100, "api": 100, "memory_and_speed": 1000}
BUDGETS |= {"reliability": 700, "results": 1500, "ablations": 900, "paper_and_code": 1500, "developing": 1000, "CHANGELOG": 400}
IN_ALL = 22_000
WAIT = "for _ in $(seq 300); do curl -sf localhost:8123/v1/models > /dev/null && break; sleep 2; done"


def number_of_words(text: str) -> int:
    """What has a letter or a digit, without the blocks of directives: bars of tables are no words."""
    prose = re.sub(r"^```\{.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def words_of_pages() -> dict[str, int]:
    """By name of the page, or of the file that a page includes."""
    pages = {path.stem: number_of_words(path.read_text()) for path in [*PAGES, ROOT / "CHANGELOG.md"]}
    pages["developing"] += pages.pop("CONTRIBUTING")
    return {name: count for name, count in pages.items() if name not in ("index", "contributing", "changelog")}


def test_words_are_counted_without_directives_and_bars():
    assert number_of_words("| a | b-c |\n|---|---|\n```{include} x y z\n```\n```bash\nmake it\n```\n") == 5  # "```bash" is one


def test_results_with_a_pretrained_model_are_those_of_the_rows():
    """Fails where a run was repeated and a page still has the former figure."""
    rows: dict[tuple[str, str], list[float]] = {}
    with (ROOT / "research/rows/real_model.csv").open() as file:
        for row in csv.DictReader(file):
            rows.setdefault((row["task"], row["method"]), []).append(float(row["success"]))
    results, readme = ((ROOT / name).read_text().replace("**", "") for name in ("docs/results.md", "README.md"))
    assert len(rows) >= 10
    for cell, each in rows.items():
        told = f"{statistics.fmean(each):.3f}"
        if len(each) == 3:
            told += f" ({', '.join(f'{success:.3f}' for success in each)})"
        assert told in results or cell == ("guess_number", "sft"), (cell, told)
    assert f"| {statistics.fmean(rows['guess_number', 'nlac']):.3f} (" in readme
    path = (ROOT / "docs/real_model.md").read_text()
    assert all(f"{rows['guess_number', method][0]:.3f}" in path for method in ("sft", "nlac"))


def test_each_page_keeps_to_its_budget_of_words():
    words = words_of_pages()
    print("\n".join(f"{name:20} {count:6,} of {BUDGETS[name]:6,}" for name, count in words.items()), sum(words.values()))
    assert set(words) == set(BUDGETS)
    assert {name: count for name, count in words.items() if count > BUDGETS[name]} == {}
    assert sum(words.values()) <= IN_ALL and sum(len(page.read_text().split()) for page in PAGES) <= IN_ALL


@pytest.mark.parametrize("code", blocks("python"))
def test_python_compiles_and_what_it_imports_exists(code, my_game):
    for node in ast.walk(compile(code, "page", "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.parametrize("code", [block for block in blocks("python") if "Config" in block.values[0]])
def test_python_that_configures_says_what_the_config_takes(code, monkeypatch):
    """It runs up to where the algorithm would be built."""
    built: list[AlgorithmConfig] = []
    monkeypatch.setattr(AlgorithmConfig, "build_algo", lambda self: built.append(self) or MagicMock())
    namespace: dict = {}
    exec(compile(code, "page", "exec"), namespace)
    configs = built + [value for value in namespace.values() if isinstance(value, AlgorithmConfig)]
    assert configs
    for config in configs:
        config.validate()


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_is_an_experiment_that_a_dry_run_takes(code, my_game):
    file = my_game / "experiment.yaml"
    file.write_text(code)
    for experiment in load_experiments(file):
        tune_arguments(experiment)
        assert yaml.safe_load(describe(experiment))


@pytest.mark.parametrize("code", blocks("bash"))
def test_commands_and_their_options_exist(code):
    makefile = (ROOT / "Makefile").read_text()
    for words in commands_of(code):
        words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words))
        if words[0] == "make":
            for word in words[1:]:
                name, is_variable, _ = word.partition("=")
                pattern = rf"^{name} \?=|\$\({name}\)" if is_variable else rf"^{name}:"
                assert re.search(pattern, makefile, re.MULTILINE), words
        elif words[0] == "rllib":
            check_rllib(words[1:])
        elif words[0] == "ray":
            check_click(rays_command, words[1:])
        elif words[:2] == ["python", "-m"]:
            check_module(words[2], words[3:])
        elif words[:2] == ["pip", "install"]:
            for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
                assert re.search(rf'^ +"{extra}": ', (ROOT / "setup.py").read_text(), re.MULTILINE), words
        elif words[:2] == ["pip", "uninstall"]:  # what the Makefile takes away, too
            assert f"uninstall $(QUIET) {' '.join(words[2:])}\n" in makefile, words
        elif words[0] == "source":  # the environment that the Makefile makes
            assert re.search(rf"^VENV \?= {words[1].removesuffix('/bin/activate')}$", makefile, re.MULTILINE), words
        else:
            assert words[0] in ("tensorboard", "apt-get", "git"), f"no check knows {words}"


def test_make_says_what_it_leaves_out_and_what_runs_exactly_that():
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^([\w-]+):[^\n]*\n((?:\t[^\n]*\n)+)", makefile, re.MULTILINE))
    quick, slow = (re.search(r'-m "(.*)"', recipes[name])[1] for name in ("quick-tests", "slow-tests"))
    assert quick == f"not ({slow})" and slow.split(" or ") == list(NEEDS)
    assert '-m "not long"' in recipes["test"] and "make all-tests" in recipes["test"]
    assert "-m" not in recipes["all-tests"] and "make slow-tests" in recipes["check"]
    assert "-rfEs" in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"].split()


def check_click(command, words: list[str]) -> tuple:
    """Walks down to a subcommand, which parses its options; it and the rest of the words."""
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    command.make_context(str(command.name), list(words))
    return command, words


def check_rllib(words: list[str]) -> None:
    """Walks down to the subcommand and lets it parse its options, without running it."""
    command, words = check_click(typer.main.get_command(importlib.import_module(COMMAND).app), words)
    file = next((word for word in words if command.name == "file" and not word.startswith("-")), None)
    if file is not None and file not in PLACEHOLDERS:
        assert examples.find(file).is_file()


def check_module(module: str, words: list[str]) -> None:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin, module
    source = Path(found.origin).read_text()
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in source, (module, option)


def test_modules_that_the_text_names_exist_with_their_options():
    for page in PAGES:
        for module, options in re.findall(r"`python -m ([\w.]+)([^`]*)`", FENCE.sub("", page.read_text())):
            check_module(module, options.split())


def test_messages_of_the_troubleshooting_page_stand_in_the_code():
    texts = [text for path in [*(ROOT / "rllib_nlac").rglob("*.py")] for text in messages_of(path.read_text())]
    texts.append((ROOT / "Makefile").read_text())
    ours, of_vllm, vllms = (DOCS / "troubleshooting.md").read_text().partition("These messages are vLLM's own.")
    assert of_vllm
    for table, rows in ((page, re.findall(r"^\| (`.+?`) \| ", page, re.MULTILINE)) for page in (ours, vllms)):
        assert len(rows) > (30 if table is ours else 2)
        for row in rows:
            parts = [part for part in map(str.strip, row.strip("`").split("…")) if part]
            assert max(map(len, parts), default=0) >= 8, row  # shorter ones stand everywhere
            for part in parts if table is ours else ():
                assert any(part in text for text in texts), part


def messages_of(source: str) -> Iterator[str]:
    """The plain parts of every string of a file, those of an f-string one by one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_ablations_have_a_row_for_each_key_of_the_preset_and_for_each_algorithm():
    page = (DOCS / "ablations.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.+?)`? \| .* \|.*\|.*\|$", page, re.MULTILINE))
    assert {key: yaml.safe_load(value) for key, value in rows.items()} == PRESETS["long_horizon"]
    assert set(re.findall(r"^\| `(NLAC_\w+)` \|", page, re.MULTILINE)) == set(ABLATIONS)


def test_the_rooms_stand_on_the_floors_that_the_architecture_has():
    table = (DOCS / "developing.md").read_text().partition("| layer | module |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d*) ?\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE)
    rooms = [room.replace("__init__", "") for _, room in rows]
    floors = list(itertools.accumulate((int(floor or 0) for floor, _ in rows), max))
    assert list(zip(floors, rooms, strict=True)) == [(n, room) for n, on_it in enumerate(FLOORS, 1) for room in on_it]


def test_an_iteration_is_the_calls_of_the_data_path():
    """One after the other, and nothing else."""
    table = (DOCS / "concepts.md").read_text().partition("| call of `training_step` |")[2].partition("\n\n")[0]
    tree = ast.parse(inspect.cleandoc(inspect.getsource(NLAC.training_step)))
    calls = [node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == calls


def test_no_page_holds_a_mark_for_what_was_to_be_written_or_merged():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    mark = re.compile(r"@[A-Z_]+@|^(<{7} |>{7} |={7}$)")
    assert mark.search("That is @HOW_MUCH@.") and mark.search("<<<<<<< ours") and not mark.search("a ======= b")
    assert not [f"{page.name}: {line}" for page in pages for line in page.read_text().splitlines() if mark.search(line)]


def test_a_key_without_documentation_is_an_error(config_reference, monkeypatch):
    everyone = config_reference.configs()
    config_reference.check(everyone)
    config_class = type(everyone["GRPO"])
    monkeypatch.setattr(config_class.training, "__doc__", config_class.training.__doc__.replace("clip_param: ", "clip: "))
    with pytest.raises(config_reference.Undocumented, match=r"GRPOConfig\.training\(clip_param\)"):
        config_reference.check(everyone)
    monkeypatch.undo()
    everyone["GRPO"].an_attribute_of_its_own = 1
    with pytest.raises(config_reference.Undocumented, match="GRPO: an_attribute_of_its_own, which no setter method takes"):
        config_reference.check(everyone)


def test_the_figures_of_a_gpu_are_those_of_its_rows():
    lines = gpu.table(json.loads((DOCS / "rows" / "gpu_h100.json").read_text(encoding="utf-8"))).splitlines()
    shown = re.search(r"```\n(NVIDIA .*?)```", (DOCS / "memory_and_speed.md").read_text(encoding="utf-8"), re.DOTALL)[
        1
    ].splitlines()
    assert len(shown) > 30 and [line for line in shown if line not in lines] == []


def test_the_knobs_are_few(config_reference):
    """A new key goes into the mapping of its topic, takes the place of another, or is an algorithm of its own."""
    keys = config_reference.own_keys(NLACConfig())
    print(f"NLACConfig has {len(keys)} keys of its own: {', '.join(keys)}")
    assert len(keys) <= 49 and {"num_futures", "language_model"} <= set(keys)


def test_ones_own_tools_are_called_and_rewarded(my_game):
    row = re.search(r'`(\{"prompt": .*\})`', (ROOT / "README.md").read_text())[1]
    (my_game / "tasks.jsonl").write_text(row + "\n")
    (block,) = re.findall(r"```text\nenv: ToolTasks\nenv_config: (.*)\n```", (ROOT / "README.md").read_text())
    for item, reward in (("tea", 1.0), ("salt", 0.0)):
        env = ToolTasks(**yaml.safe_load(block))
        opening, info = env.reset(seed=0)
        assert opening == "Buy tea." and [tool["function"]["name"] for tool in info["tools"]] == ["buy"]
        *_, info = env.step(json.dumps({"name": "buy", "arguments": {"item": item}}))
        assert info["new_messages"] == [{"role": "tool", "name": "buy", "content": "Paid."}]
        assert env.step("I am done.")[1:3] == (reward, True)


def test_ones_own_environment_is_short_and_trains(my_game, commands, ray_session):
    rllib = partial(commands.run, cwd=my_game, ray=ray_session)
    assert len(named_block("my_game.py").splitlines()) <= 25 and len(named_block("my_game.yaml").splitlines()) <= 15
    checked = rllib("env", "check", "my_game:HigherLower")
    assert checked.returncode == 0 and "keeps the contract" in checked.stdout, checked.stdout
    trained = rllib("train", "file", "my_game.yaml", "--stop", "{training_iteration: 1}", "--storage-path", "results")
    assert trained.returncode == 0 and re.search(r"^\s*1\s+32\s", trained.stdout, re.MULTILINE), trained.stdout[-2000:]
    assert "rllib evaluate" in trained.stdout and list(my_game.glob("results/*/*/checkpoint_*"))


@pytest.mark.long
@pytest.mark.process
def test_the_commands_from_a_pretrained_model_to_a_served_one_run(tmp_path):
    """The page's own, with fewer conversations and one iteration."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```$", (DOCS / "real_model.md").read_text(), re.MULTILINE | re.DOTALL)
    script = "".join(blocks).replace("source .venv/bin/activate\n", "").replace("--episodes 400", "--episodes 48")
    script = script.replace("--storage-path results", "--storage-path results --stop '{training_iteration: 1}'")
    script, serves = re.subn(
        r"^(python -m vllm.*)$", rf"\1 > server.log 2>&1 &\ntrap 'kill %1; wait' EXIT\n{WAIT}", script, flags=re.M
    )
    assert serves == 1 and script.count("training_iteration: 1") == 2 and "--episodes 48" in script
    (tmp_path / "tuned_examples").symlink_to(ROOT / "tuned_examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["choices"][0]["message"]["content"].strip()
    assert "conversations" in ended.stdout and ended.stdout.count("Success:") >= 1
