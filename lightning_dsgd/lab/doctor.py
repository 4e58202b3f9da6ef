"""What works on this machine, and what to do about the rest.

    lightning-dsgd doctor                 # ends with 1 if nothing could train here
    lightning-dsgd doctor mpi mpiexec     # ends with 1 if one of these does not work
    lightning-dsgd doctor --json

Whatever may hang or end a process (a driver, an MPI library) is asked in a child process that has
so many seconds.  Nothing here raises: what a check could not find out is what it reports.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from tqdm import tqdm

from lightning_dsgd import hyperparameters
from lightning_dsgd.lab.jobs import network
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.transport.host_names import NODE_LISTS, first_node

CHILD_TIMEOUT_S: Final = 90.0

_LIBRARIES: Final = """
import json, torch, torch.distributed as dist
from lightning_dsgd.lab import accelerators
found = {"torch": torch.__version__, "gloo": dist.is_gloo_available(), **accelerators.seen()}
found["nccl"] = accelerators.nccl_version() if dist.is_nccl_available() else None
print(json.dumps(found), flush=True)
"""
_VERSIONS: Final = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("lightning", "wandb", "scikit-learn", "matplotlib", "jsonargparse", "mpi4py"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found), flush=True)
"""
_MPI: Final = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
found = {"library": MPI.Get_library_version().strip().splitlines()[0].rstrip("\\0")}
print(json.dumps(found), flush=True)
level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
found["level"] = next(n for n in names if getattr(MPI, "THREAD_" + n) == level)
print(json.dumps(found), flush=True)
MPI.Finalize()
"""

_NEEDED: Final = ("Python", "torch", "Lightning")
"""The subjects that must work for any training."""
_MALWARE: Final = ("2.6.2", "2.6.3")
"""Releases of Lightning, which pyproject.toml excludes."""

LAUNCHERS: Final = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    "SLURM": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS"),
    "mpiexec (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec (MPICH)": ("PMI_SIZE", "PMI_RANK", "PMI_SIZE"),
}
"""Which variables a launcher sets: one that is always there, the rank, the number of ranks."""
_PREFIXES: Final = ("OMPI_", "PMI", "SLURM_", "HYDRA_", "MPI_LOCAL")
"""Prefixes of variables by which an MPI library would take the child for a rank of our own job."""
_SIOCGIFADDR: Final = 0x8915
_OWN_VARIABLES: Final = {
    "NCCL": "NCCL_SOCKET_IFNAME",
    "UCX": "UCX_NET_DEVICES",
    "libfabric": "FI_TCP_IFACE",
    "Open MPI": "OMPI_MCA_btl_tcp_if_include",
}
"""The variables by which a library is told its network interface."""


@dataclass(frozen=True)
class Finding:
    """Holds one line of the report.

    Args:
        subject: what was looked at
        works: whether it can be used here
        found: what is there, or why it is not
        advice: what to do about it
    """

    subject: str
    works: bool
    found: str
    advice: str = ""


def main(argv: list[str] | None = None) -> None:
    """Prints the report; exits with 1 where something is missing that was asked for."""
    parser = Parser("doctor", __doc__)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="SUBJECT",
        help=f"what must work, of the report's second column; by default {', '.join(_NEEDED)}",
    )
    parser.add_argument("--json", action="store_true", help="prints JSON, for programs")
    args = parser.parse_args(argv)
    findings = examine()
    try:
        missing = missing_of(findings, args.subjects or _NEEDED)
    except ValueError as error:
        parser.error(str(error))
    print(
        json.dumps([asdict(each) for each in findings], indent=1) if args.json else report(findings)
    )
    if missing:
        sys.exit(f"error: missing here: {', '.join(missing)}")


def missing_of(findings: list[Finding], subjects: Collection[str]) -> list[str]:
    """Returns which of these subjects do not work; raises `ValueError` for an unknown one."""
    known = {finding.subject.lower(): finding for finding in findings}
    for subject in subjects:
        if subject.lower() not in known:
            raise ValueError(
                f"the subject must be one of {', '.join(known)}, got {subject!r}"
                f"{hyperparameters.did_you_mean(subject.lower(), known)}"
            )
    found = [known[subject.lower()] for subject in subjects]
    return [finding.subject for finding in found if not finding.works]


def examine() -> list[Finding]:
    """Returns all findings; takes some seconds."""
    checks: dict[str, Callable[[], list[Finding]]] = {
        "torch": torch_and_cuda,
        "packages": packages,
        "MPI": mpi,
        "launcher": launcher,
        "network": network_of_ranks,
        "namespaces": emulated_networks,
    }
    findings = [
        Finding("Python", True, f"{platform.python_version()}, {os.cpu_count()} cores"),
    ]
    for subject, check in _one_by_one(checks):
        try:
            findings += check()
        except Exception as error:  # the report goes on, and says so
            findings.append(Finding(subject, False, f"{type(error).__name__}: {error}"))
    return findings


def _one_by_one(checks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the checks by their names, and shows at a terminal which one is under way."""
    with tqdm(total=len(checks), unit="check", leave=False, disable=None) as bar:
        for name, check in checks.items():
            bar.set_postfix_str(name)
            yield name, check
            bar.update()


def report(findings: list[Finding]) -> str:
    """Returns one line for each finding, and the advice below."""
    lines = []
    for finding in findings:
        lines.append(f"{'ok' if finding.works else '--'}  {finding.subject:17}{finding.found}")
        if finding.advice:
            lines.append(f"{'':21}{finding.advice}")
    return "\n".join(lines)


def ask(
    code: str, timeout_s: float = CHILD_TIMEOUT_S, env: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Returns a child process's finding, and why the process did not come to its end, if so."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=env, errors="replace"
        )
        output, why = done.stdout, ""
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            why = last[0] if last else f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        output = said.decode(errors="replace") if isinstance(said, bytes) else said
        why = f"no answer within {timeout_s:g} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return (json.loads(lines[-1]) if lines else {}), why


def torch_and_cuda() -> list[Finding]:
    """Examines torch, the devices that torch sees, and NCCL."""
    found, why = ask(_LIBRARIES)
    if "torch" not in found:
        return [Finding("torch", False, why, "install torch: https://pytorch.org/get-started")]
    transport = "gloo" if found["gloo"] else "without gloo, which ranks need to find each other"
    findings = [Finding("torch", found["gloo"], f"{found['torch']}, {transport}")]
    if found["devices"]:
        devices = f"{len(found['devices'])} x {found['devices'][0]}, CUDA {found['built_for']}"
        findings.append(Finding("CUDA", True, devices))
    elif found["built_for"]:
        advice = 'see whether `nvidia-smi` does; accelerator="cpu" works'
        findings.append(
            Finding("CUDA", False, f"{found['built_for']}, but no device is seen", advice)
        )
    else:
        advice = 'accelerator="cpu" works; for GPUs install a CUDA build of torch'
        findings.append(Finding("CUDA", False, "this torch is built without it", advice))
    nccl = found["nccl"]
    advice = "" if nccl else "only GPUs need it; it comes with a CUDA build of torch"
    findings.append(Finding("NCCL", bool(nccl), nccl or "not in this torch", advice))
    return findings


def packages() -> list[Finding]:
    """Examines Lightning, W&B, and what the extras bring."""
    versions, why = ask(_VERSIONS)
    if why:
        return [Finding("packages", False, why)]
    lightning = versions["lightning"] or "not installed"
    fits = lightning.startswith("2.6.") and lightning not in _MALWARE
    advice = "" if fits else "pip install 'lightning>=2.6,<2.7,!=2.6.2,!=2.6.3'"
    if lightning in _MALWARE:
        lightning += ", a release with malware: change the passwords and keys of this machine"
    findings = [Finding("Lightning", fits, lightning, advice)]
    mode = os.environ.get("WANDB_MODE", "online unless WANDB_MODE=offline or offline=True")
    wandb = versions["wandb"]
    text, advice = (f"{wandb}, {mode}", "") if wandb else ("not installed", "pip install wandb")
    findings.append(Finding("W&B", bool(wandb), text, advice))
    uses = {
        "jsonargparse": "`lightning-dsgd fit`",
        "scikit-learn": "the digits",
        "matplotlib": "plots",
    }
    for name, use in uses.items():
        version = versions[name]
        advice = "" if version else f"for {use}: pip install {name}"
        findings.append(Finding(name, bool(version), version or "not installed", advice))
    return findings


def mpi() -> list[Finding]:
    """Examines the MPI library that mpi4py would load, its thread level, and mpiexec."""
    versions, _ = ask(_VERSIONS)
    start = mpiexec()
    if not versions.get("mpi4py"):
        advice = 'only transport="mpi" needs it: pip install mpi4py mpich'
        return [Finding("MPI", False, "mpi4py is not installed", advice), start]
    alone = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}
    found, why = ask(_MPI, env=alone)
    if "library" not in found:
        advice = (
            "install an MPI library (for example `pip install mpich`) or uninstall mpi4py: "
            "mpi4py without a library makes every lightning.Trainer() raise an error"
        )
        return [Finding("MPI", False, f"mpi4py {versions['mpi4py']}: {why}", advice), start]
    level = found.get("level")
    text = f"{found['library']}, thread level {level or f'unknown ({why})'}"
    advice = "" if level == "MULTIPLE" else "lanes need MPI_THREAD_MULTIPLE: use another build"
    return [Finding("MPI", level == "MULTIPLE", text, advice), start]


def mpiexec() -> Finding:
    """Finds what starts ranks: on the PATH, or in an environment that is not activated."""
    found = shutil.which("mpiexec")
    if found:
        return Finding("mpiexec", True, found)
    beside = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    if beside:
        advice = "call it by this path, or activate its environment"
        return Finding("mpiexec", True, f"{beside}, not on the PATH", advice)
    return Finding("mpiexec", False, "not found")


def launcher() -> list[Finding]:
    """Finds which launcher has started this process."""
    seen = []
    for name, (always, rank, size) in LAUNCHERS.items():
        if always in os.environ:
            place = f"rank {os.environ.get(rank, '?')} of {os.environ.get(size, '?')}"
            seen.append(f"{name}, {place}")
    if seen:
        return [Finding("launcher", True, "; ".join(seen))]
    return [Finding("launcher", True, "none: Lightning starts the ranks of this machine by itself")]


def network_of_ranks() -> list[Finding]:
    """Examines whether all traffic of this job takes one network."""
    subject, host = "network", rendezvous()
    if not host:
        return [Finding(subject, True, "known on a node of a job: `srun lightning-dsgd doctor`")]
    try:
        found = interfaces()
    except OSError as error:
        advice = "give the name to the cluster's DNS or to /etc/hosts of every node"
        text = f"the ranks meet at {host}; a name does not resolve: {error}"
        return [Finding(subject, False, text, advice)]
    text = ", ".join(f"{kind}: {interface}" for kind, interface in found.items())
    is_one = len(set(found.values())) == 1
    advice = "" if is_one else "set GLOO_SOCKET_IFNAME, and the library's variable, to one of them"
    return [Finding(subject, is_one, f"{text}; the ranks meet at {host}", advice)]


def rendezvous(variables: Mapping[str, str] = os.environ) -> str:
    """Returns the machine where the ranks of this job meet; empty if no launcher has named it."""
    given = variables.get("MASTER_ADDR", "")
    lists = [variables[name] for name in NODE_LISTS if name in variables]
    return given or (first_node(lists[0]) if lists else "")


def interfaces(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns over which network interface each kind of traffic between ranks leaves this machine.

    Traffic that takes a second, slower network makes a job slow, and no error tells it.

        messages          GLOO_SOCKET_IFNAME, else the interface that leads to the rendezvous
        gloo              GLOO_SOCKET_IFNAME, else the one whose address this machine's name has
        NCCL, UCX, MPI    their own variables; without one, the library chooses, and nothing is told

    Raises:
        OSError: if a name does not resolve
    """
    chosen = variables.get("GLOO_SOCKET_IFNAME", "")
    found = {
        "messages": chosen or _interface_of(_address_towards(rendezvous(variables))),
        "gloo": chosen or _interface_of(socket.gethostbyname(socket.gethostname())),
    }
    for name, variable in _OWN_VARIABLES.items():
        given = variables.get(variable, "").lstrip("=")
        if given and not given.startswith("^"):  # which leaves interfaces out
            found[name] = given
    return found


def _address_towards(host: str) -> str:
    """Returns this machine's address on the way to a host."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only looks up the route
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """Returns the interface with this address, or the address where none has it."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return address


def emulated_networks() -> list[Finding]:
    """Examines whether `bench --network` can emulate links, and their latency."""
    reason = network.why_not()
    if reason:
        advice = "`bench --network` then measures over loopback, and says so"
        return [Finding("namespaces", False, reason, advice)]
    findings = [Finding("namespaces", True, "links of a chosen rate can be emulated")]
    try:
        with network.Network(1, Link(1e9, 1e-3)):
            findings.append(Finding("netem", True, "so can their latency"))
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        findings.append(Finding("netem", False, str(error), "give --network a rate alone"))
    return findings
