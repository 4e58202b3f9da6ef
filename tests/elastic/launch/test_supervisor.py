"""`lightning-dsgd launch` on real processes: what it starts, tells, buries and exits with."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric

import lightning_dsgd as dsgd
from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.elastic import register
from lightning_dsgd.elastic.launch import command, supervisor
from lightning_dsgd.elastic.launch.node import Place
from lightning_dsgd.elastic.register import Register
from lightning_dsgd.transport import TransportError
from tests.support.launched import Launched, await_files, is_alive, until
from tests.support.mpi import ROOT
from tests.support.ports import free_port

# Writes a file of its rank, and then does what its rank is told.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
print("rank", rank, "says", sys.argv[2:])
def tell(name, text):
    part = Path(sys.argv[1], f".{name}_{rank}")
    part.write_text(text)
    part.rename(Path(sys.argv[1], f"{name}_{rank}"))
def on_interrupt(signum, frame):
    tell("interrupted", "")
    sys.exit(3)
"""
# In short sleeps: Python calls no handler in one that begins just after the signal came.
WAITS = SCRIPT + 'tell("pid", str(os.getpid()))\nwhile True: time.sleep(0.1)\n'
TELLS = SCRIPT + 'tell("told", json.dumps({name: os.environ[name] for name in names}))\n'


def test_ranks_find_the_variables_of_torchrun_and_their_arguments(tmp_path):
    with Launched(tmp_path, TELLS, "--ranks", "2", arguments=("--lr", "3")) as job:
        assert job.end() == 0, job.said("stderr")
    assert job.said("stdout") == "rank 0 says ['--lr', '3']\n"
    assert job.said("logs/rank_1.0.log") == "rank 1 says ['--lr', '3']\n"
    assert json.loads(job.said("told_1")) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_a_rank_that_fails_makes_the_others_end_and_the_job_fail(tmp_path):
    """Its last words are the job's; what an earlier job has left in the folder is shown nowhere."""
    words = 'print("[rank 1] error: no\\nsuch thing"); sys.exit(7)'
    (tmp_path / "logs").mkdir()
    for name in ("rank_0.0.log", "rank_0.1.log", "rank_10.0.log"):
        (tmp_path / "logs" / name).write_text("of an earlier job")
    fails = SCRIPT + f'if rank == "1": {words}\n' + WAITS.removeprefix(SCRIPT)
    with Launched(tmp_path, fails, "--ranks", "3", "--end-s", "0.2") as job:
        assert job.end() == 1
    assert "rank 1 ended with 7" in job.said("stderr")
    assert "rank 0 ended with -15" in job.said("stderr")
    assert job.said("stderr").splitlines()[-2:] == ["error: no", "such thing"]
    assert "earlier" not in job.said("stdout")
    names = [f"rank_{name}.0.log" for name in (0, 1, 10, 2)]
    assert sorted(file.name for file in (tmp_path / "logs").glob("rank_*")) == names


@pytest.mark.exhaustive
def test_ranks_run_a_command_in_place_of_a_script(tmp_path, monkeypatch, capsys):
    """Its help, which ends with 0; a file of that name comes first."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        command.main(["--ranks", "1", "--imports", "", "test", "--help"])
    assert end.value.code == 0, capsys.readouterr().err
    assert "usage: lightning-dsgd test" in (tmp_path / "launch_logs/rank_0.0.log").read_text()


# What the ranks of a training tell the launcher, without the training.
TRAINS = (
    SCRIPT
    + """
from lightning_dsgd.elastic.register import Register, Trained
register = Register(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60.0)
def meet(name, *ranks):
    register.say(name + rank)
    assert register.wait([name + other for other in ranks], 60.0, lambda: False), name
is_first = not register.read("met" + rank)
if is_first:
    register.say_trains()
    meet("met", *"012")
    if rank == "0":
        register.say_survives(can_be_joined=sys.argv[2] == "joinable")
        register.read("")
    meet("begun", "0")
"""
)
LEFT = """
if rank == "1": os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_ends_with_0_is_not_the_end_of_training(tmp_path):
    with Launched(tmp_path, TRAINS + LEFT, "--ranks", "3", arguments=("alone",)) as job:
        assert job.end() == 1
    said = job.said("stderr")
    assert "rank 1 ended with 0, but training goes on: " in said
    assert all(f"rank {rank} is not replaced: a rank can join a" in said for rank in range(3))
    assert "the ranks of this node have ended, but training has not come to its end" in said


RETURNS = """
if rank != "1":
    meet("over", "1")
    sys.exit(3 if rank == "2" else 0)
if is_first: os._exit(0)  # as a script does that has caught an error
if not register.read("again"):
    register.say("again")
    register._say_trained(Trained(time.monotonic() - 601.0))
    sys.exit(5)
register.say_over()
meet("over", "1")
"""


@pytest.mark.exhaustive
def test_a_rank_that_has_trained_for_long_may_be_lost_as_often_as_the_first_time(tmp_path):
    options = ("--ranks", "3", "--max-restarts", "1")
    with Launched(tmp_path, TRAINS + RETURNS, *options, arguments=("joinable",)) as job:
        assert job.end() == 0, job.said("stderr")
    said = job.said("stderr")
    assert "rank 1 ended with 0, but training goes on: " in said
    assert said.count("rank 1 started again") == 2
    assert "rank 2 ended with 3, once training was over, and is not replaced: " in said


FAILS = """
if is_first and rank != "0":
    os.kill(os.getpid(), signal.SIGKILL)
meet("back", "1")
if rank == "0":
    register.say_trains_no_more("must go on with more than half of view 0, got 0")
    sys.exit(1)
"""


def test_where_no_rank_trains_any_more_the_job_ends_in_place_of_starting_ranks_again(tmp_path):
    waits = TRAINS + FAILS + WAITS.removeprefix(SCRIPT)
    options = ("--ranks", "3", "--end-s", "0.2", "--max-restarts", "1000")
    with Launched(tmp_path, waits, *options, arguments=("joinable",)) as job:
        assert job.end() == 1
    said = job.said("stderr")
    assert (
        "no rank is left that trains (rank 0 must go on with more than half of view 0, got 0), so "
        "none that is started again could join; all end: start the job anew, from a checkpoint"
    ) in said
    [shown] = re.findall(r"the output of rank ([12]) follows: .*/rank_\1.1.log", said)
    assert [f"rank {rank} says ['joinable']" for rank in ("0", shown)] == job.said(
        "stdout"
    ).splitlines()


# Rank 0 speaks for node 1 too, whose supervisor dies together with its rank: so nobody says so.
NODE_LOST = (
    SCRIPT
    + """
if list(Path(sys.argv[1]).glob("began_*")): sys.exit(2)
from lightning_dsgd.elastic.register import Register
register = Register(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60.0)
register.say_trains()
register.say_survives(can_be_joined=True)
os.environ["RANK"] = os.environ["GROUP_RANK"] = "1"
register.say_lives(1)
register.say_trains()
register.say_ended(1)
os.environ["RANK"] = "0"
register.say_trains_no_more("must go on with more than half of view 0, got 1")
tell("began", "")
sys.exit(1)
"""
)


def test_a_rank_whose_node_has_died_with_its_supervisor_does_not_train(
    tmp_path, monkeypatch, capsys
):
    for module in (supervisor, register):
        monkeypatch.setattr(module, "SILENT_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "script.py"
    file.write_text(NODE_LOST)
    ranks = [sys.executable, "-u", str(file), str(tmp_path)]
    place = Place(1, 2, 0, "127.0.0.1", free_port())
    assert supervisor.Supervisor(ranks, place, tmp_path / "logs", 0.2, 3).run() == 1
    assert (
        "no rank is left that trains (rank 0 must go on with more than half of view 0, got 1)"
        in capsys.readouterr().err
    )


def test_a_rank_comes_back_with_the_others_of_its_replica_or_none_of_them(tmp_path, capsys):
    keeper = Register("127.0.0.1", 0, 20.0, serves=True)
    keeper.say_survives(can_be_joined=True, num_shards=2)
    place = Place(4, 1, 0, "127.0.0.1", keeper.port)
    ours = supervisor.Supervisor(["true"], place, tmp_path, 1.0, 1)
    ours._told._register = keeper
    for rank, num_counted in zip(ours._ranks, [1, 1, 2, 1], strict=True):
        rank.num_counted, rank.num_failures = num_counted, 0
    for rank in ours._ranks:
        ours._plan_restart(rank)
    assert [rank.again_at is not None for rank in ours._ranks] == [True, True, False, False]
    said = capsys.readouterr().err
    assert "rank 2 is not started again: --max-restarts is 1, and it has not trained for" in said
    assert "rank 3 is not started again: rank 2, which holds its replica with it, is not" in said


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_rank_that_was_given_up_counts_again_once_its_launcher_is_started_again(
    num_shards, tmp_path
):
    keeper = Register("127.0.0.1", 0, 20.0, serves=True)
    keeper.say_survives(can_be_joined=True, num_shards=num_shards)
    keeper.say_gone(2)
    ours = supervisor.Supervisor(["true"], Place(2, 2, 1, "127.0.0.1", keeper.port), tmp_path, 1, 1)
    with ours._told.open():
        assert ours._told.gone_of_row(3) == []
        keeper.say_gone(2)
        assert ours._told.gone_of_row(2) == []
        assert ours._told.gone_of_row(3) == [2] * (num_shards == 2)


def test_a_process_that_is_started_by_hand_while_others_train_a_loop_is_told(monkeypatch):
    keeper = Register("127.0.0.1", 0, 20.0, serves=True)
    keeper.say_survives(can_be_joined=True)
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "3"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(keeper.port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(RuntimeError, match="which cannot know its place in their loop"),
        dsgd.decentralized(model, optimizer, dsgd.WAGMA(), on_loss="continue"),
    ):
        pass


def test_no_constructor_waits_for_a_launcher(monkeypatch):
    """The address is one where nobody listens: whoever asked there would wait, or fail."""
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "RANK": "1"}
    given |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    given |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    threads = threading.active_count()
    for name in ALL_ALGORITHMS:
        L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
        Fabric(strategy=name, accelerator="cpu", devices=2)
    assert threading.active_count() == threads
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("told", "nodes"), [("SIGTERM", "1"), ("SIGINT", "2"), ("notice", "2")])
def test_ranks_leave_where_other_nodes_may_go_on_and_else_all_stop(tmp_path, told, nodes):
    """The second SIGTERM after notice is none: machines get both."""
    passed_on = signal.SIGTERM if nodes == "2" and told != "SIGINT" else signal.SIGINT
    takes = SCRIPT + f"signal.signal({int(passed_on)}, on_interrupt)\n"
    file = tmp_path / "leave"
    options = ("--nodes", nodes, "--rendezvous", f"127.0.0.1:{free_port()}", "--notice", str(file))
    with Launched(tmp_path, takes + WAITS.removeprefix(SCRIPT), "--ranks", "2", *options) as job:
        pids = job.pids(2)
        if told == "notice":
            file.touch()
            until(lambda: f"end: {file} is there" in job.said("stderr"))
        job.send(signal.SIGINT if told == "SIGINT" else signal.SIGTERM)
        await_files(tmp_path, "interrupted_*", 2)
        until(lambda: not any(map(is_alive, pids)))
        if nodes == "2":
            until(lambda: "waits up to 60 s for the ranks of 1 other" in job.said("stderr"))
            job.send(signal.SIGTERM)
        assert job.end() == 1
    assert "ended with 3" in job.said("stderr")


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path):
    deaf = SCRIPT + "sys.exit = print\nsignal.signal(signal.SIGINT, on_interrupt)\n"
    with Launched(tmp_path, deaf + WAITS.removeprefix(SCRIPT), "--ranks", "2") as job:
        pids = job.pids(2)
        job.send(signal.SIGINT)
        await_files(tmp_path, "interrupted_*", 2)
        job.send(signal.SIGINT)
        assert job.end() == 1
    assert not any(map(is_alive, pids))


# Told to end by SIGTERM, which it does not heed; its first process fails.
DEAF = (
    SCRIPT
    + """
signal.signal(signal.SIGTERM, on_interrupt)
sys.exit = print
tell("deaf", "")
while rank != "0" or not list(Path(sys.argv[1]).glob("deaf_1")): time.sleep(0.1)
os._exit(5)
"""
)


def test_a_rank_that_does_not_end_by_itself_gets_sigterm_and_then_sigkill(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(supervisor, "_TERM_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "script.py"
    file.write_text(DEAF)
    ranks = [sys.executable, "-u", str(file), str(tmp_path)]
    place = Place(2, 1, 0, "127.0.0.1", 0)
    assert supervisor.Supervisor(ranks, place, tmp_path / "logs", 0.2, 3).run() == 1
    assert (tmp_path / "interrupted_1").exists()  # so it had SIGTERM first
    said = capsys.readouterr().err
    assert "rank 0 ended with 5" in said
    assert "rank 1 ended with -9" in said


def test_no_process_of_a_rank_is_left_when_the_rank_is_killed(tmp_path):
    forks = SCRIPT + 'if not os.fork(): rank += "_child"\n' + WAITS.removeprefix(SCRIPT)
    with Launched(tmp_path, forks, "--ranks", "1") as job:
        pids = job.pids(2)
        os.kill(pids[0], signal.SIGKILL)
        assert job.end() == 1
    until(lambda: not any(map(is_alive, pids)))


def test_ranks_end_with_their_supervisor(tmp_path):
    with Launched(tmp_path, WAITS, "--ranks", "2") as job:
        pids = job.pids(2)
        job.send(signal.SIGKILL)
        until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "1", "--nodes", "2"], "several nodes must know where the ranks meet"),
        (["--ranks", "1", "--node", "1"], "--node must be below --nodes"),
        (["--ranks", "1", "--join"], "ranks that join must be told where the others meet"),
        (["--ranks", "1", "--rendezvous", "here"], "an address and a port, got 'here'"),
        (["--ranks", "1", "--max-restarts", "-1"], "--max-restarts must be at least 0, got -1"),
        (["--ranks", "1", "--end-s", "-1"], "--end-s must be a number of seconds, got -1"),
        (["--ranks", "1", "--notice", "ftp://x/y"], "a URL of http, a file or a command, got 'ftp"),
        (["--ranks", "1", "--notice", str(ROOT / "README.md")], "README.md; remove it"),
        (["--ranks", "1", "nowhere.py"], "the script must be a file, got nowhere.py"),
    ],
)
def test_what_cannot_be_started_is_refused(options, match, capsys):
    with pytest.raises(SystemExit):
        command.main([*options, str(ROOT / "tests/conftest.py")])
    assert match in capsys.readouterr().err


# ---- what is written where the ranks meet ----
def two_registers() -> tuple[Register, Register]:
    keeper = Register("127.0.0.1", 0, 10.0, serves=True)
    return keeper, Register("127.0.0.1", keeper.port, 10.0)


def test_ranks_that_start_again_from_a_checkpoint_find_no_training_of_before(monkeypatch) -> None:
    keeper, other = two_registers()
    keeper.say_survives(can_be_joined=True)
    assert keeper.survives()  # once it is asked again, the store has taken it
    assert other.survives()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not Register("127.0.0.1", keeper.port, 10.0).survives()
    keeper.say_stopped()
    assert not keeper.survives()
    assert not other.survives()


def test_a_store_that_nobody_has_written_to_or_that_has_ended_is_an_error() -> None:
    keeper, other = two_registers()
    with pytest.raises(TransportError, match="must have been started by `lightning-dsgd launch`"):
        other.size()
    keeper.say_survives(can_be_joined=True)
    assert keeper.survives()
    del keeper
    with pytest.raises(TransportError, match="the store where the ranks meet has ended"):
        other.survives()
