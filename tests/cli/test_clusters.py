"""The scripts for Slurm and the manifest for Kubernetes in ``examples/cluster`` start the jobs that they promise."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.support.resuming import MODEL, losses
from tests.support.zygote import import_path, run_forked
from zeroir.cli.app import app, run_command

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPTS = ("torchrun.sbatch", "tasks.sbatch")
DEADLINE_S = 120

SRUN = """
import itertools, os, subprocess, sys

arguments = list(itertools.dropwhile(lambda word: word.startswith("--"), sys.argv[1:]))
machines, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["TASKS_PER_NODE"])
started = []
for machine, local in itertools.product(range(machines), range(tasks)):
    variables = {
        "SLURM_PROCID": machine * tasks + local,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": machine,
        "SLURM_STEP_NUM_TASKS": machines * tasks,
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{machines})",
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    started.append(subprocess.Popen(arguments, env=environment))
sys.exit(max(task.wait() for task in started))
"""
"""Starts the tasks of a job step on this machine, with the variables that Slurm's srun gives them."""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.dist
@pytest.mark.slow
def test_batch_scripts_start_the_ranks_of_one_job(tmp_path: Path) -> None:
    """Two machines, of which this one plays both; of one rank with torchrun, and of two tasks without."""
    (tmp_path / "model.py").write_text(MODEL.replace("WORKERS = 2", "WORKERS = 0"))
    program, tools = tmp_path / "gpt.zir", tmp_path / "bin"
    options = ["--world-size", "2", "--lr", "0.05", "-o", str(program)]
    assert run_command(["compile", str(tmp_path / "model.py"), *options]) == 0
    tools.mkdir()
    executable(tools / "srun", f"#!{sys.executable}\n{SRUN}")
    executable(tools / "scontrol", "#!/bin/sh\nprintf 'localhost\\nlocalhost\\n'\n")
    for name in ("zeroir", "torchrun"):
        module = {"torchrun": "torch.distributed.run"}.get(name, name)
        executable(tools / name, f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    given = ["--model", str(tmp_path / "model.py"), "--steps", "2", "--log-every", "1", "--json"]
    alone = run_forked("zeroir", ["run", str(program), "--nproc", "2", *given], tmp_path)
    expected = losses(alone.stdout)
    assert expected
    for script, nodes, tasks in zip(SCRIPTS, (2, 1), (1, 2), strict=True):
        job = subprocess.run(
            ["bash", str(CLUSTER / script), *given],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": import_path(),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RANKS_PER_NODE": "1",
                "TASKS_PER_NODE": str(tasks),
                "SLURM_JOB_ID": str(free_port() - 20000),
                "SLURM_JOB_NODELIST": "node[0-1]",
                "SLURM_NNODES": str(nodes),
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert job.returncode == 0, job.stderr
        assert losses(job.stdout) == expected, script


def free_port() -> int:
    """A free port from 20000 to 29999, where the scripts look for one."""
    for port in range(20000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_batch_scripts_are_bash(script: str) -> None:
    read = subprocess.run(
        ["bash", "-n", str(CLUSTER / script)], capture_output=True, text=True, check=False
    )
    assert (read.returncode, read.stderr) == (0, "")


def test_the_manifest_of_kubernetes_starts_torchrun_in_every_pod(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((CLUSTER / "job.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    # The name of the first pod is found: the service has no address of its own, and selects the pods of the job.
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
    }
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    record = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    executable(tmp_path / "torchrun", record)
    for index in range(spec["completions"]):
        started = subprocess.run(
            [*container["command"], *container["args"]],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            check=True,
        )
        launch = get_args_parser().parse_args(json.loads(started.stdout))
        assert (launch.node_rank, launch.nnodes) == (index, str(spec["completions"]))
        assert launch.master_addr == f"{name}-0.{pod['subdomain']}"
        assert (launch.module, launch.training_script) == (True, "zeroir")
        _, given, _ = app.parse_args(launch.training_script_args, exit_on_error=False)
        assert given.arguments["options"].save == "checkpoints"
