"""Keys under other names: what verl, NeMo RL, TRL and tunix call a setting, and what it is called
here.

A configuration that comes from another project is answered key by key: an unknown key that stands
in one of these tables gets a line with its name here, in files and in flags alike. Names are
matched from their end, so `rollout.n` is found in `actor_rollout_ref.rollout.n`. A row is {name
there: (key here, or keys joined by "and"; what differs in its values)}.

A key of this library that is renamed gets a row in `EARLIER`, so that old run files say what to
change.
"""

from __future__ import annotations

from typing import NamedTuple

_AGGREGATION = (
    "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum sequence_sum"
)
_ALGORITHM = "fp8rl_jax/config/rl.py opens with the keys of each algorithm"
_COMPLETIONS = "counted in prompts, each with all its completions"
_ONCE = "mini-batches of a rollout; each completion is trained on once"
_RECIPE = (
    "the recipe names every format; fp8rl_jax/config/recipes.toml opens with the table of them"
)
_STEPS = "counted in steps"

EARLIER: dict[str, tuple[str, str]] = {}

VERL: dict[str, tuple[str, str]] = {
    "actor_rollout_ref.model.path": ("model.path", ""),
    "enable_gradient_checkpointing": ("trainer.remat", '"layer" or "none"'),
    "lr": ("optimizer.learning_rate", ""),
    "lr_warmup_steps": ("optimizer.warmup_steps", ""),
    "lr_warmup_steps_ratio": ("optimizer.warmup_steps", "counted in updates"),
    "warmup_style": ("optimizer.schedule", ""),
    "min_lr_ratio": ("optimizer.final_ratio", ""),
    "grad_clip": ("optimizer.max_grad_norm", ""),
    "ppo_mini_batch_size": (
        "trainer.updates_per_rollout",
        "train_batch_size / ppo_mini_batch_size",
    ),
    "ppo_micro_batch_size": ("trainer.micro_batch_prompts", _COMPLETIONS),
    "ppo_micro_batch_size_per_gpu": ("trainer.micro_batch_prompts", _COMPLETIONS),
    "ppo_epochs": ("trainer.updates_per_rollout", _ONCE),
    "clip_ratio": ("rl.clip_low and rl.clip_high", ""),
    "clip_ratio_low": ("rl.clip_low", ""),
    "clip_ratio_high": ("rl.clip_high", ""),
    "clip_ratio_c": ("rl.dual_clip", ""),
    "policy_loss.loss_mode": ("rl.objective and rl.ratio", _ALGORITHM),
    "loss_agg_mode": ("rl.aggregation", _AGGREGATION),
    "entropy_coeff": ("rl.entropy_coefficient", ""),
    "use_kl_loss": ("rl.kl_coefficient", "0 for false"),
    "kl_loss_coef": ("rl.kl_coefficient", ""),
    "kl_loss_type": (
        "rl.kl_estimator",
        "kl is k1, mse k2, low_var_kl k3; a plus is rl.kl_gradient",
    ),
    "rollout.n": ("rollout.samples_per_prompt", ""),
    "rollout.prompt_length": ("rollout.max_prompt_tokens", ""),
    "rollout.response_length": ("rollout.max_new_tokens", ""),
    "rollout.tensor_model_parallel_size": ("mesh.tensor", ""),
    "rollout.quantization": ("recipe", _RECIPE),
    "calculate_kv_scales": (
        "precision.kv_calibration and precision.kv_rule",
        '"rollout" and "verl" for true',
    ),
    "val_kwargs.n": ("evaluation.samples", ""),
    "val_kwargs.temperature": ("evaluation.temperature", ""),
    "router_replay.mode": ("trainer.router_replay", "true is R3"),
    "fsdp_size": ("mesh.fsdp", ""),
    "train_batch_size": ("rollout.prompts_per_step", ""),
    "val_batch_size": ("evaluation.batch_size", "counted in completions"),
    "train_files": ("task.name", 'with task.kind = "jsonl"'),
    "val_files": ("task.eval_path", 'with task.kind = "jsonl"'),
    "max_prompt_length": ("rollout.max_prompt_tokens", ""),
    "max_response_length": ("rollout.max_new_tokens", ""),
    "adv_estimator": ("rl.advantage.estimator", ""),
    "norm_adv_by_std_in_grpo": ("rl.advantage.estimator", '"grpo" for true, "dr_grpo" for false'),
    "filter_groups.enable": ("rl.dynamic_sampling.enabled", ""),
    "max_num_gen_batches": ("rl.dynamic_sampling.max_rounds", ""),
    "overlong_buffer.len": ("rl.overlong.buffer", ""),
    "overlong_buffer.penalty_factor": ("rl.overlong.penalty", ""),
    "tis_imp_ratio_cap": ("rl.correction.max_weight", 'with rl.correction.method = "token_tis"'),
    "rollout_is": ("rl.correction.weights", ""),
    "rollout_is_threshold": ("rl.correction.max_weight", ""),
    "rollout_is_batch_normalize": ("rl.correction.batch_normalize", ""),
    "rollout_rs": (
        "rl.correction.reject",
        'criteria with their bounds, such as "seq_mean_k1:0.999:1.001"',
    ),
    "rollout_rs_threshold": (
        "rl.correction.reject",
        'criteria with their bounds, such as "seq_mean_k1:0.999:1.001"',
    ),
    "bypass_mode": ("rl.correction.mode", '"bypass" or "decoupled"'),
    "custom_reward_function.path": ("task.reward.function", "path/to/file.py:function"),
    "total_training_steps": ("trainer.steps", ""),
    "total_epochs": ("trainer.steps", _STEPS),
    "save_freq": ("checkpoint.every", ""),
    "test_freq": ("evaluation.every", ""),
    "resume_mode": ("resume", "true or false"),
    "max_actor_ckpt_to_keep": ("checkpoint.keep", ""),
    "default_local_dir": ("output", ""),
    "project_name": ("tracking.wandb_project", ""),
    "experiment_name": ("tracking.wandb_name", ""),
    "trainer.logger": ("tracking.wandb and tracking.tensorboard", ""),
}

NEMO: dict[str, tuple[str, str]] = {
    "num_prompts_per_step": ("rollout.prompts_per_step", ""),
    "num_generations_per_prompt": ("rollout.samples_per_prompt", ""),
    "max_num_steps": ("trainer.steps", ""),
    "max_num_epochs": ("trainer.steps", _STEPS),
    "max_rollout_turns": ("task.max_turns", ""),
    "val_period": ("evaluation.every", ""),
    "val_batch_size": ("evaluation.batch_size", "counted in completions"),
    "max_val_samples": ("evaluation.examples", ""),
    "use_leave_one_out_baseline": (
        "rl.advantage.estimator",
        '"rloo" for true without normalize_rewards',
    ),
    "normalize_rewards": ("rl.advantage.estimator", '"grpo" for true, "dr_grpo" for false'),
    "use_dynamic_sampling": ("rl.dynamic_sampling.enabled", ""),
    "dynamic_sampling_max_gen_batches": ("rl.dynamic_sampling.max_rounds", ""),
    "overlong_filtering": ("rl.overlong.filter", ""),
    "reward_shaping.overlong_buffer_length": ("rl.overlong.buffer", ""),
    "reward_shaping.overlong_buffer_penalty": ("rl.overlong.penalty", ""),
    "reference_policy_kl_penalty": ("rl.kl_coefficient", ""),
    "reference_policy_kl_type": ("rl.kl_estimator", ""),
    "ratio_clip_min": ("rl.clip_low", ""),
    "ratio_clip_max": ("rl.clip_high", ""),
    "ratio_clip_c": ("rl.dual_clip", ""),
    "sequence_level_importance_ratios": ("rl.ratio", '"sequence" for true'),
    "token_level_loss": ("rl.aggregation", '"token_mean" for true, "sequence_mean" for false'),
    "use_importance_sampling_correction": ("rl.correction.method", '"nemo_is" for true'),
    "truncated_importance_sampling_ratio": ("rl.correction.max_weight", ""),
    "truncated_importance_sampling_ratio_min": ("rl.correction.min_weight", ""),
    "truncated_importance_sampling_type": (
        "rl.correction.method",
        '"nemo_tis", "nemo_icepop" or "nemo_seq_mask_tis"',
    ),
    "model_name": ("model.path", ""),
    "train_global_batch_size": (
        "trainer.updates_per_rollout",
        "all completions of a step / train_global_batch_size",
    ),
    "train_micro_batch_size": ("trainer.micro_batch_prompts", _COMPLETIONS),
    "max_total_sequence_length": (
        "rollout.max_prompt_tokens and rollout.max_new_tokens",
        "together",
    ),
    "max_input_seq_length": ("rollout.max_prompt_tokens", ""),
    "logprob_chunk_size": ("trainer.logprob_chunk", ""),
    "policy.precision": ("compute_dtype", ""),
    "vllm_cfg.precision": ("recipe", _RECIPE),
    "kv_cache_dtype": ("recipe", _RECIPE),
    "fp8_cfg": ("recipe", _RECIPE),
    "pow2_weight_scaling_factors": (
        "precision.rollout.scale",
        '"power_of_two" for true, of weights and activations',
    ),
    "pow2_activation_scaling_factors": (
        "precision.rollout.scale",
        '"power_of_two" for true, of weights and activations',
    ),
    "num_first_layers_in_bf16": ("precision.first_layers_in_compute", ""),
    "num_last_layers_in_bf16": ("precision.last_layers_in_compute", ""),
    "quantization_ignored_layer_kws": (
        "precision.excluded",
        'shell patterns over whole names, such as "layers.3.*"',
    ),
    "activation_checkpointing": ("trainer.remat", '"layer" or "none"'),
    "tensor_parallel_size": ("mesh.tensor", ""),
    "tensor_model_parallel_size": ("mesh.tensor", ""),
    "expert_parallel_size": ("mesh.expert", ""),
    "expert_model_parallel_size": ("mesh.expert", ""),
    "lr": ("optimizer.learning_rate", ""),
    "train_data_path": ("task.name", 'with task.kind = "jsonl"'),
    "val_data_path": ("task.eval_path", 'with task.kind = "jsonl"'),
    "save_period": ("checkpoint.every", ""),
    "keep_top_k": ("checkpoint.keep", "the newest ones"),
    "checkpoint_dir": ("output", ""),
    "log_dir": ("output", ""),
    "wandb_enabled": ("tracking.wandb", ""),
    "tensorboard_enabled": ("tracking.tensorboard", ""),
    "wandb.project": ("tracking.wandb_project", ""),
    "wandb.name": ("tracking.wandb_name", ""),
    "num_val_samples_to_print": ("tracking.samples", ""),
}

TRL: dict[str, tuple[str, str]] = {
    "model_name_or_path": ("model.path", ""),
    "dataset_name": ("task.name", ""),
    "num_generations": ("rollout.samples_per_prompt", ""),
    "num_generations_eval": ("evaluation.samples", ""),
    "max_prompt_length": ("rollout.max_prompt_tokens", ""),
    "max_completion_length": ("rollout.max_new_tokens", ""),
    "per_device_train_batch_size": ("rollout.prompts_per_step", _COMPLETIONS),
    "per_device_eval_batch_size": ("evaluation.batch_size", ""),
    "gradient_accumulation_steps": ("trainer.micro_batch_prompts", _COMPLETIONS),
    "generation_batch_size": ("rollout.prompts_per_step", _COMPLETIONS),
    "steps_per_generation": ("trainer.updates_per_rollout", ""),
    "num_iterations": ("trainer.updates_per_rollout", _ONCE),
    "max_steps": ("trainer.steps", ""),
    "num_train_epochs": ("trainer.steps", _STEPS),
    "learning_rate": ("optimizer.learning_rate", ""),
    "lr_scheduler_type": ("optimizer.schedule", ""),
    "warmup_ratio": ("optimizer.warmup_steps", "counted in updates"),
    "adam_beta1": ("optimizer.beta1", ""),
    "adam_beta2": ("optimizer.beta2", ""),
    "adam_epsilon": ("optimizer.eps", ""),
    "beta": ("rl.kl_coefficient", ""),
    "epsilon": ("rl.clip_low and rl.clip_high", ""),
    "epsilon_high": ("rl.clip_high", ""),
    "delta": ("rl.dual_clip", ""),
    "loss_type": ("rl.objective and rl.aggregation", _ALGORITHM),
    "scale_rewards": (
        "rl.advantage.estimator",
        '"grpo" for group, "dr_grpo" for none, "reinforce_pp_baseline" for batch',
    ),
    "importance_sampling_level": ("rl.ratio", ""),
    "mask_truncated_completions": ("rl.overlong.filter", ""),
    "vllm_importance_sampling_correction": (
        "rl.correction.method",
        '"token_tis" for true, "none" for false',
    ),
    "vllm_importance_sampling_mode": (
        "rl.correction.method",
        "token_truncate is token_tis, sequence_truncate sequence_tis",
    ),
    "vllm_importance_sampling_cap": ("rl.correction.max_weight", ""),
    "reward_funcs": (
        "task.reward.function",
        "path/to/file.py:function, or several in task.reward.functions",
    ),
    "reward_weights": ("task.reward.weights", "a table of names"),
    "bf16": ("compute_dtype", '"bfloat16" or "float32"'),
    "fp16": ("compute_dtype", '"float16"'),
    "gradient_checkpointing": ("trainer.remat", '"layer" or "none"'),
    "output_dir": ("output", ""),
    "save_steps": ("checkpoint.every", ""),
    "save_total_limit": ("checkpoint.keep", ""),
    "eval_steps": ("evaluation.every", ""),
    "resume_from_checkpoint": ("resume", "true or false; the newest checkpoint of output"),
    "report_to": ("tracking.wandb and tracking.tensorboard", ""),
    "run_name": ("tracking.wandb_name", ""),
    "num_completions_to_print": ("tracking.samples", ""),
}

TUNIX: dict[str, tuple[str, str]] = {
    "num_generations": ("rollout.samples_per_prompt", ""),
    "num_iterations": ("trainer.updates_per_rollout", _ONCE),
    "beta": ("rl.kl_coefficient", ""),
    "epsilon": ("rl.clip_low and rl.clip_high", ""),
    "epsilon_high": ("rl.clip_high", ""),
    "loss_algo": ("rl.ratio", '"sequence" for gspo-token'),
    "loss_agg_mode": ("rl.aggregation", _AGGREGATION),
    "max_tokens_to_generate": ("rollout.max_new_tokens", ""),
    "total_generation_steps": ("rollout.max_new_tokens", ""),
    "max_prompt_length": ("rollout.max_prompt_tokens", ""),
    "mini_batch_size": (
        "trainer.updates_per_rollout",
        "rollout.prompts_per_step / mini_batch_size",
    ),
    "train_micro_batch_size": ("trainer.micro_batch_prompts", _COMPLETIONS),
    "max_steps": ("trainer.steps", ""),
    "eval_every_n_steps": ("evaluation.every", ""),
    "save_interval_steps": ("checkpoint.every", ""),
    "max_to_keep": ("checkpoint.keep", ""),
}

SOURCES = {"an earlier version": EARLIER, "verl": VERL, "NeMo RL": NEMO, "TRL": TRL, "tunix": TUNIX}
"""The tables, by whom the names belong to."""


class Renamed(NamedTuple):
    """What an unknown key is called here."""

    sources: tuple[str, ...]
    """Whose name it is."""
    keys: tuple[str, ...]
    """The keys here that do what it does."""
    note: str
    """How the values differ; empty where they do not."""


def renamed(key: str, whole: bool = False) -> Renamed | None:
    """What `key` is called here, or None where no table has it.

    Args:
        key: dotted, with underscores; the longest end of it that is a name in a table counts.
        whole: only `key` as it is counts, not its ends.
    """
    parts = key.split(".")
    for start in range(1 if whole else len(parts)):
        name = ".".join(parts[start:])
        if sources := tuple(source for source, table in SOURCES.items() if name in table):
            keys, note = SOURCES[sources[0]][name]
            return Renamed(sources, tuple(keys.split(" and ")), note)
    return None
