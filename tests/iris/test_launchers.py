"""Which world a process joins, by the variables of the launcher that started it."""

from __future__ import annotations

import os

import iris
from iris import launchers
from iris.errors import PlatformError
import pytest

from tests.harness import UNDER_TORCHRUN
from tests.processes import run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes and environments of its own")

PREFIXES = "SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "FLUX_", "JSM_", "PALS_", "MASTER_"
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
# Of each launcher, what rank r of two has.
STARTED = {
    "srun": lambda r: {**STEP, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r), "SLURM_NTASKS": "2"},
    "mpirun": lambda r: {
        "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(r),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-host-77@1",
    },
    "hydra": lambda r: {
        "PMI_RANK": str(r), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(r), "MPI_LOCALNRANKS": "2",
    },
    "flux": lambda r: {
        "FLUX_TASK_RANK": str(r), "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": str(r), "FLUX_JOB_NNODES": "1",
        "FLUX_JOB_ID": "77", "PMI_RANK": str(r), "PMI_SIZE": "2",
    },
    "jsrun": lambda r: {
        "JSM_NAMESPACE_RANK": str(r), "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": str(r),
        "JSM_NAMESPACE_LOCAL_SIZE": "2", "LSB_JOBID": "77",
    },
    "cray": lambda r: {
        "PMI_RANK": str(r), "PMI_SIZE": "2", "PALS_RANKID": str(r), "PALS_LOCAL_RANKID": str(r),
        "PALS_LOCAL_SIZE": "2", "PALS_APID": "77",
    },
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of a launcher, and no other's."""

    def only(**variables: str) -> None:
        for name in list(os.environ):
            if name.startswith(PREFIXES) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                monkeypatch.delenv(name)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")  # so that what `adopt` sets is undone
            os.environ.pop(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return only


def summed(rank: int, world_size: int, launcher: str) -> str:
    os.environ.update(STARTED[launcher](rank))
    with iris.iris(1 << 20) as ctx:
        total = ctx.zeros(4)
        ctx.ccl.all_reduce(total, ctx.full((4,), 8.0))
        ctx.barrier()
        return f"{ctx.cur_rank} {ctx.num_ranks} {total.tolist()}"


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "hydra"])
def test_ranks_of_srun_and_mpirun_are_one_world(launcher: str) -> None:
    without = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    ended = run_fresh(2, summed, launcher, env=without)
    expected = [f"{rank} 2 [16.0, 16.0, 16.0, 16.0]" for rank in range(2)]
    assert [end.result for end in ended] == expected, [end.traceback[-1500:] for end in ended]


def test_a_translated_world_is_the_same_port_and_its_own_ranks(environment) -> None:
    ports = set()
    for launcher, variables in STARTED.items():
        here = set()
        for rank in range(2):
            environment(**variables(rank))
            assert launchers.adopt()
            assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (str(rank),) * 2 + ("2",)
            assert os.environ["MASTER_ADDR"] == "127.0.0.1"
            here.add(os.environ["MASTER_PORT"])
        assert len(here) == 1, launcher
        ports |= here
    assert len(ports) == len(STARTED)


def test_an_address_that_is_given_stays(environment) -> None:
    hosts = {**STARTED["srun"](1), "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"}
    environment(**hosts, MASTER_ADDR="head", MASTER_PORT="1234")
    assert launchers.adopt()
    assert [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")] == ["head", "1234", "0"]


ALONE = {
    "nothing": {},
    "WORLD_SIZE=1": {"WORLD_SIZE": "1"},
    "a shell of salloc": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_NNODES": "1"},
    "an interactive step": {**STARTED["srun"](0), "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    "srun -n 1": {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
}


@pytest.mark.parametrize("what", ALONE)
def test_one_process_is_a_world_of_one(what: str, environment) -> None:
    environment(**ALONE[what])
    assert not launchers.adopt()


REFUSED = {
    "RANK": ({"RANK": "1"}, "RANK=1; expected RANK and WORLD_SIZE"),
    "WORLD_SIZE": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2; expected RANK and WORLD_SIZE"),
    "LOCAL_RANK": ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0; expected RANK and WORLD_SIZE"),
    "no numbers": ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK=a, WORLD_SIZE=2; expected a number of ranks"),
    "out of range": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2; expected a number of ranks"),
    "hosts": ({**STARTED["srun"](1), "SLURM_STEP_NUM_NODES": "2"}, "SLURM_PROCID=1.*not known to share one host"),
    "no step": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID=0, SLURM_NTASKS=2.*job script's own"),
    "no size": ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1; expected a number"),
    "no rank": ({"PMI_SIZE": "2"}, "PMI_SIZE=2; expected a number"),
    "PMIx alone": ({"PMIX_RANK": "1"}, "PMIX_RANK=1, and no number of ranks"),
    "PALS alone": ({"PALS_RANKID": "1"}, "PALS_RANKID=1, and no number of ranks"),
    "no local size": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1, PMI_SIZE=2.*not known to share one host"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_world_that_is_described_in_part_is_refused(what: str, environment) -> None:
    variables, message = REFUSED[what]
    environment(**variables)
    with pytest.raises(PlatformError, match=message) as raised:
        iris.iris(1 << 20)
    assert "torchrun --nproc-per-node N script.py" in str(raised.value)
