"""Every code block in the documents is true.

The language of a block says how it is checked:

=============  =================================================================================
`python`       runs as a script and must succeed
`console`      commands after `$ `, each followed by its output, where `...` stands for any text
`bash`         commands that cannot run here: only `git clone`, `cd`, `pip install`, `pre-commit
               install`, `source .venv/bin/activate`, `make TARGET`, and `.venv/bin/python -m
               pytest` of tests; targets and tests must exist
`zir`          a program that must parse and verify
`toml` `json`  must parse
`diff`         every line must be a line of a unified diff
`text`         a picture or a grammar for the eye
=============  =================================================================================

The blocks of one document run in order in one directory that holds a copy of `examples/`. A comment
before a block changes how it is checked: `<!-- slow -->` leaves its page to the whole suite,
`<!-- file model.py -->` saves a `python` block under that name instead of running it,
`<!-- needs accelerate -->` leaves the block out where that package is not installed,
`<!-- ranks 2 -->` runs a script on two ranks under torchrun, `<!-- same -->` expects it to print
what the script before it has printed, `<!-- exits 2 -->` expects the last command of a `console`
block to fail with that status, and `<!-- fails Z101 -->` expects the verifier to reject a `zir`
block with that code.
"""

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import pytest

from tests.support.zygote import run_forked

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
)

ASSIGNMENT = re.compile(r"[A-Z_]+=")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*) *$")
WORD = r"(slow|same|exits \d+|fails Z\d+|needs \w+|ranks \d+|file \w+\.py)"
DIRECTIVE = re.compile(rf"^ *<!-- (?P<words>{WORD}(, {WORD})*) -->$")
DIFF_LINE = re.compile(r"^( |\+|-|@@ |$)")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)(?P<path>[^)#]+)(#[^)]*)?\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block and the directives before it."""

    document: str
    line: int
    language: str
    text: str
    is_slow: bool = False
    exit_status: int = 0
    fails_with: str | None = None
    file: str | None = None
    needs: str | None = None
    ranks: int | None = None
    is_same: bool = False

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @classmethod
    def read(cls, document: str, line: int, language: str, text: str, words: str) -> Self:
        """Read the directives, given as `slow, exits 2`."""
        directives = words.split(", ") if words else []
        values = dict(directive.partition(" ")[::2] for directive in directives)
        return cls(
            document=document,
            line=line,
            language=language,
            text=text,
            is_slow="slow" in values,
            exit_status=int(values.get("exits", "0")),
            fails_with=values.get("fails"),
            file=values.get("file"),
            needs=values.get("needs"),
            ranks=int(values["ranks"]) if "ranks" in values else None,
            is_same="same" in values,
        )


def blocks_of(document: str, text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    blocks: list[Block] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    words = ""
    for number, line in lines:
        if directive := DIRECTIVE.match(line):
            words = directive["words"]
            continue
        if not (fence := FENCE.match(line)):
            assert not line.lstrip().startswith(("```", "~~~")), (
                f"{document}:{number}: a block opens with three backticks and one word"
            )
            words = words if not line.strip() else ""
            continue
        content: list[str] = []
        for _, inner in lines:
            if inner.rstrip() == f"{fence['indent']}```":
                break
            content.append(inner.removeprefix(fence["indent"]))
        else:
            pytest.fail(f"{document}:{number}: the block is never closed")
        text_of_block = "\n".join(content) + "\n"
        blocks.append(Block.read(document, number, fence["language"], text_of_block, words))
        words = ""
    return blocks


def check_block(block: Block, directory: Path, *, is_forked: bool = False) -> None:
    """Check one block by the rule of its language; where ``is_forked``, without starting what imports torch."""
    match block.language:
        case "python":
            check_python(block, directory, is_forked=is_forked)
        case "console":
            check_console(block, directory, is_forked=is_forked)
        case "bash":
            check_bash(block)
        case "zir":
            check_zir(block.text, block.fails_with)
        case "toml":
            tomllib.loads(block.text)
        case "json":
            json.loads(block.text)
        case "diff":
            wrong = [line for line in block.text.splitlines() if not DIFF_LINE.match(line)]
            assert not wrong, f"{block.place}: not a line of a diff: {wrong[0]!r}"
        case "text":
            pass
        case "":
            pytest.fail(f"{block.place}: the block names no language")
        case other:
            pytest.fail(f"{block.place}: no rule says how to check a block of {other!r}")


def check_python(block: Block, directory: Path, *, is_forked: bool) -> None:
    """Run the block as a script, or save it where a file is named."""
    if block.file is not None:
        (directory / block.file).write_text(block.text, encoding="utf-8")
        return
    script = directory / f"block_{block.line}.py"
    script.write_text(block.text, encoding="utf-8")
    if block.ranks is not None:
        launch = ["--standalone", f"--nproc-per-node={block.ranks}", script.name]
        result = run_forked("torch.distributed.run", launch, directory, PLAIN, is_merged=True)
    elif is_forked:
        result = run_forked(script.name, [], directory, PLAIN, is_merged=True)
    else:
        result = _run([sys.executable, script.name], directory)
    assert result.returncode == 0, f"{block.place}:\n{result.stdout}"
    printed = directory / "printed.txt"
    if block.is_same:
        assert result.stdout.strip(), f"{block.place} prints nothing"
        assert result.stdout == printed.read_text("utf-8"), block.place
    printed.write_text(result.stdout, encoding="utf-8")


def check_console(block: Block, directory: Path, *, is_forked: bool) -> None:
    """Run every command of a transcript and compare its output."""
    steps = transcript(block)
    checker = doctest.OutputChecker()
    for number, (command, expected) in enumerate(steps, start=1):
        # What a user tries first is started as the user does.
        is_users = number == 1 and block.document == "README.md"
        code, printed = _run_command(command, directory, is_forked=is_forked and not is_users)
        status = block.exit_status if number == len(steps) else 0
        assert code == status, f"{block.place}: `{command}` exits with {code}:\n{printed}"
        found = "".join(line.rstrip() + "\n" for line in printed.splitlines())
        assert expected == "...\n" or checker.check_output(expected, found, doctest.ELLIPSIS), (
            f"{block.place}: `{command}` prints\n{found}instead of\n{expected}"
        )


def _run_command(command: str, directory: Path, *, is_forked: bool) -> tuple[int, str]:
    """The exit code and the output of a command.

    A shell runs it; but where ``is_forked``, plain calls of ``zeroir`` come of a process that has imported torch.
    """
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    is_plain = command.startswith("zeroir ") and not any(
        set(word) <= set("();<>|&") or set(word) & set("$`") for word in words
    )
    if not (is_forked and is_plain):
        result = _run(["bash", "-o", "pipefail", "-c", command], directory)
        return result.returncode, result.stdout
    made = run_forked("zeroir", shlex.split(command)[1:], directory, PLAIN, is_merged=True)
    return made.returncode, made.stdout


def transcript(block: Block) -> list[tuple[str, str]]:
    """Split a transcript into pairs of a command and its output."""
    steps: list[tuple[str, str]] = []
    is_continued = False
    for line in block.text.splitlines():
        if is_continued:
            command, _ = steps.pop()
            steps.append((f"{command}\n{line}", ""))
        elif line.startswith("$ "):
            steps.append((line.removeprefix("$ "), ""))
        else:
            assert steps, f"{block.place}: a transcript begins with a line `$ command`"
            command, output = steps.pop()
            steps.append((command, f"{output}{line.rstrip()}\n"))
            continue
        is_continued = line.endswith("\\")
    return steps


def check_bash(block: Block) -> None:
    """Check set-up commands without running them."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            del words[0]
        match words:
            case [] | ["git", "clone", _] | ["cd", _] | ["pip", "install", *_]:
                pass
            case ["source", ".venv/bin/activate"]:
                pass
            case ["pre-commit", "install"]:
                assert (ROOT / ".pre-commit-config.yaml").is_file()
            case [".venv/bin/python", "-m", "pytest", *arguments]:
                check_pytest(block, arguments)
            case ["make", target]:
                result = _run(["make", "--dry-run", target], ROOT)
                assert result.returncode == 0, f"{block.place}:\n{result.stdout}"
            case _:
                pytest.fail(f"{block.place}: `{line}` would have to run: make it a `console` block")


def check_pytest(block: Block, arguments: list[str]) -> None:
    """Check that each test that is named exists."""
    options = iter(arguments)
    for argument in options:
        if argument == "-m":
            next(options)
        elif argument != "--update-golden":
            path, _, test = argument.partition("::")
            assert (ROOT / path).exists(), f"{block.place}: there is no {path}"
            if test:
                source = (ROOT / path).read_text("utf-8")
                assert f"def {test}(" in source, f"{block.place}: {path} has no {test}"


def check_zir(text: str, fails_with: str | None = None) -> None:
    """Parse and verify a program; with a code, expect the verifier to reject it with that."""
    from zeroir.ir.text import parse
    from zeroir.verify import verify

    report = verify(parse(text))
    if fails_with is None:
        assert report.is_valid, report.render()
    else:
        assert fails_with in {finding.code for finding in report.findings}, report.render()


PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    tools = str(Path(sys.executable).parent)
    return subprocess.run(
        command,
        cwd=directory,
        env=os.environ | PLAIN | {"PATH": os.pathsep.join((tools, os.environ["PATH"]))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _check_document(document: Path, directory: Path, *, is_forked: bool = False) -> None:
    shutil.copytree(ROOT / "examples", directory / "examples")
    name = document.relative_to(ROOT).as_posix()
    missing: set[str] = set()
    for block in blocks_of(name, document.read_text(encoding="utf-8")):
        if block.needs is not None and find_spec(block.needs) is None:
            missing.add(block.needs)
            continue
        check_block(block, directory, is_forked=is_forked)
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}; the blocks without them hold")


SLOW = [
    path
    for path in DOCUMENTS
    if any(block.is_slow for block in blocks_of(path.name, path.read_text("utf-8")))
]
QUICK = [path for path in DOCUMENTS if path not in SLOW]


@pytest.mark.parametrize("document", QUICK, ids=lambda path: path.stem)
def test_blocks_hold(document: Path, tmp_path: Path) -> None:
    _check_document(document, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", SLOW, ids=lambda path: path.stem)
def test_blocks_that_take_their_time_hold(document: Path, tmp_path: Path) -> None:
    _check_document(document, tmp_path, is_forked=True)


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="Python runs outside an environment")
def test_a_fresh_shell_finds_zeroir_after_the_set_up_of_the_readme(tmp_path: Path) -> None:
    blocks = blocks_of("README.md", (ROOT / "README.md").read_text("utf-8"))
    lines = [
        line for block in blocks if block.language == "bash" for line in block.text.splitlines()
    ]
    (activation,) = [line for line in lines if line.startswith("source ")]
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shell = subprocess.run(
        ["bash", "--norc", "-c", f"{activation}\nzeroir --version"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (shell.returncode, shell.stderr) == (0, "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.finditer(document.read_text(encoding="utf-8")):
        assert (document.parent / link["path"]).exists(), f"{document.name}: {link['path']}"


def _block(language: str, text: str, words: str = "") -> Block:
    return Block.read("test.md", 1, language, text, words)


@pytest.mark.parametrize("language", ["", "yaml"])
def test_a_block_without_a_rule_fails(language: str, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"test\.md:1"):
        check_block(_block(language, "x\n"), tmp_path)


def test_blocks_are_found_with_their_directives() -> None:
    text = "a\n<!-- slow, exits 2 -->\n```console\n$ x\n```\n\n  ```json\n  {}\n  ```\n"
    first, second = blocks_of("test.md", text)
    assert (first.line, first.is_slow, first.exit_status) == (3, True, 2)
    assert (second.text, second.is_slow, second.exit_status) == ("{}\n", False, 0)


def test_commands_that_do_not_run_must_name_what_exists() -> None:
    test = "tests/docs/test_docs_blocks.py::test_blocks_hold"
    check_block(_block("bash", f".venv/bin/python -m pytest {test}\nA=b make check  # c\n"), ROOT)
    for wrong in (f".venv/bin/python -m pytest {test}_not", "make nothing", "A=b ls"):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check_block(_block("bash", wrong), ROOT)


def test_a_block_with_a_file_is_saved_and_not_run(tmp_path: Path) -> None:
    (block,) = blocks_of("test.md", "<!-- file net.py -->\n```python\n1 / 0\n```\n")
    check_block(block, tmp_path)
    assert (tmp_path / "net.py").read_text() == "1 / 0\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("$ echo a; echo b\na\nb\n$ true\n", ""),
        ("$ seq 9\n1\n...\n9\n", ""),
        ("$ echo a \\\n  b\na b\n", ""),
        ("$ echo no >&2; exit 2\nno\n", "exits 2"),
    ],
)
def test_a_true_transcript_passes(text: str, words: str, tmp_path: Path) -> None:
    check_block(_block("console", text, words), tmp_path)


@pytest.mark.parametrize("text", ["$ echo a\nb\n", "$ echo a\n", "$ exit 3\n", "echo a\n"])
def test_a_false_transcript_fails(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_block(_block("console", text), tmp_path)
