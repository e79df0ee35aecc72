"""Search for the torch to build against, also from within pip's isolated build environment."""

import os
import site
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

TORCH_FLOOR = (2, 10)


def candidate_site_packages() -> list[Path]:
    """Return the directories that may hold the target environment's torch, likeliest first.

    pip runs an isolated build with the target environment's own interpreter and only hides its
    site-packages, so `sysconfig` still names them. JACHESS_TORCH_PATH comes first, for tools (uv,
    conda-build) that build with another interpreter.
    """
    paths = [os.environ.get("JACHESS_TORCH_PATH", "")]
    paths += [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    if os.environ.get("VIRTUAL_ENV"):
        names = {"base": os.environ["VIRTUAL_ENV"], "platbase": os.environ["VIRTUAL_ENV"]}
        paths.append(sysconfig.get_path("platlib", vars=names))
    configuration = Path(sys.prefix, "pyvenv.cfg")
    inherits = not configuration.is_file() or any(
        "".join(line.split()).lower() == "include-system-site-packages=true"
        for line in configuration.read_text().splitlines()
    )
    if inherits:
        paths += [*site.getsitepackages([sys.base_prefix]), site.getusersitepackages()]
    return [Path(path) for path in dict.fromkeys(paths) if path]


def torch_version_in(directory: Path) -> tuple[int, int] | None:
    """Return (major, minor) of the torch installed in `directory`, None where there is none."""
    for distribution in metadata.distributions(name="torch", path=[str(directory)]):
        major, minor = distribution.version.split(".")[:2]
        return int(major), int(minor)
    return None


def expose_torch() -> bool:
    """Make `import torch` work, if need be from another directory; return whether it does.

    Raises:
        SystemExit: the environment's torch is older than what the operators are built for.
    """
    if find_spec("torch") is not None:
        return True
    for directory in candidate_site_packages():
        version = torch_version_in(directory)
        if version is None:
            continue
        if version < TORCH_FLOOR:
            raise SystemExit(
                f"jachess_ext: the environment holds torch {version[0]}.{version[1]}; expected "
                "2.10 or newer: upgrade it with `pip install -U 'torch>=2.10'`."
            )
        # Last on the path, so that the isolated environment's setuptools comes first.
        sys.path.append(str(directory))
        return True
    return False
