"""What Corral calls, and the stand-in takes, is what the torch_npu wheel declares.

The wheel runs only where Ascend's libraries are, but it carries its declarations and its manual as text. The variable
CORRAL_TEST_NPU_WHEEL names it, or a folder with it.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import torch

from corral.engine.device import minor
from corral.engine.kernels import npu
from corral.platform import NPU
from tests.engine.npu.mapping import npu_on_cpu

FUNCTIONS = ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "npu_rotary_mul")
DEVICE_MODULE = (
    *("device_count", "set_device", "init", "is_initialized", "synchronize", "get_device_name"),
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
)


def _wheel() -> Path | None:
    given = Path(os.environ.get("CORRAL_TEST_NPU_WHEEL") or "/nonexistent")
    found = sorted(given.glob("torch_npu-*.whl")) if given.is_dir() else [given]
    return found[-1] if found and found[-1].is_file() else None


pytestmark = pytest.mark.skipif(_wheel() is None, reason="needs a torch_npu wheel named by CORRAL_TEST_NPU_WHEEL")


@pytest.fixture(scope="module")
def wheel() -> Iterator[ZipFile]:
    path = _wheel()
    assert path is not None
    with ZipFile(path) as file:
        yield file


@pytest.fixture
def standin() -> Iterator[ModuleType]:
    with npu_on_cpu() as module:
        yield module


def text(wheel: ZipFile, name: str) -> str:
    return wheel.read(name).decode("utf-8")


def declared(wheel: ZipFile, function: str) -> torch.FunctionSchema:
    listed = text(wheel, "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml")
    found = re.search(rf"func: ({function}\(.*)$", listed, re.M)
    assert found is not None, function
    schema: torch.FunctionSchema = torch._C.parse_schema(found[1])
    return schema


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_standin_has_the_declared_signature(function: str, wheel: ZipFile, standin: ModuleType) -> None:
    schema = declared(wheel, function)
    ours = list(inspect.signature(getattr(standin, function)).parameters.values())
    assert [p.name for p in ours] == [argument.name for argument in schema.arguments]
    for parameter, argument in zip(ours, schema.arguments, strict=True):
        assert (parameter.default is inspect.Parameter.empty) == (not argument.has_default_value())
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name
        assert not argument.kwarg_only


def test_results(wheel: ZipFile) -> None:
    """Of attention and the norm the first result is the one."""
    results = {name: [str(r.type) for r in declared(wheel, name).returns] for name in FUNCTIONS}
    assert results["npu_fusion_attention"] == ["Tensor"] * 4 + ["int"] * 3
    assert results["npu_rms_norm"] == ["Tensor"] * 2
    assert results["npu_swiglu"] == results["npu_rotary_mul"] == ["Tensor"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_package_exports_it(function: str, wheel: ZipFile) -> None:
    exported = text(wheel, "torch_npu/utils/custom_ops.py")
    assert f"torch_npu.{function} = torch.ops.npu.{function}\n" in exported


def manual(wheel: ZipFile, function: str) -> str:
    """What the wheel says of a function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its backslashes
        tree = ast.parse(text(wheel, "torch_npu/_op_plugin_docs.py"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 2 and getattr(node.args[0], "value", None) == function:
            return str(ast.literal_eval(node.args[1]))
    raise AssertionError(f"nothing about {function}")


def test_the_limits_are_those_of_the_manual(wheel: ZipFile) -> None:
    said = re.sub(r"\s+", "", manual(wheel, "npu_fusion_attention"))
    for limit in (
        f"取值范围1~{npu.HEAD_SIZE}.",  # D
        f"Nq取值范围1~{npu.HEADS}.",
        f"T(B*S)取值范围1~{npu.TOKENS >> 20}M",
        f"长度最大支持{npu.SEGMENTS >> 10}K",
        "Nq/Nkv必须是非0整数",
        "Dq=Dk和Dk≥Dv",
        "数据类型支持float16、bfloat16、float32",
        "query、key、value、pse的数据类型必须一致",
        f"sparse_mode为{npu._RIGHT_DOWN_CAUSAL}时,代表rightDownCausal模式",
        f"atten_mask为优化后的压缩下三角矩阵({npu._MASK}*{npu._MASK})",
        "22222,则actual_seq_qlen传:246810",  # lengths 2, 2, 2, 2, 2 are given as 2, 4, 6, 8, 10: no leading 0
        "取值为1(或True)代表该位不参与计算",
    ):
        assert limit in said, limit


def test_the_fused_parts_are_what_the_manual_says(wheel: ZipFile) -> None:
    assert "swish(A) * B = A * sigmoid(A) * B" in manual(wheel, "npu_swiglu")
    rotary = manual(wheel, "npu_rotary_mul")
    assert "x_new = torch.cat((-x2, x1), dim=-1)" in rotary
    assert "output = r1 * input + r2 * x_new" in rotary
    assert re.search(r"half模式：\s+input: layout支持: BNSD、BSND、SBND; D < 896", rotary)
    assert "数据类型需要和self保持一致" in manual(wheel, "npu_rms_norm")


def test_names_of_the_device_type(wheel: ZipFile) -> None:
    backend = text(wheel, "torch_npu/_init/registry/backend.py")
    assert f'torch.utils.rename_privateuse1_backend("{NPU.device}")' in backend
    assert f'torch._register_device_module("{NPU.device}", torch_npu.npu)' in backend
    collectives = text(wheel, "torch_npu/_init/registry/distributed.py")
    assert re.search(r'register_backend\(\s+"hccl",.+?devices=\["npu"\]', collectives, re.S)
    assert "PYTORCH_NPU_ALLOC_CONF" in text(wheel, "torch_npu/npu/memory.py")
    device = text(wheel, "torch_npu/npu/__init__.py")
    public = ast.literal_eval(re.search(r"__all__ = (\[.+?\])", device, re.S)[1])  # type: ignore[index]
    assert set(DEVICE_MODULE) <= set(public)


def test_it_is_made_for_one_minor_version_of_torch(wheel: ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about = text(wheel, name)
    version = re.search(r"^Version: (.+)$", about, re.M)
    needs = re.search(r"^Requires-Dist: torch==(.+)$", about, re.M)
    assert version is not None
    assert needs is not None
    assert minor(version[1]) == minor(needs[1])
