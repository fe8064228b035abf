"""One accelerator, checked in minutes: is what it computes what the CPU computes, and how fast is it?

    python scripts/gpu_check.py                        # cuda; below four minutes
    python scripts/gpu_check.py --device cpu --quick   # what applies without a device; seconds

In this process, without Ray and without a download: models have random weights. Needs torch and transformers alone;
where Corral is not installed, PYTHONPATH names its checkout. Prints a table and then one line of JSON. Exit code 0:
every check holds; 1: one does not, with what was raised on stderr; 75: the device is not there.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform as machine
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.utils import logging as transformers_logging

from corral.algorithms.aggregate import Denominators
from corral.batch import Batch
from corral.config.plan import ActorUpdate, EnginePlan, MicroBatches, Model, Optimizer, RolloutPlan, Sampling
from corral.engine import kernels
from corral.engine.attention import ATTENTION, CONTEXT, PackedAttention
from corral.engine.device import be_deterministic, require
from corral.engine.engine import Engine
from corral.engine.flops import Dense
from corral.engine.kernels import Segments, sdpa
from corral.engine.losses import ActorObjective
from corral.engine.memory import DeviceMemory, local_part
from corral.engine.offload import Parking, move_parameters
from corral.engine.rank import Rank
from corral.engine.shard import decoder_layers
from corral.errors import ConfigError
from corral.platform import platform
from corral.rollout.base import Request
from corral.rollout.native import NativeEngine

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
HALF_BILLION = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
"""0.46 billion parameters: layers as those of Qwen3-0.6B, with smaller heads and four layers less."""
_SAMPLING = Sampling(1.0, -1, 1.0, True, 1)


@dataclass(frozen=True)
class Row:
    """One line of the report. limit: what `value` must not exceed; None: only reported."""

    check: str
    value: float | str
    limit: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or (isinstance(self.value, float) and self.value <= self.limit)


@dataclass
class Bench:
    """What is checked, how large, and what came out."""

    device: torch.device
    quick: bool
    folder: Path
    rows: list[Row] = field(default_factory=list)

    def add(self, check: str, value: float | str, limit: float | None = None) -> None:
        self.rows.append(Row(check, value, limit))

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def allocated(self) -> int:
        """Bytes of tensors on the device; 0 on the CPU, which does not count them."""
        gc.collect()
        memory = DeviceMemory.of(self.device)
        return 0 if memory is None else memory.allocated

    @property
    def rank(self) -> Rank:
        return Rank(device=self.device.type)

    def model(self, name: str, sizes: dict[str, Any]) -> Path:
        """A folder with a model of random weights, the same on every machine up to the device that drew them."""
        path = self.folder / name
        if not path.is_dir():
            torch.manual_seed(11)
            with self.device:
                model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
            model.save_pretrained(path)
        return path

    @property
    def large(self) -> Path:
        return self.model("small", SMALL) if self.quick else self.model("large", HALF_BILLION)


def engine_plan(path: Path, compute: str = "float32", **changes: Any) -> EnginePlan:
    optimizer = Optimizer(1e-4, (0.9, 0.999), 0.01, 1.0, "constant", -1, 0.0, 0.0, 0.5)
    plan = EnginePlan(
        role="actor", model=Model(str(path), str(path), False, {}, False), sp=1, dp=1, master_dtype="float32",
        compute_dtype=compute, param_offload=False, optimizer_offload=False, reshard_after_forward=True,
        use_torch_compile=False, seed=5, infer=MicroBatches(8192, None), train=MicroBatches(8192, None),
        optim=optimizer,
    )  # fmt: skip
    return replace(plan, **changes)


def make_batch(lengths: Sequence[tuple[int, int]], vocabulary: int) -> Batch:
    """Random tokens, (prompt, response) of each sample, with what the policy loss reads."""
    torch.manual_seed(3)
    ids = [[torch.randint(3, vocabulary, (n,)).tolist() for n in pair] for pair in lengths]
    names = range(len(lengths))
    batch = Batch.from_samples(
        [prompt for prompt, _ in ids], [response for _, response in ids],
        row=names, sample_index=[0] * len(ids), group=names, finish=["stop"] * len(ids),
    )  # fmt: skip
    tokens = batch.response_ids.numel()
    return batch.with_fields(old_log_probs=torch.randn(tokens) * 0.1 - 6.2, advantages=torch.randn(tokens))


def objective(batch: Batch) -> ActorObjective:
    update = ActorUpdate(
        8, 1, False, 1, "vanilla", 0.2, 0.2, 3.0, "token-mean", None, 0.0, False, False, 0.0, "kl", 1
    )  # fmt: skip
    return ActorObjective(update, Denominators(tokens=int(batch.response_mask.sum()), samples=len(batch)))


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference over the size of what is compared."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def worst(values: Iterable[float]) -> float:
    """The largest; NaN when one is, which Python's max may pass over."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def check_attention(bench: Bench) -> None:
    """Packed attention of the device, forward and backward, against SDPA on the CPU in float32."""
    bounds = (0, 1, 40, 41, 140) if bench.quick else (0, 1, 700, 701, 1900, 2048)
    choices = ["auto"]
    if bench.device.type == "cuda":
        choices += ["sdpa"]
        try:
            kernels.kernel("cuda", "flash_attention_2")
            choices += ["flash_attention_2"]
        except ConfigError:
            bench.add("attention flash-attn", "not installed")
    for heads, kv_heads in ((8, 8), (8, 2)):
        torch.manual_seed(1)
        plain = [torch.randn(bounds[-1], n, 64).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        weight = torch.randn(bounds[-1], heads, 64)
        q, k, v = plain
        out = sdpa.attend(q, k, v, Segments(bounds), 0.125)
        wanted = [out, *torch.autograd.grad((out * weight).sum(), plain)]
        for choice in choices:
            for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
                there = [x.detach().to(bench.device, dtype).requires_grad_() for x in plain]
                q, k, v = there
                out = kernels.kernel(bench.device.type, choice)(q, k, v, Segments(bounds), 0.125)
                found = [out, *torch.autograd.grad((out * weight.to(out)).sum(), there)]
                gaps = [gap(a, b) for a, b in zip(found, wanted, strict=True)]
                name = f"attention {choice} {str(dtype)[6:]} {heads}/{kv_heads} heads: gap to CPU"
                bench.add(name, worst(gaps), limit)


def check_training(bench: Bench) -> None:
    """Log-probs and one optimizer step of a small model, against the CPU in float32."""
    path = bench.model("small", SMALL)
    batch = make_batch([(5, 20), (30, 60), (1, 33), (64, 7)], SMALL["vocab_size"])
    micro = [[0, 2], [1, 3]]

    def outcome(rank: Rank, compute: str) -> tuple[Tensor, float, list[Tensor], set[torch.dtype]]:
        engine = Engine(engine_plan(path, compute), rank, horizon=1)
        log_probs = engine.infer(batch, micro)["log_probs"]
        before = [p.detach().clone() for p in engine.module.parameters()]
        step = engine.train_step(batch, micro, objective(batch))
        moves = [after.detach() - b for after, b in zip(engine.module.parameters(), before, strict=True)]
        assert engine.optimizer is not None
        held = [*engine.module.parameters(), *(x for s in engine.optimizer.state.values() for x in s.values())]
        return log_probs, step.grad_norm, moves, {x.dtype for x in held}

    wanted = outcome(Rank(), "float32")
    for compute, limits in (("float32", (1e-4, 1e-3)), ("bfloat16", (3e-2, 5e-2))):
        found = outcome(bench.rank, compute)
        bench.add(f"log-probs {compute}: gap to CPU", gap(found[0], wanted[0]), limits[0])
        bench.add(f"gradient norm {compute}: gap to CPU", abs(found[1] / wanted[1] - 1), limits[1])
        bench.add(f"weights and state {compute}: dtypes beside float32", float(len(found[3] - {torch.float32})), 0.0)
        if compute == "float32":  # where a gradient is near zero, Adam's first step takes its sign alone
            apart = [1 - float(torch.cosine_similarity(a.cpu().flatten(), b.flatten(), dim=0)) for a, b in
                     zip(found[2], wanted[2], strict=True)]  # fmt: skip
            bench.add("weight update float32: 1 - cosine to CPU", worst(apart), 1e-2)


def check_offload(bench: Bench) -> None:
    """What both offloads leave on the device, and that a step after them is the step without them."""
    batch = make_batch([(40, 200)] * 4, SMALL["vocab_size"])
    micro = [[0, 1], [2, 3]]
    norms = []
    for offload in (False, True):
        empty = bench.allocated()
        plan = engine_plan(bench.large, "bfloat16", param_offload=offload, optimizer_offload=offload)
        engine = Engine(plan, bench.rank, horizon=1)
        for _ in range(2):
            start = time.perf_counter()
            with engine.loaded(optimizer=True):
                loaded = bench.allocated() - empty
                norm = engine.train_step(batch, micro, objective(batch)).grad_norm
            bench.sync()
            seconds = time.perf_counter() - start
        norms.append(norm)
        left = bench.allocated() - empty
        name = "offloaded" if offload else "resident"
        bench.add(f"{name}: device memory before the step, GiB", loaded / 2**30)
        bench.add(f"{name}: device memory between phases, GiB", left / 2**30, 0.05 if offload else None)
        bench.add(f"{name}: seconds of a short update", seconds)
        if offload:
            held = engine._parking.held("parameters") + engine._parking.held("optimizer state")
            bench.add("offloaded: parameters and state in host memory, GiB", held / 2**30)
        del engine
    bench.add("offloaded: second gradient norm, gap to resident", abs(norms[1] / norms[0] - 1), 1e-2)


def check_sharded(bench: Bench) -> None:
    """Collectives of a world of one over both backends; FSDP2 on that mesh, its shards parked and loaded."""
    facts = platform(bench.device.type)
    dist.init_process_group(facts.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for where in {CPU, bench.device}:
            x = torch.ones(4, device=where)
            dist.all_reduce(x)
            bench.add(f"all-reduce of a tensor on {where.type}: gap", gap(x, torch.ones(4)), 0.0)
        mesh = init_device_mesh(bench.device.type, (1,))
        path = bench.model("small", SMALL)
        alone: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION).to(bench.device)
        wanted = passes(alone, bench.device)
        module: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION)
        for layer in decoder_layers(module):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        gaps = [gap(a, b) for a, b in zip(passes(module, bench.device), wanted, strict=True)]
        bench.add("sharded: logits and gradients, gap to one that is not", worst(gaps), 3e-2)
        before = [p.to_local().detach().cpu().clone() for p in module.parameters()]
        with_copy = bench.device.type == "cpu"
        parking = Parking(module, None, bench.device, CPU, parameters=True, optimizer_state=False, copy=with_copy)
        bench.add("sharded: parameters left on the device while parked", float(sum(
            p.to_local().device.type != "cpu" for p in module.parameters())), 0.0)  # fmt: skip
        with parking.loaded(optimizer=False):
            after = [p.to_local().detach().cpu() for p in module.parameters()]
            gaps = [gap(a, b) for a, b in zip(passes(module, bench.device), wanted, strict=True)]
        bench.add("sharded: parked and loaded, gap", worst(gap(a, b) for a, b in zip(after, before, strict=True)), 0.0)
        bench.add("sharded: logits and gradients after it, gap", worst(gaps), 3e-2)
    finally:
        dist.destroy_process_group()


def passes(module: Any, device: torch.device) -> list[Tensor]:
    """Logits of a packed row, and the gradients of a loss on them."""
    ids = torch.arange(96, device=device)[None]
    positions = torch.cat([torch.arange(n, device=device) for n in (1, 60, 35)])[None]
    context = {CONTEXT: PackedAttention((0, 1, 61, 96))}
    logits: Tensor = module(input_ids=ids, position_ids=positions, use_cache=False, **context).logits
    torch.log_softmax(logits.float(), dim=-1)[0, :-1].gather(1, ids[0, 1:, None]).mean().backward()
    gradients = [local_part(p.grad).clone() for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    return [logits.detach(), *gradients]


def check_decode(bench: Bench) -> None:
    """Generation with steps of any size, of few sizes, and of few sizes captured as graphs, which have to follow what
    changes between two calls: the weights, where they are, how tokens are drawn. (Without cuda nothing is captured.)
    """
    sequences, length = (6, 10) if bench.quick else (64, 256)
    path = bench.large
    engine = Engine(engine_plan(path, "bfloat16", optim=None, train=None), bench.rank, horizon=1)
    requests = [Request(tuple(range(3, 20 + i % 7)), row=i, sample_index=0) for i in range(sequences)]
    plan = RolloutPlan(
        "native", "native", 1, 1, 64, length, sequences, True, 7, _SAMPLING, _SAMPLING, 1.0
    )  # fmt: skip
    done, rollouts = {}, {}
    for name in ("eager", "static", "graphs"):
        rollout = rollouts[name] = NativeEngine(
            engine.module, eos_token_ids=(), plan=replace(plan, graphs=name != "eager"), max_length=1024,
            compute_dtype=torch.bfloat16, capture=name == "graphs",
        )  # fmt: skip
        for _ in range(2):  # the first one captures
            start = time.perf_counter()
            done[name] = rollout.generate(requests, _SAMPLING, step=1)
            bench.sync()
            seconds = time.perf_counter() - start
        bench.add(f"decode {name}: tokens/s, {sequences} sequences", sequences * length / seconds)
    alike = sum(a.token_ids == b.token_ids for a, b in zip(done["eager"], done["static"], strict=True))
    bench.add("decode static: samples equal to eager, of all (rounding may change some)", alike / sequences)
    differ = sum(a != b for a, b in zip(done["graphs"], done["static"], strict=True))
    bench.add("decode graphs: samples that differ from static", float(differ), 0.0)

    def shrink() -> None:
        with torch.no_grad():
            for p in engine.module.parameters():
                p.mul_(0.75)

    def move() -> None:
        move_parameters(engine.module, bench.device, copy=True)

    other = Sampling(0.7, 40, 0.9, True, 1)
    for what, change, sampling in (
        ("of another sampling", None, other), ("after weights changed", shrink, other),
        ("after they moved", move, other), ("with fewer sequences", None, _SAMPLING),
    ):  # fmt: skip
        if change is not None:
            change()
        asked = requests[: sequences // 3] if what == "with fewer sequences" else requests
        for _ in range(2):  # of what is new, the second one is captured
            static, graphs = (rollouts[name].generate(asked, sampling, step=2) for name in ("static", "graphs"))
        differ = sum(a != b for a, b in zip(graphs, static, strict=True))
        bench.add(f"decode graphs {what}: samples that differ", float(differ), 0.0)
    for rollout in rollouts.values():
        rollout.sleep()


def check_speed(bench: Bench) -> None:
    """Tokens per second of the update, and MFU where the device's peak is known."""
    rows, tokens = (2, 64) if bench.quick else (8, 1024)
    engine = Engine(engine_plan(bench.large, "bfloat16"), bench.rank, horizon=1)
    batch = make_batch([(tokens // 4, tokens - tokens // 4)] * rows, SMALL["vocab_size"])
    micro = [list(range(at, min(at + 4, rows))) for at in range(0, rows, 4)]
    times = []
    for _ in range(2 if bench.quick else 6):
        bench.sync()
        start = time.perf_counter()
        engine.train_step(batch, micro, objective(batch))
        bench.sync()
        times.append(time.perf_counter() - start)
    seconds = min(times[1:])
    bench.add("update: parameters, millions", sum(p.numel() for p in engine.module.parameters()) / 1e6)
    bench.add("update: tokens/s", rows * tokens / seconds)
    cost = Dense.of(engine.module.config)
    assert cost is not None
    done = cost.training(batch.lengths) / seconds
    bench.add("update: Tflop/s", done / 1e12)
    peak = None if bench.device.type == "cpu" else platform(bench.device.type).peak(name_of(bench.device))
    bench.add("update: MFU", "peak not known" if peak is None else done / peak)
    memory = DeviceMemory.of(bench.device)
    if memory is not None:
        bench.add("most memory allocated so far, GiB", memory.peak_allocated / 2**30)


def check_determinism(bench: Bench) -> None:
    """Two updates from the same start with full determinism end in the same bits. The last check: it changes variables
    of the whole process."""
    lengths = [(5, 20), (30, 60)] if bench.quick else [(100, 1500), (1, 33), (300, 700)]
    batch = make_batch(lengths, SMALL["vocab_size"])
    micro = [[i] for i in range(len(lengths))]
    checkpointing = hasattr(PreTrainedModel, "activation_checkpointing_enable")  # not before transformers 5.18
    be_deterministic(bench.device.type)
    try:
        for compute in ("bfloat16", "float32"):
            ends = []
            for _ in range(2):
                plan = engine_plan(bench.model("small", SMALL), compute)
                plan = replace(plan, model=replace(plan.model, gradient_checkpointing=checkpointing))
                engine = Engine(plan, bench.rank, horizon=1)
                engine.train_step(batch, micro, objective(batch))
                ends.append([p.detach().cpu() for p in engine.module.parameters()])
            differ = sum(not torch.equal(a, b) for a, b in zip(*ends, strict=True))
            bench.add(f"determinism {compute}: weights that differ between two updates", float(differ), 0.0)
    finally:
        torch.use_deterministic_algorithms(False)


CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_attention, check_training, check_sharded, check_offload, check_decode, check_speed, check_determinism,
)  # fmt: skip


def name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return machine.processor() or machine.machine()
    return str(torch.get_device_module(device).get_device_name(device))


@contextmanager
def reported(bench: Bench, check: Callable[[Bench], None]) -> Iterator[None]:
    """A check that raises has failed; the others still run."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        reason = str(error).strip().splitlines() or ["no message"]
        bench.rows.append(Row(f"{check.__name__}: {type(error).__name__}", reason[0][:200], 0.0))
    bench.add(f"{check.__name__}: seconds", time.perf_counter() - start)
    gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--quick", action="store_true", help="small models only, seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there too")
    args = parser.parse_args(argv)
    try:
        require(args.device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 75
    device = CPU if args.device == "cpu" else torch.device(args.device, 0)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="corral-gpu-check-") as folder:
        bench = Bench(device, args.quick, Path(folder))
        for check in CHECKS:
            with reported(bench, check):
                check(bench)
    holds = all(row.holds for row in bench.rows)
    width = max(len(row.check) for row in bench.rows)
    for row in bench.rows:
        value = f"{row.value:.6g}" if isinstance(row.value, float) else row.value
        limit = "" if row.limit is None else f"(at most {row.limit:g}) {'ok' if row.holds else 'FAILED'}"
        print(f"{row.check:<{width}}  {value} {limit}".rstrip())
    report = {
        "device": args.device, "name": name_of(device), "torch": torch.__version__, "quick": args.quick,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "holds": holds,
        "rows": [{**asdict(row), "holds": row.holds} for row in bench.rows],
    }  # fmt: skip
    text = json.dumps(report)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
