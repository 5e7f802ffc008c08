"""Where compiled programs are kept."""

from pathlib import Path

from fp8rl_jax import caching


def test_each_kind_of_cpu_has_programs_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path))
    here = caching.program_dir()
    assert here.parent == tmp_path / "jax"
    kinds = []
    for flags in ("fpu avx2", "fpu avx2", "fpu avx2 avx512f"):
        told = f"model name : a CPU\nflags : {flags}\ncpu MHz : {len(kinds)}\n"
        monkeypatch.setattr(Path, "read_text", lambda self, told=told: told)
        kinds.append(caching._cpu_kind.__wrapped__())
    assert kinds[0] == kinds[1] != kinds[2]
