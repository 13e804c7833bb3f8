"""The only place of geventstalk's metadata; pyproject.toml names the build system and configures tools.

A [project] table beside this file would silently drop install_requires, so there must never be one.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """The version, read as text: importing the package would need what is not installed yet."""
    text = (HERE / "geventstalk" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('geventstalk/_version.py has no line __version__ = "..."')
    return found.group(1)


TEST = [
    "greenstalk>=2.1",
    "hypothesis>=6.100",
    "pystalk>=0.9",
    "pytest>=8.2",
    "pytest-timeout>=2.3.1",
    "rich>=13.7",
    "setuptools>=77",
]
DEV = [
    "import-linter>=2.5",
    "mypy>=1.13",
    "ruff>=0.9",
    "types-gevent>=24.10",
    "types-PyYAML>=6.0.12",
]

setup(
    name="geventstalk",
    version=version(),
    description="A work queue server that speaks the beanstalk protocol, with a durable journal",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the geventstalk authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords=["beanstalkd", "beanstalk", "work queue", "job queue", "gevent"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: No Input/Output (Daemon)",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # A server has an environment of its own, so the next major version is let in on purpose, not by chance.
    install_requires=[
        "click>=8.1,<9",
        "gevent>=24.10.1,<27",
        "mypy_extensions>=1.0,<2",
        "pyyaml>=6.0.1,<7",
    ],
    extras_require={"test": TEST, "dev": TEST + DEV},
    # With this, an editable install is a line in a .pth file and not an import hook that costs a start 12 ms.
    package_dir={"": "."},
    packages=find_packages(include=["geventstalk", "geventstalk.*", "journal", "journal.*"]),
    package_data={"geventstalk": ["py.typed"], "journal": ["py.typed"]},
    include_package_data=False,
    zip_safe=False,
    entry_points={"console_scripts": ["geventstalk = geventstalk.cli:main"]},
)
