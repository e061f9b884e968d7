"""The files that start training on a cluster: they parse, the page shows them, and their commands start ranks.

`torchrun`, `srun`, `scontrol` and the machines are replaced: two agents of four processes run on this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gloo_ranks import losses_of

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "cluster"
PAGE = ROOT / "docs" / "how-to" / "train-on-many-machines.md"
MEET = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total}\\n", end="", flush=True)  # one write
dist.destroy_process_group()
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment in which `torchrun` is that of this Python, and `srun` starts a command twice."""
    scripts = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run --local-addr 127.0.0.1 "$@"',
        "scontrol": "echo 127.0.0.1; echo other",
        "srun": '"$@" & "$@"; wait $!',
    }
    for name, text in scripts.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "meet.py").write_text(MEET, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PORT": port,
    }


def run(commands: list[list[str]], environment: dict[str, str]) -> str:
    """What commands print that run at the same time; all of them must succeed."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT}
    running = [subprocess.Popen(command, **options) for command in commands]
    try:
        printed = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, printed, strict=True):
        assert process.returncode == 0, errors
    return "".join(out for out, _ in printed)


def check_met(text: str) -> None:
    assert sorted(text.split("\n")[:-1]) == [f"rank {rank} of 8: 28" for rank in range(8)]


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["two_hosts.sh", "slurm.sbatch", "kubernetes.yaml"])
def test_the_page_shows_the_file_as_it_is(name: str) -> None:
    assert (FILES / name).read_text(encoding="utf-8") in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["two_hosts.sh", "slurm.sbatch"])
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", FILES / name], check=True)


def test_every_program_that_the_files_start_is_an_example() -> None:
    for path in FILES.iterdir():
        for name in re.findall(r"examples/[\w/]+\.py", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), (path, name)


def test_the_service_and_the_job_name_the_pod_at_which_ranks_meet() -> None:
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    command = pod["containers"][0]["command"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29400" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert f"--nproc-per-node={pod['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in command
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_slurm_file_asks_for_one_task_per_node() -> None:
    text = (FILES / "slurm.sbatch").read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH")
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "1")
    assert text.index("#SBATCH") < text.index("set -euo")  # sbatch reads no option after the first command


@pytest.mark.slow
def test_two_machines_train_as_one_process(machine: dict[str, str]) -> None:
    command = ["bash", str(FILES / "two_hosts.sh"), "127.0.0.1", "examples/18_train_on_a_mesh.py"]
    text = run([command, command], machine)
    found = [float(loss) for loss in re.findall(r"loss +([0-9.]+)", text)]
    assert found == pytest.approx(losses_of("18_train_on_a_mesh.py", 1), abs=5e-5)
    assert len(found) == 6


@pytest.mark.slow
def test_the_slurm_file_starts_eight_ranks_that_meet(machine: dict[str, str], tmp_path: Path) -> None:
    text = (FILES / "slurm.sbatch").read_text(encoding="utf-8")
    assert text.count(":29400") == 1
    script = tmp_path / "job"  # as sbatch does, which runs a copy
    script.write_text(text.replace(":29400", f":{machine['PORT']}"), encoding="utf-8")
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_GPUS_ON_NODE": "4"}
    check_met(run([["bash", str(script), str(tmp_path / "meet.py")]], machine | slurm))


@pytest.mark.slow
def test_the_command_of_the_pods_starts_eight_ranks_that_meet(machine: dict[str, str], tmp_path: Path) -> None:
    command = shlex.join(documents()[1]["spec"]["template"]["spec"]["containers"][0]["command"])
    here = command.replace("train-0.train:29400", f"127.0.0.1:{machine['PORT']}")
    here = here.replace("examples/18_train_on_a_mesh.py", str(tmp_path / "meet.py"))
    check_met(run([["bash", "-c", here]] * 2, machine))
