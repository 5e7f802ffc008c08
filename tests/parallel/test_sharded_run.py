"""A whole run, sampler and update compiled with shardings, on 8 devices against one."""

from pathlib import Path

import pytest
from parallel.helpers import metric_rows, run_processes

RUN = """
compute_dtype = "float32"
[model.init]
hidden_size = 64
intermediate_size = 96
num_layers = 1
num_heads = 4
num_kv_heads = 2
head_dim = 16
[task]
name = "spell_backward"
args = { min_word_len = 3, max_word_len = 3 }
train_size = 64
eval_size = 8
prompt_template = "{metadata[word]}="
[task.reward]
num_workers = 1
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_prompt_tokens = 6
max_new_tokens = 6
[optimizer]
learning_rate = 1e-3
[trainer]
steps = 2
[evaluation]
every = 0
"""


@pytest.mark.slow
def test_mesh_of_eight_trains_the_same_curve(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    script = Path(__file__).with_name("train_run.py")
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    flags = ["--recipe", "fp8-rl"]
    run_processes(script, 1, 1, run_file, tmp_path / "one", *flags, timeout=240)
    run_processes(script, 1, 8, run_file, tmp_path / "eight", *flags, *mesh, timeout=240)
    for a, b in zip(metric_rows(tmp_path / "one"), metric_rows(tmp_path / "eight"), strict=True):
        for name in ("reward/mean", "completions/mean_length", "entropy", "optim/grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=1e-4), name
        assert b["mismatch/k3"] < 1e-2
