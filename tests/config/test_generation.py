"""Which engine generates, and the options of vllm: what a plan has of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from corral.config import generation
from corral.config.compose import compose
from corral.config.derive import derive
from corral.config.influence import influence
from corral.config.overrides import parse
from corral.config.plan import Plan, VllmPlan
from corral.config.reasons import VLLM_ONLY, reasons_by_key
from corral.config.resolve import flatten
from corral.config.unused import why_unused
from corral.errors import ConfigError
from corral.platform import PLATFORMS
from tests.config.conftest import install, write_model

ARR = "actor_rollout_ref"
ROLLOUT = f"{ARR}.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs"
VLLM = f"{ROLLOUT}.name=vllm"
FALLBACK = f"{ROLLOUT}.fallback=native"
TP = f"{ROLLOUT}.tensor_model_parallel_size"
PACKAGES = {"cpu": ["vllm"], "cuda": ["vllm"], "npu": ["vllm", "vllm_ascend"]}

Plans = Callable[..., Plan]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm", "vllm_ascend")


@pytest.fixture
def with_vllm(plan_of: Plans, installed: None) -> Callable[..., VllmPlan]:
    def options(*overrides: str, **environ: str) -> VllmPlan:
        plan = plan_of(VLLM, *overrides, **environ)
        assert plan.rollout.vllm is not None
        return plan.rollout.vllm

    return options


def engine_notices(plan: Plan) -> list[str]:
    return [notice for notice in plan.notices if "vllm" in notice]


# Which engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", PACKAGES)
@pytest.mark.parametrize("here", PACKAGES)
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", [None, "native", "vllm"])
def test_engine(plan_of, monkeypatch, device, here, fallback, there, name):
    """Decided by hand: a name counts where it can, and only an accelerator's own machine knows that it cannot."""
    install(monkeypatch, *(PACKAGES[device] if there else []))
    monkeypatch.setattr(generation, "detect", lambda: PLATFORMS[here])
    keys = [
        f"trainer.device={device}",
        *([f"{ROLLOUT}.name={name}"] if name else []),
        *([FALLBACK] if fallback else []),
    ]
    if (name, there, fallback) == ("vllm", False, False) and device != "cpu" and here == device:
        with pytest.raises(ConfigError, match=rf"rollout\.name=vllm on {device}: vllm.* not installed; install it .*"):
            plan_of(*keys)
        return
    granted = name == "vllm" and not there and not fallback and device != "cpu"
    expected = {None: "vllm" if there and device != "cpu" else "native", "native": "native"}.get(name)
    if name == "vllm":
        expected = "vllm" if there or granted else "native"
    plan = plan_of(*keys)
    assert (plan.rollout.name, plan.rollout.requested) == (expected, name or expected)
    assert (plan.rollout.vllm is not None) == (expected == "vllm")
    assert plan.rollout.graphs == (expected == "native" and device == "cuda")
    said = engine_notices(plan)
    if granted:
        (notice,) = said
        assert notice.endswith("not installed here; every node of the run needs it")
    elif name != expected and name is not None:
        (notice,) = said
        assert notice.endswith("not installed: the native engine generates instead")
    else:
        assert said == []


@pytest.mark.parametrize(
    ("packages", "missing"),
    [
        ([], "vllm and vllm_ascend are not installed"),
        (["vllm"], "vllm_ascend is not installed"),
        (["vllm_ascend"], "vllm is not installed"),
    ],
)
def test_npu_needs_both_packages(plan_of, monkeypatch, packages, missing):
    install(monkeypatch, *packages)
    assert plan_of("trainer.device=npu").rollout.name == "native"
    (notice,) = engine_notices(plan_of("trainer.device=npu", VLLM, FALLBACK))
    assert notice == f"{ROLLOUT}.name=vllm: {missing}: the native engine generates instead"
    monkeypatch.setattr(generation, "detect", lambda: PLATFORMS["npu"])
    with pytest.raises(ConfigError) as refused:
        plan_of("trainer.device=npu", VLLM)
    assert str(refused.value) == (
        f"{ROLLOUT}.name=vllm on npu: {missing}; install it (docs/vllm.md), or set {ROLLOUT}.fallback=native to "
        "generate with the native engine"
    )


# Replicas ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("nodes", "devices", "tp"), [(1, 2, 2), (2, 4, 2), (2, 4, 4), (1, 8, 1), (3, 2, 2)])
def test_a_replica_is_so_many_ranks(plan_of, nodes, devices, tp):
    plan = plan_of(VLLM, f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={devices}", f"{TP}={tp}")
    assert plan.rollout.replicas * tp == plan.topology.world
    assert plan.rollout.tensor_model_parallel_size == tp


@pytest.mark.usefixtures("installed")
def test_on_accelerators_a_replica_may_span_nodes(plan_of):
    keys = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{TP}=4"]
    assert plan_of(VLLM, "trainer.device=cuda", *keys, RAY_ADDRESS="head:6379").rollout.replicas == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([f"{TP}=2"], f"{TP}=2 needs the vllm engine and native runs here; set it to 1"),
        ([f"{TP}=2", "trainer.nnodes=2"], f"{TP}=2 needs the vllm engine and native runs here; set it to 1"),
        ([VLLM, f"{TP}=3", "trainer.n_gpus_per_node=4"],
         f"{TP}=3 does not divide the world of 4 ranks (1 nodes × 4 devices); use one of 1, 2, 4"),
        ([VLLM, f"{TP}=4", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"],
         f"{TP}=4 does not divide the 2 devices of a node, and on cpu the ranks of a replica share memory; use one of "
         "1, 2"),
        ([VLLM, f"{TP}=0"], f"{TP}=0: must be at least 1"),
    ],
)  # fmt: skip
def test_degrees_that_are_refused(plan_of, keys, said):
    with pytest.raises(ConfigError) as refused:
        plan_of(*keys)
    assert str(refused.value) == said


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ((6, 2), "does not divide the 6 attention heads of"),
        ((12, 3), "=4 and the 3 key/value heads of"),
        ((8, 2), None),
        ((8, 8), None),
        ((8, 1), None),
    ],
)
def test_heads_are_split_over_a_replica(plan_of, files, heads, said):
    write_model(files / "model", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    keys = [VLLM, f"{TP}=4", "trainer.n_gpus_per_node=4"]
    if said is None:
        assert plan_of(*keys).rollout.tensor_model_parallel_size == 4
        return
    with pytest.raises(ConfigError, match=rf"{TP}=4 .*") as refused:
        plan_of(*keys)
    assert said in str(refused.value)


# Types, lengths, memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actor", "rollout", "dtype", "tolerance"),
    [
        ("float32", None, "float32", 1e-3),
        ("float64", None, "float32", 1e-3),  # vllm has no float64
        ("bfloat16", None, "bfloat16", 0.2),
        ("float32", "bf16", "bfloat16", 0.2),
        ("bfloat16", "fp32", "float32", 0.2),  # the trainer rounds
        ("float64", "bfloat16", "bfloat16", 0.2),
    ],
)
@pytest.mark.usefixtures("installed")
def test_the_dtype_follows_the_actor_and_the_probe_the_coarser_of_both(plan_of, actor, rollout, dtype, tolerance):
    own = [f"{ROLLOUT}.dtype={rollout}"] if rollout else []
    plan = plan_of(VLLM, f"{ARR}.actor.fsdp_config.dtype={actor}", *own)
    assert plan.rollout.vllm is not None
    assert (plan.rollout.vllm.dtype, plan.rollout.probe_tolerance) == (dtype, tolerance)
    assert plan_of(VLLM, *own, f"{ROLLOUT}.probe_tolerance=0.5").rollout.probe_tolerance == 0.5


def test_lengths(with_vllm):
    lengths = ["data.max_prompt_length=100", "data.max_response_length=50"]
    assert with_vllm(*lengths).max_model_len == 151  # scoring a sequence generates one token behind it
    assert with_vllm(*lengths, f"{ROLLOUT}.max_model_len=150").max_model_len == 151
    assert with_vllm(*lengths, f"{ROLLOUT}.max_model_len=999").max_model_len == 999


@pytest.mark.parametrize(("device", "step"), [("cpu", 1025), ("cuda", 300), ("npu", 300)])
def test_a_prompt_goes_through_in_one_step_on_cpu_alone(with_vllm, device, step):
    given = f"{ROLLOUT}.max_num_batched_tokens=300"
    assert with_vllm(f"trainer.device={device}", given).max_num_batched_tokens == step


@pytest.mark.parametrize(
    ("device", "sleeps", "eager", "cache", "chunked"),
    [("cpu", False, True, 1 << 30, False), ("cuda", True, False, None, True), ("npu", True, False, None, True)],
)
def test_defaults_on_a_device(with_vllm, device, sleeps, eager, cache, chunked):
    plan = with_vllm(f"trainer.device={device}")
    assert (plan.sleeps, plan.enforce_eager, plan.cache_bytes) == (sleeps, eager, cache)
    assert (plan.enable_chunked_prefill, plan.max_num_batched_tokens) == (chunked, 8192)
    assert (plan.load_format, plan.engine_kwargs, plan.gpu_memory_utilization) == ("dummy", {}, 0.5)
    own = with_vllm(
        f"trainer.device={device}",
        f"{ROLLOUT}.free_cache_engine=False",
        f"{ROLLOUT}.enforce_eager=True",
        f"+{KWARGS}.vllm.kv_cache_memory_bytes=4096",
    )
    assert (own.sleeps, own.enforce_eager, own.cache_bytes) == (False, True, 4096)


ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
SLEEPS = "trainer.device=npu"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments : true"])
def test_memory_that_is_given_back_is_not_of_expandable_segments(plan_of, value):
    assert plan_of(SLEEPS, VLLM).rollout.environment == {ALLOCATOR: "expandable_segments:False"}
    assert plan_of(SLEEPS, VLLM, f"{ROLLOUT}.free_cache_engine=False").rollout.environment == {}
    assert plan_of("trainer.device=cuda", VLLM).rollout.environment == {}
    assert plan_of(SLEEPS, f"{ROLLOUT}.name=native").rollout.environment == {}
    with pytest.raises(ConfigError) as refused:
        plan_of(SLEEPS, VLLM, **{ALLOCATOR: value})
    assert str(refused.value) == (
        f"{ALLOCATOR}={value}: vllm cannot give memory back while the run trains with expandable segments; take them "
        f"out of {ALLOCATOR}, or set {ROLLOUT}.free_cache_engine=False"
    )
    assert plan_of(SLEEPS, f"{ROLLOUT}.name=native", **{ALLOCATOR: value}).rollout.name == "native"
    assert plan_of(SLEEPS, VLLM, **{ALLOCATOR: "expandable_segments:False"}).rollout.name == "vllm"


# What is refused ----------------------------------------------------------------------------------------------------

NATIVE = f"{ROLLOUT}.name=native"
REFUSED = {
    "float64": (
        [f"{ROLLOUT}.dtype=fp64"],
        f"{ROLLOUT}.dtype=fp64: vllm computes in bfloat16 or float32; use float32",
    ),
    "float16": (
        [f"{ROLLOUT}.dtype=fp16"],
        f"{ROLLOUT}.dtype=fp16 needs loss scaling, which is not available; use bfloat16 or float32",
    ),
    "npu": (
        ["trainer.device=npu", f"{ROLLOUT}.temperature=0.7"],
        f"{ROLLOUT}.temperature=0.7: vllm on npu gives log-probs at temperature 1 only; set it to 1, or {NATIVE}",
    ),
    "greedy": (
        [f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.do_sample=False"],
        f"{ROLLOUT}.temperature=0.7 with do_sample=False: vllm gives log-probs of greedy samples at temperature 1 "
        f"only; set it to 1, or {NATIVE}",
    ),
    "top_k": (
        [f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_k=20"],
        f"{ROLLOUT}.temperature=0.7 with top_k=20 and top_p=1: vllm gives log-probs of the whole vocabulary at "
        f"temperature 1, or without the other two; set temperature=1, or top_k=-1 and top_p=1, or {NATIVE}",
    ),
    "top_p": (
        [f"{ROLLOUT}.temperature=2", f"{ROLLOUT}.top_p=0.9"],
        f"{ROLLOUT}.temperature=2 with top_k=-1 and top_p=0.9: vllm gives log-probs of the whole vocabulary at "
        f"temperature 1, or without the other two; set temperature=1, or top_k=-1 and top_p=1, or {NATIVE}",
    ),
    "too short": (
        [f"{ROLLOUT}.max_model_len=1000"],
        f"{ROLLOUT}.max_model_len=1000 is below data.max_prompt_length + data.max_response_length = 1024; set it to "
        "1024 or more, or leave it out",
    ),
    "steps": (
        [f"{ROLLOUT}.max_num_batched_tokens=255"],
        f"{ROLLOUT}.max_num_batched_tokens=255 is below max_num_seqs=256: a step of vllm has a token of each sequence; "
        "raise the one or lower the other",
    ),
    "whole prompts": (
        ["trainer.device=cuda", f"{ROLLOUT}.enable_chunked_prefill=False", f"{ROLLOUT}.max_num_batched_tokens=1024"],
        f"{ROLLOUT}.enable_chunked_prefill=False with max_num_batched_tokens=1024: a prompt goes through vllm in one "
        "step, and the longest sequence has 1025 tokens; set max_num_batched_tokens=1025 or more",
    ),
    "memory": (
        [f"{ROLLOUT}.gpu_memory_utilization=1.5"],
        f"{ROLLOUT}.gpu_memory_utilization=1.5: must be between 0 and 1",
    ),
    "nothing": (
        [f"{ROLLOUT}.gpu_memory_utilization=0"],
        f"{ROLLOUT}.gpu_memory_utilization=0.0: must be a finite number above 0",
    ),
    "no group": (
        [f"+{KWARGS}.vllm=3"],
        f"{KWARGS}.vllm=3 is no group of options; write {KWARGS}.vllm.OPTION=VALUE",
    ),
    "false": (
        [f"+{KWARGS}.vllm=False"],
        f"{KWARGS}.vllm=False is no group of options; write {KWARGS}.vllm.OPTION=VALUE",
    ),
    "bytes": (
        [f"+{KWARGS}.vllm.kv_cache_memory_bytes=4GiB"],
        f"{KWARGS}.vllm.kv_cache_memory_bytes='4GiB': must be a number of bytes",
    ),
    "JSON": (
        [f"+{KWARGS}.vllm.compilation_config='{{\"mode\": 0,}}'"],
        f"{KWARGS}.vllm.compilation_config='{{\"mode\": 0,}}' is no JSON object (Expecting property name enclosed in "
        f"double quotes: line 1 column 12 (char 11)); mend it, or write {KWARGS}.vllm.compilation_config.NAME=VALUE",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(plan_of, case):
    keys, said = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        plan_of(VLLM, *keys)
    assert str(refused.value) == said


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in ("memory", "nothing")])
def test_the_native_engine_minds_none_of_it(plan_of, case):
    assert plan_of(f"{ROLLOUT}.name=native", *REFUSED[case][0]).rollout.vllm is None


@pytest.mark.parametrize(
    "keys",
    [
        ["temperature=1", "top_k=20", "top_p=0.9"],
        ["temperature=0.7"],
        ["temperature=1", "do_sample=False", "top_k=20"],
        [
            "val_kwargs.do_sample=True",
            "val_kwargs.temperature=0.5",
            "val_kwargs.top_k=3",
        ],  # nobody reads their log-probs
        ["enable_chunked_prefill=False", "max_num_batched_tokens=300"],  # of a step on cpu: raised
        ["max_model_len=1024", "max_num_seqs=8", "max_num_batched_tokens=8"],
    ],
)
def test_what_is_taken(with_vllm, keys):
    assert with_vllm(*(f"{ROLLOUT}.{key}" for key in keys))


def test_positions_of_the_model(with_vllm, files):
    write_model(files / "model", max_position_embeddings=1024)
    assert with_vllm("data.max_response_length=511").max_model_len == 1024
    with pytest.raises(ConfigError) as refused:
        with_vllm()
    assert str(refused.value) == (
        f"{ROLLOUT}.name=vllm is to hold 1025 tokens, and {files}/model has 1024 positions; it needs one more than "
        f"data.max_prompt_length + data.max_response_length = 1024 and {ROLLOUT}.max_model_len: lower what exceeds them"
    )


# Options of vllm's own ------------------------------------------------------------------------------------------------


def test_options_are_handed_on(with_vllm):
    given = with_vllm(
        f"+{KWARGS}.vllm.compilation_config.cudagraph_mode=FULL_AND_PIECEWISE",
        f'+{KWARGS}.vllm.additional_config=\'{{"a": {{"b": 1}}}}\'',
        f"+{KWARGS}.vllm.swap_space=4",
        f"+{KWARGS}.vllm.quantization=null",
        f"+{KWARGS}.vllm.seed=null",  # null is left out, so there is nothing to refuse
    ).engine_kwargs
    assert given == {
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        "additional_config": {"a": {"b": 1}},
        "swap_space": 4,
    }
    assert with_vllm(f"+{KWARGS}.vllm=null").engine_kwargs == {}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("option", ["model", "seed", "logprobs_mode", "enable_sleep_mode", "tensor_parallel_size"])
def test_options_that_follow_from_the_run(plan_of, option):
    with pytest.raises(ConfigError) as refused:
        plan_of(VLLM, f"+{KWARGS}.vllm.{option}=1")
    assert str(refused.value) == f"{KWARGS}.vllm.{option} follows from the run and cannot be set; leave it out"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("option", ["dtype", "gpu_memory_utilization", "max_num_seqs", "load_format", "enforce_eager"])
def test_options_that_have_a_key(plan_of, option):
    with pytest.raises(ConfigError) as refused:
        plan_of(VLLM, f"+{KWARGS}.vllm.{option}=1")
    assert str(refused.value) == f"{KWARGS}.vllm.{option}: set {ROLLOUT}.{option} instead, which is the same option"


OWN = "the native engine takes no options of its own"


@pytest.mark.parametrize(
    ("engine", "unused"),
    [
        ("vllm", {f"{KWARGS}.sglang.a": "options of sglang; vllm generates"}),
        ("native", {f"{KWARGS}.sglang.a": OWN, f"{KWARGS}.vllm.b": OWN}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_options_of_other_engines_are_listed(plan_of, engine, unused):
    plan = plan_of(f"{ROLLOUT}.name={engine}", f"+{KWARGS}.sglang.a=1", f"+{KWARGS}.vllm.b=1")
    assert {item.key: item.reason for item in plan.unused} == unused


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("device", PACKAGES)
def test_every_key_of_vllm_has_an_effect_or_a_reason(base, device):
    """A reason exactly where the key decides nothing; one is handed to vllm, which has no use for it on cpu."""
    config, plain = compose(parse([*base, VLLM, f"trainer.device={device}"]))
    values = flatten(plain)
    reasons = reasons_by_key(values, derive(config, {}))
    decides = {key: influence(key, config, values, {}) for key in (*VLLM_ONLY, f"{ROLLOUT}.enforce_eager")}
    found = {key for key in decides if why_unused(key, reasons, frozenset()) is not None}
    nothing = {key for key, found in decides.items() if not found.fields - {"notices"}}
    assert not any(found.refused for found in decides.values())
    assert found - nothing == ({f"{ROLLOUT}.gpu_memory_utilization"} if device == "cpu" else set())
    assert nothing <= found
    on_cpu = ("gpu_memory_utilization", "free_cache_engine", "enforce_eager", "enable_chunked_prefill")
    assert found == ({f"{ROLLOUT}.{name}" for name in on_cpu} if device == "cpu" else set())
