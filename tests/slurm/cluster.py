"""A cluster of SLURM on one machine: a head and three nodes, each with a network of its own.

    n1, n2, n3   10.77.0.1 to 10.77.0.3   slurmd, and what a job starts on this node
    head         10.77.0.4                munged, slurmctld; sbatch, srun and squeue run here

A node is a namespace of processes, mounts and network, with a host name of its own.  So a node
dies with all its processes at once, as a machine does.  Debian's packages are unpacked into a
folder, which lies over /usr in these namespaces only: the machine itself never has SLURM.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from lightning_dsgd.lab.jobs.network import INTERFACE, Network, why_not
from lightning_dsgd.lab.link import Link
from tests.support.mpi import ROOT

NODES = ("n1", "n2", "n3")
HEAD = "head"
WITHIN_S = 400.0
"""The longest wait for a job, on a busy machine."""
_PACKAGES = ("slurm-wlm", "munge")
_DAEMON_S = 60.0
_CONFIGURATION = """\
ClusterName=two
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MailProg=/bin/true
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=1
NodeName=n[1-3] CPUs=32 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unpacked(folder: Path) -> Path:
    """Returns the folder with the programs of SLURM; the first call fetches and unpacks them.

    Raises:
        RuntimeError: if Debian's packages cannot be had here
    """
    programs = folder / "unpacked"
    if not programs.exists():
        fetched, made = folder / "packages", folder / "being_unpacked"
        (fetched / "partial").mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        fetch = ["apt-get", "install", "--download-only", "--yes", "--no-install-recommends"]
        fetch += ["--reinstall", "-o", f"Dir::Cache::archives={fetched}"]
        _done(["apt-get", "update", "-qq"])
        _done([*fetch, "-o", "Debug::NoLocking=1", *_PACKAGES])
        for package in fetched.glob("*.deb"):
            _done(["dpkg", "-x", str(package), str(made)])
        for daemon in ("slurmctld", "slurmd", "slurmstepd"):
            name = made / "usr/sbin" / daemon
            if not name.exists():  # Debian has two builds, and a link to one of them
                name.symlink_to(f"{daemon}-wlm")
        made.rename(programs)
    return programs


def _done(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")


def impossible() -> str:
    """Says why this machine cannot be a cluster; empty if it can."""
    missing = [tool for tool in ("apt-get", "dpkg", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"a cluster needs {' and '.join(missing)}, as Debian has them"
    return why_not()


class Node:
    """A machine of the cluster: what runs inside ends with it.

    Args:
        name: its host name
        enter: what a command is preceded by to run in its network
        folder: of the cluster
        programs: what lies over /usr
        hosts: the text of its /etc/hosts
    """

    def __init__(
        self, name: str, enter: list[str], folder: Path, programs: Path, hosts: str
    ) -> None:
        self.name = name
        own = folder / name
        own.mkdir()
        self.hosts = own / "hosts"
        self.hosts.write_text(hosts)
        setup = (
            f"hostname {name} && mount -t overlay -o lowerdir={programs}/usr:/usr overlay /usr && "
            f"mount --bind {own}/hosts /etc/hosts && mount -t proc proc /proc && "
            # The node ends with what waits here, and that with the process that holds the pipe.
            f"touch {own}/ready && cat"
        )
        unshare = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        self._first = subprocess.Popen(
            [*enter, *unshare, "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare complains of a signal that it cannot unblock
            cwd=folder,
        )
        until(lambda: (own / "ready").exists(), f"node {name} starts", _DAEMON_S)
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self._inside = children.split()[0]

    def command(self, *command: str) -> list[str]:
        """Returns the command that runs this one inside."""
        enter = ["nsenter", "--target", self._inside, "--uts", "--mount", "--pid", "--net"]
        return [*enter, f"--wd={os.getcwd()}", *command]

    @property
    def is_alive(self) -> bool:
        """Whether it has not died."""
        return self._first.poll() is None

    def die(self) -> None:
        """Kills all its processes, as when the power fails."""
        if self._first.poll() is None:
            os.kill(int(self._inside), signal.SIGKILL)
            self._first.communicate()


class Cluster:
    """Runs while the `with` block lasts.

    Args:
        folder: for what daemons write; the nodes share it, as they share the whole disk
        packages: where programs are unpacked, to be used again
    """

    def __init__(self, folder: Path, packages: Path) -> None:
        self.folder, self.programs = folder, unpacked(packages)
        self._network = Network(len(NODES) + 1, Link(10e9))
        self.nodes: dict[str, Node] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        self._network.__enter__()
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self) -> None:
        conf = self.folder / "slurm.conf"
        conf.write_text(_CONFIGURATION.format(folder=self.folder))
        for made in ("state", *(f"spool-{name}" for name in NODES)):
            (self.folder / made).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._make(HEAD)
        munge = [f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        munge += [f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log"]
        munge += [f"--seed-file={self.folder}/munge.seed"]
        # A path to a socket that others may write to is refused without --force.
        self._daemon(HEAD, "munged", "--foreground", "--force", *munge)
        until(lambda: (self.folder / "munge.socket").exists(), "munged listens", _DAEMON_S)
        self._daemon(HEAD, "slurmctld", "-D")
        for name in NODES:
            self.boot(name)
        self.await_states(dict.fromkeys(NODES, "idle"))

    def _end(self) -> None:
        for node in self.nodes.values():
            node.die()
        for daemon in self._daemons:
            daemon.wait(_DAEMON_S)
        self._network.__exit__(None, None, None)

    def boot(self, name: str) -> None:
        """Starts a node, for the first time or after its death."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        self._make(name)
        self.run_on(name, "ip", "link", "set", INTERFACE, "up")
        self._daemon(name, "slurmd", "-D", "-N", name)

    def _make(self, name: str) -> None:
        names = (*NODES, HEAD)
        enter = ["nsenter", f"--net=/run/netns/{self._network.namespace(names.index(name))}"]
        self.nodes[name] = Node(name, enter, self.folder, self.programs, self._hosts(names))

    def _hosts(self, names: Collection[str]) -> str:
        """The text of an /etc/hosts with the names of these machines."""
        machines = (*NODES, HEAD)
        known = [f"{self._network.address(machines.index(each))} {each}" for each in names]
        return "\n".join(["127.0.0.1 localhost", *known]) + "\n"

    def teach(self, name: str, *unknown: str) -> None:
        """Lets a node know the names of all machines but of these."""
        known = [each for each in (*NODES, HEAD) if each not in unknown]
        self.nodes[name].hosts.write_text(self._hosts(known))

    def _daemon(self, node: str, *command: str) -> None:
        with (self.folder / f"{command[0]}-{node}.out").open("w") as log:
            daemon = subprocess.Popen(
                self.nodes[node].command(*command),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._daemons.append(daemon)

    def _environment(self, **variables: str) -> dict[str, str]:
        """Of a user who has activated this interpreter's environment."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "PYTEST_"))
        }
        return {
            **kept,
            "PATH": f"{path}{os.pathsep}/usr/sbin",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            **variables,
        }

    def start(self, *command: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """Starts a command of a user, on the head."""
        enter = self.nodes[HEAD].command("env", f"--chdir={cwd}", *command)
        return subprocess.Popen(
            enter,
            env=self._environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, cwd: Path, within_s: float = WITHIN_S, **variables: str) -> str:
        """Returns what a command of a user says, which must succeed."""
        status, said = self.ended(*command, cwd=cwd, within_s=within_s, **variables)
        assert status == 0, f"{shlex.join(command)} ended with {status}:\n{said}"
        return said

    def ended(
        self, *command: str, cwd: Path, within_s: float = WITHIN_S, **variables: str
    ) -> tuple[int, str]:
        """Returns the exit status of a command of a user, and what it says."""
        process = self.start(*command, cwd=cwd, **variables)
        try:
            said, _ = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            raise AssertionError(
                f"{shlex.join(command)} has not ended within {within_s:g} s:\n{said}\n"
                f"{self.run('squeue', cwd=cwd, within_s=20.0)}"
            ) from None
        return process.returncode, said

    def submit(self, *command: str, cwd: Path, **variables: str) -> str:
        """Returns the number of the job that sbatch makes of these arguments."""
        said = self.run("sbatch", "--parsable", *command, cwd=cwd, **variables)
        return said.strip().splitlines()[-1]

    def job(self, number: str) -> dict[str, str]:
        """Returns what scontrol tells of a job, such as JobState, ExitCode and Restarts."""
        said = self.run("scontrol", "--oneliner", "show", "job", number, cwd=self.folder)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def await_job(self, number: str, state: str = "COMPLETED") -> dict[str, str]:
        """Waits until a job has ended in this state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(
            lambda: self.job(number)["JobState"] in (*over, state), f"job {number} ends", WITHIN_S
        )
        found = self.job(number)
        assert found["JobState"] == state, f"{found}\n{_text(found.get('StdOut'))}"
        return found

    def lose(self, name: str) -> None:
        """Lets the power of a node fail: nobody hears of it any more, not even that it ends."""
        self.run_on(name, "ip", "link", "set", INTERFACE, "down")
        self.nodes[name].die()

    def run_on(self, name: str, *command: str) -> None:
        """Runs a command of root on a machine."""
        _done(self.nodes[name].command(*command))

    def check_runs(self, number: str) -> None:
        """Raises `AssertionError` if a job has ended, with what it has said."""
        found = self.job(number)
        assert found["JobState"] in ("PENDING", "RUNNING"), _text(found.get("StdOut"))

    def restore(self) -> None:
        """Ends all jobs, and starts the nodes that have died."""
        self.ended("scancel", "--user=root", "--signal=KILL", "--full", cwd=self.folder)
        self.ended("scancel", "--user=root", cwd=self.folder)
        for name in NODES:
            if not self.nodes[name].is_alive:
                self.boot(name)
            self.teach(name)
        until(
            lambda: not self.run("squeue", "--noheader", cwd=self.folder), "all jobs end", _DAEMON_S
        )
        self.await_states(dict.fromkeys(NODES, "idle"))

    def await_states(self, wanted: dict[str, str]) -> None:
        """Waits until the nodes are in these states."""

        def are_so() -> bool:
            status, said = self.ended("sinfo", "-hN", "-o", "%n %t", cwd=self.folder)
            states = dict(line.split() for line in said.splitlines()) if status == 0 else {}
            return all(states.get(node, "") == state for node, state in wanted.items())

        until(are_so, f"nodes are {wanted}", _DAEMON_S)


def until(is_so: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    """Waits for something, and says what it has waited for if it does not come."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.2)  # between two looks


def _text(file: str | None) -> str:
    return Path(file).read_text() if file and Path(file).exists() else ""
