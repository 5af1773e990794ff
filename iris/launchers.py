"""Read the world that the launcher of this process describes: torchrun, or on one host srun, mpirun and others.

A launcher gives each rank its number in environment variables, under names of its own. `adopt` translates them into
torchrun's, which everything below reads, torch.distributed included. A description that is incomplete, or that spans
hosts without an address for a rendezvous, is an error: a rank that ignores it would compute alone, and silently return
its own part as the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
import os
import zlib

from .errors import PlatformError

_TORCHRUN = "torchrun --nproc-per-node N script.py"
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below those that Linux gives to outgoing connections


@dataclass(frozen=True)
class _Launcher:
    """The environment variables of one launcher: of several for one thing, the first that is set is used.

    `job`: variables that name the job, combined where they are set.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    num_hosts: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


_OPEN_MPI = _Launcher(
    "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",), job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)  # fmt: skip
_MVAPICH = _Launcher(
    "mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",),
    ("MV2_COMM_WORLD_LOCAL_SIZE",),
)  # fmt: skip
# SLURM_NTASKS is the job's: a shell of salloc has it, and the script of sbatch, which is one process. srun's is the
# step's.
_SLURM = _Launcher(
    "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (),
    ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)  # fmt: skip
_FLUX = _Launcher(
    "flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), (), ("FLUX_JOB_NNODES",),
    ("FLUX_JOB_ID",),
)  # fmt: skip
_JSRUN = _Launcher(
    "jsrun", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",),
    ("JSM_NAMESPACE_LOCAL_SIZE",), job=("LSB_JOBID",),
)  # fmt: skip
_PMI = _Launcher(  # of MPICH and Intel MPI, and of Cray's PALS
    "mpirun (PMI)", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), job=("PMI_PORT", "PALS_APID"),
)  # fmt: skip
# mpirun may start its daemons by srun, whose variables the ranks then inherit: so Slurm's come after MPI's own. Other
# launchers set PMI's, too.
_LAUNCHERS = _OPEN_MPI, _MVAPICH, _SLURM, _FLUX, _JSRUN, _PMI
_RANK_ONLY = "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"  # no variable has the number of ranks


def adopt() -> bool:
    """Translate a launcher's variables into torchrun's; return whether there is a launcher, else this is a world of
    one.

    Raises `PlatformError`, which names the variables that it found, if they describe no complete world.
    """
    if _set(("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _torchrun()
    described = False
    for launcher in _LAUNCHERS:
        variables = _set((launcher.rank, *launcher.size))
        described = described or bool(variables)
        size = _first(launcher.size, variables) or ""
        is_shell = launcher is _SLURM and launcher.rank not in variables  # of salloc
        if variables and size != "1" and not is_shell:
            _translate(launcher, variables, size)
            return True
    if not described and (rank := _set(_RANK_ONLY)):
        raise PlatformError(f"{_listed(rank)}, and no number of ranks; expected ranks that {_TORCHRUN} starts")
    return False


def _torchrun() -> bool:
    variables = _set(("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if "RANK" in variables and "WORLD_SIZE" in variables:
        _check(variables["RANK"], variables["WORLD_SIZE"], variables)
        return True
    if variables in ({"WORLD_SIZE": "1"}, {"LOCAL_RANK": "-1"}):  # as some programs say that there is one process
        return False
    raise PlatformError(
        f"{_listed(variables)}; expected RANK and WORLD_SIZE too, or none of them: start with {_TORCHRUN}"
    )


def _translate(launcher: _Launcher, variables: dict[str, str], size: str) -> None:
    known = variables | _set((*launcher.local_rank, *launcher.local_size, *launcher.num_hosts))
    if launcher is _SLURM and not _set(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")):
        raise PlatformError(
            f"{_listed(known)}, and no SLURM_STEP_NUM_TASKS: a job script's own process, not one of srun's; start "
            f"ranks with `srun python script.py` or `{_TORCHRUN}`, or one process with `env -u SLURM_PROCID ...`"
        )
    _check(variables.get(launcher.rank, ""), size, known)
    address = os.environ.get("MASTER_ADDR")
    if not address and not _on_one_host(launcher, known, size):
        raise PlatformError(
            f"{_listed(known)}: {size} ranks, not known to share one host, and no MASTER_ADDR; expected ranks of one "
            f"host, or MASTER_ADDR and MASTER_PORT at which they connect. On one host: {_TORCHRUN}"
        )
    os.environ.update(
        RANK=variables[launcher.rank],
        WORLD_SIZE=size,
        LOCAL_RANK=_first(launcher.local_rank, known) or variables[launcher.rank],
        MASTER_ADDR=address or "127.0.0.1",
        MASTER_PORT=os.environ.get("MASTER_PORT") or str(_port(launcher)),
    )


def _on_one_host(launcher: _Launcher, known: dict[str, str], size: str) -> bool:
    return _first(launcher.num_hosts, known) == "1" or _first(launcher.local_size, known) == size


def _port(launcher: _Launcher) -> int:
    """Return the port that all ranks derive from the job or, where nothing names it, from their parent process."""
    job = _set(launcher.job) or {"parent": str(os.getppid())}
    return _FIRST_PORT + zlib.crc32(repr(sorted(job.items())).encode()) % _NUM_PORTS


def _check(rank: str, size: str, variables: dict[str, str]) -> None:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise PlatformError(
            f"{_listed(variables)}; expected a number of ranks, and a rank from 0 below it: start with {_TORCHRUN}"
        )


def _set(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _first(names: tuple[str, ...], variables: dict[str, str]) -> str | None:
    return next((variables[name] for name in names if name in variables), None)


def _listed(variables: dict[str, str]) -> str:
    return "the environment has " + ", ".join(f"{name}={value}" for name, value in variables.items())
