"""One worker process per device of a Ray cluster: a node host per node, which forks the node's ranks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corral.config.plan import Topology
from corral.engine.rank import Rank
from corral.errors import ConfigError, CorralError, InfraError
from corral.platform import platform
from corral.workers import logs, messages
from corral.workers.failures import as_error
from corral.workers.launcher import LineSink, print_line
from corral.workers.local_cluster import LocalCluster
from corral.workers.log_pump import LogPump
from corral.workers.messages import Failure, RankSpec, WorkerSpec
from corral.workers.node_env import NODE_OWN, wanted_of
from corral.workers.node_host import NodeHost
from corral.workers.placement import PlacedNode, await_listener, listens, make_ranks, reserve

PRELOAD = ("torch", "transformers")
POLL = 0.5  # seconds; also how soon Ctrl-C is noticed
ECHO = 1.5  # seconds given to other nodes after a failure, to find the one that came first
ANSWER = 120.0  # seconds a node host may take to start, or to answer a question about its node
STOP = 15.0  # seconds the node hosts may take to end their ranks
FLUSH = 10.0  # seconds for the last lines of the logs
READ = 10.0  # seconds one read of a node's logs may take

PASSED_ON = ("CORRAL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "NCCL_", "HCCL_", "GLOO_", "VLLM_")


class RayLauncher:
    """Launcher on a Ray cluster; starts local nodes itself when the topology names no address.

    worker: "module:Class", made in each rank as Class(rank, *worker_args). preload: modules imported once per node
    before its ranks are forked, where the device type allows it; they must not start threads or touch a device. wait:
    seconds for the cluster to have nnodes nodes with devices_per_node free devices each. sink: gets every line the
    ranks write (None: nobody).
    Raises InfraError when nodes or devices are missing or a worker dies at its start; errors of a worker's __init__
    come as from a call.
    """

    def __init__(
        self,
        topology: Topology,
        worker: str,
        worker_args: tuple[Any, ...],
        run_dir: str | Path,
        preload: Sequence[str] = PRELOAD,
        wait: float = 120.0,
        sink: LineSink | None = print_line,
    ) -> None:
        self._topology, self._run_dir = topology, Path(run_dir).absolute()
        self._cluster: LocalCluster | None = None
        self._group: Any = None
        self._hosts: list[Any] = []
        self._nodes: list[PlacedNode] = []
        self._pump: LogPump | None = None
        self._broken: str | None = None
        self._joined = False
        self._head, self._head_gone = "", False
        self.ranks: Sequence[Rank] = ()
        try:
            self._join(wait)
            self._group, self._nodes = reserve(topology.nnodes, topology.devices_per_node, topology.device, wait)
            self._hosts = [self._start_host(index, node, preload) for index, node in enumerate(self._nodes)]
            self._start_ranks(WorkerSpec(worker, messages.pack(worker_args)), sink)
        except BaseException:
            self.close()
            raise

    # Starting -------------------------------------------------------------------------------------------------------

    def _join(self, wait: float) -> None:
        import ray

        address = self._topology.ray_address
        if address is None:
            nnodes, devices = self._topology.nnodes, self._topology.devices_per_node
            self._cluster = LocalCluster.start(nnodes, devices, platform(self._topology.device).ray_resource)
            address = self._cluster.address
            seconds = self._cluster.seconds
            print(f"started {nnodes} local Ray nodes x {devices} devices at {address} in {seconds:.1f} s", flush=True)
        connect(address, wait)
        self._joined = True
        self._head = ray.get_runtime_context().gcs_address

    def _start_host(self, index: int, node: PlacedNode, preload: Sequence[str]) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices = self._topology.devices_per_node
        facts = platform(self._topology.device)
        early = tuple(preload) if facts.forks_after_import else ()
        resource = facts.ray_resource
        held: dict[str, Any] = {"num_cpus": 0, "resources": {resource: devices}}
        if resource == "CPU":
            held = {"num_cpus": devices}
        elif resource == "GPU":
            held = {"num_cpus": 0, "num_gpus": devices}
        actor = ray.remote(NodeHost).options(
            max_concurrency=8,  # a call, log reads and the end at the same time
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node.bundle),
            **held,
        )
        return actor.remote(
            index, str(self._run_dir), devices, early, _node_env(self._topology.device), os.getcwd(),
            self._topology.device, node.ip, wanted_of(os.environ),
        )  # fmt: skip

    def _start_ranks(self, worker: WorkerSpec, sink: LineSink | None) -> None:
        self.ranks = make_ranks(self._topology, self._one(0, "rendezvous", self._nodes[0].ip))
        for index in range(len(self._nodes)):
            for wrong in self._one(index, "unfit"):
                raise ConfigError(wrong.line())
        by_node = [self._ranks_of(index) for index in range(len(self._nodes))]
        offsets = [self._one(node, "log_sizes", [rank.rank for rank in ranks]) for node, ranks in enumerate(by_node)]
        if sink is not None:
            self._pump = LogPump(self._read_logs, offsets, sink)
        refs = []
        for index, (host, ranks) in enumerate(zip(self._hosts, by_node, strict=True)):
            variable = platform(self._topology.device).visible_devices
            visible = self._one(index, "visible_devices", variable).split(",") if variable else []
            if variable and visible != [""] and len(visible) < len(ranks):
                raise InfraError(_too_few(self._nodes[index].name, variable, visible, len(ranks)))
            specs = [RankSpec(rank, str(self._run_dir), _rank_env(rank, variable, visible)) for rank in ranks]
            refs.append(host.launch.remote(specs, worker))
        self._gather("start", refs)

    def _ranks_of(self, node: int) -> list[Rank]:
        return [rank for rank in self.ranks if rank.node == node]

    # Calls ----------------------------------------------------------------------------------------------------------

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See Launcher.call. What is not a CorralError (Ctrl-C, SIGTERM) ends all ranks before it passes on."""
        if len(args) != len(self.ranks):
            raise ValueError(f"{method}: {len(args)} argument tuples for {len(self.ranks)} ranks")
        if self._broken is not None:
            raise InfraError(f"{method}: the workers were ended after an earlier failure: {self._broken}")
        try:
            blobs = [messages.pack(each) for each in args]
            refs = [
                host.call.remote(method, [blobs[rank.rank] for rank in self._ranks_of(node)])
                for node, host in enumerate(self._hosts)
            ]
            return [messages.unpack(result) for result in self._gather(method, refs)]
        except CorralError as error:
            self._broken = str(error)
            raise
        except BaseException:
            self.close()
            raise

    def _gather(self, method: str, refs: list[Any]) -> list[bytes]:
        """Results of all ranks in order; raises for the first failure without waiting for the other nodes."""
        import ray

        replies: dict[int, list[bytes | Failure]] = {}
        waiting = {ref: node for node, ref in enumerate(refs)}
        failures: list[Failure] = []
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=ECHO if failures else POLL)
            if failures and not done:
                break
            for ref in done:
                node = waiting.pop(ref)
                replies[node] = self._fetch(ref, node, method)
                failures += [reply for reply in replies[node] if isinstance(reply, Failure)]
        if failures:
            raise as_error(method, failures)
        return [reply for node in range(len(refs)) for reply in replies[node] if isinstance(reply, bytes)]

    def _fetch(self, ref: Any, node: int, method: str) -> list[bytes | Failure]:
        import ray

        try:
            replies: list[bytes | Failure] = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            return [self._lost(node, method, error)]
        return replies

    def _lost(self, node: int, method: str, error: Exception) -> Failure:
        place = self._nodes[node]
        first = self._ranks_of(node)[0].rank if self.ranks else 0
        log = logs.rank_log(self._run_dir, node, first)
        text = (
            f"node-{node} ({place.name}, {place.ip}, Ray node {place.node_id[:12]}) was lost during {method}: "
            f"{_gist(error)}; last lines of rank {first}: {logs.last_lines(log)}"
        )
        return Failure(node, first, died=True, time=time.time(), error_type="", message=text)

    def _one(self, node: int, method: str, *args: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._hosts[node], method).remote(*args), timeout=ANSWER)
        except ray.exceptions.GetTimeoutError:
            place = f"node-{node} ({self._nodes[node].name}, {self._nodes[node].ip})"
            raise InfraError(f"{place}: its node host did not answer {method} in {ANSWER:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise InfraError(self._lost(node, method, error).message) from None

    def _read_logs(self, node: int, offsets: dict[int, int]) -> dict[int, bytes]:
        import ray

        if self._head_gone:
            return logs.read_new(self._run_dir, node, offsets)
        try:
            new: dict[int, bytes] = ray.get(self._hosts[node].read_logs.remote(offsets), timeout=READ)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return logs.read_new(self._run_dir, node, offsets)  # the node is gone; its files may be on a shared disk
        return new

    # The end --------------------------------------------------------------------------------------------------------

    def pids(self) -> dict[int, int]:
        """Rank → process id on its node."""
        return {rank: pid for node in range(len(self._hosts)) for rank, pid in self._one(node, "pids").items()}

    def close(self) -> None:
        """See Launcher.close. Ends the local nodes too, if this launcher started them."""
        self._broken = self._broken or "closed"
        if self._joined:
            self._joined = False
            self._head_gone = not listens(self._head)
            if self._head_gone:
                self._abandon()
            else:
                self._leave()
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.close()

    def _leave(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._hosts:
            ray.wait([host.stop.remote() for host in self._hosts], num_returns=len(self._hosts), timeout=STOP)
        self._flush()
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            ray.kill(host)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def _abandon(self) -> None:
        """Without its head Ray tries again for a minute, then ends the process; a normal exit crashes in Ray."""
        self._flush()
        self._hosts = []
        sys.excepthook = sys.__excepthook__  # Ray's own reports to the head first
        atexit.register(_exit_as_infrastructure)

    def _flush(self) -> None:
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.close(FLUSH)


def _exit_as_infrastructure() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(InfraError.exit_code)


def connect(address: str, wait: float) -> None:
    """Become a driver of the cluster. Raises InfraError when nothing listens there within `wait` seconds."""
    import ray

    await_listener(address, wait)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    terminated = False
    try:
        ray.init(
            address=address, namespace=f"corral-{uuid.uuid4().hex}", log_to_driver=False, logging_level="ERROR",
            configure_logging=True,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InfraError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}; check RAY_ADDRESS") from None
    except SystemExit:  # Ray's own handler of SIGTERM, which it installs before it connects: exit code 15
        terminated = True
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if terminated:
        signal.raise_signal(signal.SIGTERM)


def _gist(error: Exception) -> str:
    """The first and the last line of what Ray says about an actor; between them are ids, or a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _node_env(device: str) -> dict[str, str]:
    """What all ranks of a node add to its environment: a part of the driver's, its import path, thread counts."""
    env = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON) and key not in NODE_OWN}
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    if device == "cpu":
        env["OMP_NUM_THREADS"] = "1"  # the ranks share the cores
    return env


def _too_few(node: str, variable: str, visible: list[str], ranks: int) -> str:
    return (
        f"{node}: {variable}={','.join(visible)[:80]} shows {len(visible)} devices, and {ranks} ranks are to run "
        "there; unset it where the node is started, or start the node with as many devices as it shows"
    )


def _rank_env(rank: Rank, variable: str | None, visible: list[str]) -> dict[str, str]:
    """torchrun's variables, and on accelerators the one device the rank may see."""
    env = {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world), "LOCAL_RANK": str(rank.local_rank)}
    if rank.master is not None:
        env["MASTER_ADDR"], env["MASTER_PORT"] = rank.master.rsplit(":", 1)
        if env["MASTER_ADDR"].startswith("127."):
            env["GLOO_SOCKET_IFNAME"] = "lo"  # all on this machine: works without a network and a resolvable name
    if variable and visible != [""]:
        env[variable] = visible[rank.local_rank]
    return env
