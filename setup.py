"""What `pyproject.toml` cannot say: a build without the symbolic links of the package is refused."""

from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).parent / "zeroir"

for name in ("passes", "runtime"):
    if not (PACKAGE / name / "__init__.py").is_file():
        raise SystemExit(
            f"zeroir/{name} is not the symbolic link to {name}/ that the repository has, so the package would lack "
            f"zeroir.{name}. Clone again with `git clone -c core.symlinks=true`, or repair this clone with "
            "`git config core.symlinks true && git checkout -- zeroir/passes zeroir/runtime`."
        )

setup()
