"""The library with one line changed for the worse, again and again: tests must notice (`make
mutants`).

A test suite is as good as the errors that it finds. LIST holds errors of wiring, such as a wrong
sign, two arguments swapped, or a key that is drawn from twice, which finite numbers and a resumed
run that repeats the first do not show. Each is made in a copy of the tree, never in the tree
itself, and only the tests that are named beside it run. It is killed when one of them fails.

    python tests/mutants.py               all of them
    python tests/mutants.py -j 2 loop sft  two at a time, those with one of these words in file or
                                           name

A mutant that survives is an error that nobody would notice: write the test. One whose text is not
found exactly once stands on code that was rewritten: rewrite the mutant. Texts are short so that
this is rare.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.95
"""Part of the mutants that must be killed."""
TIMEOUT = 600
OF_THE_LIST = "tests/training/test_wiring.py::test_every_mutant_finds_its_text"
"""It would fail wherever a text was changed."""
UNOPTIMIZED = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
"""As in the Makefile: most of a test's time is compiling."""


class Mutant(NamedTuple):
    """`old` stands once in `file`, whatever the white space between its words, and becomes `new`;
    `tests` of the suite, a file and words of `pytest -k`, must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def places(self, text: str) -> list[re.Match[str]]:
        """Where `old` stands in the text of its file."""
        pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", self.old)))
        before, after = (r"\s+" if end.isspace() else "" for end in (self.old[0], self.old[-1]))
        return list(re.finditer(before + pattern + after, text))


def of(file: str, suite: str, *rows: tuple[str, str, str, str]) -> list[Mutant]:
    """Mutants of one file: (name, old, new, tests); tests that name no file of their own are in
    `suite`."""
    return [
        Mutant(name, f"fp8rl_jax/{file}", old, new, tests if ".py" in tests else f"{suite} {tests}")
        for name, old, new, tests in rows
    ]


WIRING = "training/test_wiring.py"
SESSION = "training/test_session.py"


LIST: list[Mutant] = [
    *of(
        "training/roofline.py",
        "training/test_roofline.py",
        ("adapters-of-the-last-host", "chip.network * inside", "chip.network", "a_ring_leaves"),
        ("tensor-overlaps", "return max(bounds) + waits", "return max(*bounds, waits)", "longest"),
        (
            "prompts-read-by-each-completion",
            "cached = (prompt * steps",
            "cached = (prompt * r.samples_per_prompt * steps",
            "products_are_counted",
        ),
        ("all-experts-are-read", "(1 - _chosen(shape, rows, sizes))", "0", "experts_are_read"),
        ("adapters-are-gathered", "if quantized or frozen", "if quantized", "adapters_send"),
        (
            "halves-of-gradients",
            "halves = 1 if quantized else 2",
            "halves = 1",
            "compiled_programs",
        ),
    ),
    *of(
        "training/setup.py",
        "training/test_exact.py",
        (
            "exact-decided-anew",
            "not config.resume or config.precision.exact",
            "True or config.precision.exact",
            "keeps_what_was_decided",
        ),
        (
            "asked-is-overruled",
            'exact != "auto" or not path.exists',
            "exact is None or not path.exists",
            "keeps_what_was_decided",
        ),
    ),
    *of(
        "training/checks.py",
        "training/test_exact.py",
        (
            "exact-with-any-engine",
            "plain = ours and samples and not differs",
            "plain = samples and not differs",
            "exact_by_default",
        ),
    ),
    *of(
        "rollout/sampling.py",
        WIRING,
        (
            "temperature-of-training",
            "sampling.max_new_tokens, temperature, stop_token_ids",
            "sampling.max_new_tokens, 1.0, stop_token_ids",
            "evaluation_samples",
        ),
        (
            "never-stops",
            "temperature, stop_token_ids=sampling.stop_token_ids,",
            "temperature,",
            "evaluation_samples",
        ),
    ),
    *of(
        "training/keys.py",
        WIRING,
        (
            "samples-draw-as-training",
            "jax.random.key(seed), _SAMPLES)",
            "jax.random.key(seed), _TRAINING)",
            f"{SESSION} change_nothing",
        ),
    ),
    *of(
        "precision/check.py",
        "training/test_exact.py",
        ("exact-of-two-flows", "cheap and not any(", "cheap or not any(", "exact_by_default"),
    ),
    *of(
        "ablation/design.py",
        "ablation/test_design.py",
        ("arms-share-a-seed", "seed=seed, output=lit", "output=lit", "whole_configuration"),
        ("any-difference-allowed", "own[key] == common[key]", "True", "faults_are_named"),
        ("judge-with-adapters", "        lora=LoraConfig(),\n", "", "judge_refuses"),
    ),
    *of(
        "ablation/runner.py",
        "ablation/test_runner.py",
        ("never-resumed", 'words.append("--resume")', "pass", "goes_on_from_its_checkpoint"),
        ("start-not-awaited", "job.needs not in going and", "True or", "warm_start_is_made"),
        ("stops-at-no-look", '"can\'t tell" not in verdicts', "False", "looks_end"),
    ),
    *of(
        "ablation/record.py",
        "ablation/test_runner.py",
        ("half-written-is-whole", "step > steps if", "step >= 0 if", "without_the_last_row"),
        ("collapse-ignored", "ends < low", "False", "lost_runs_are_outcomes"),
        (
            "finished-alone-counts",
            '"finished", "collapsed", "failed")',
            '"finished",)',
            "lost_runs",
        ),
    ),
    *of(
        "report/charts.py",
        "report/test_ablation_page.py",
        (
            "mean-of-values-on-log-axis",
            "_means(seeds, curve.log_scale)",
            "_means(seeds, False)",
            "of_the_logarithm",
        ),
        ("compiling-step-drawn", "(steps[1:], values[1:])", "(steps, values)", "of_the_logarithm"),
    ),
    *of(
        "report/runs.py",
        "report/test_ablation_page.py",
        ("seed-keeps-runs-apart", '("seed", "output")', '("output",)', "in_their_seed_alone"),
        ("equal-seeds-grouped", "len(set(seeds)) == len(seeds)", "True", "of_one_seed"),
    ),
    *of(
        "report/ablation.py",
        "report/test_ablation_page.py",
        (
            "collapse-not-listed",
            'if run["status"] != "finished"',
            'if run["status"] == "failed"',
            "listed_with_the_reason",
        ),
        ("colour-of-the-arm", 'recipes.index(arm["recipe"])', "len(arms)", "colour_is_the_recipe"),
    ),
    *of(
        "config/run.py",
        WIRING,
        (
            "min-p-forgotten",
            "min_p=rollout.min_p,",
            "",
            "changes_the_distribution",
        ),
    ),
    *of(
        "training/session.py",
        WIRING,
        (
            "penalty-of-prompts",
            "longest=self.sampling.max_new_tokens",
            "longest=config.rollout.max_prompt_tokens",
            "a_step_learns",
        ),
        (
            "mismatch-swapped",
            "sampled, train_logprobs,",
            "train_logprobs, sampled,",
            "a_step_learns",
        ),
        (
            "mismatch-of-what-was-truncated",
            "sampled = rollout.scored_logprobs",
            "sampled = batch.rollout_logprobs",
            "a_step_learns",
        ),
        (
            "mismatch-without-sign",
            "batch.mask, batch.advantages, config",
            "batch.mask, None, config",
            "a_step_learns",
        ),
        (
            "kl-of-reference",
            "batch.old_logprobs, batch.reference_logprobs,",
            "batch.reference_logprobs, batch.old_logprobs,",
            "a_step_learns",
        ),
        (
            "advantages-lost",
            "advantages=rollout.by_row(advantages)",
            "advantages=batch.advantages",
            "a_step_learns",
        ),
        (
            "truncation-forgotten",
            "self.config.samples_truncated() if truncated is None else truncated",
            "bool(truncated)",
            "a_step_learns",
        ),
        (
            "update-lost",
            "state, train_logprobs, learned, seen =",
            "_, train_logprobs, learned, seen =",
            "a_step_learns",
        ),
        (
            "no-sync",
            "self.serving.sync(weights, self.step, encoded, clock)\n",
            "",
            "a_step_learns",
        ),
        (
            "demonstrations-at-the-temperature-of-rollouts",
            '{"rl": RLConfig(), "temperature": 1.0}',
            '{"rl": RLConfig()}',
            "walk_through",
        ),
        (
            "one-draw-for-all-steps",
            "rollout_key(self.config.seed, self.step, self._rollouts)",
            "rollout_key(self.config.seed, 0, self._rollouts)",
            f"{SESSION} loop_of_a_run",
        ),
        (
            "one-draw-for-all-rollouts",
            "rollout_key(self.config.seed, self.step, self._rollouts)",
            "rollout_key(self.config.seed, self.step)",
            f"{SESSION} says_what_was_sampled",
        ),
        (
            "rollouts-never-begin-anew",
            "self.step, self._rollouts = self.step + 1, 0",
            "self.step = self.step + 1",
            f"{SESSION} loop_of_a_run",
        ),
        (
            "greedy-is-learned",
            "if rollout.temperature != self.sampling.temperature:",
            "if False:",
            f"{SESSION} change_nothing",
        ),
        (
            "reference-of-what-is-loaded",
            "Learner(self.config, self.recipe, self._kept, self.mesh)",
            "Learner(self.config, self.recipe, state.policy, self.mesh)",
            f"{SESSION} that_is_loaded",
        ),
        (
            "restart-keeps-the-step",
            "self.step = self._rollouts = 0",
            "pass",
            f"{SESSION} warm_start",
        ),
        (
            "scores-of-the-first-prompts",
            "completions[start * n : (start + batch_size) * n]",
            "completions[: batch_size * n]",
            f"{SESSION} logprobs_are",
        ),
    ),
    *of(
        "training/advantages.py",
        WIRING,
        ("penalty-added", "rewards + overlong", "rewards - overlong", "less_the_divergence"),
        (
            "kl-earns",
            "rewards - config.reward_kl",
            "rewards + config.reward_kl",
            "less_the_divergence",
        ),
        (
            "kl-told-negative",
            "divergence.mean(where=real)",
            "-divergence.mean(where=real)",
            "less_the_divergence",
        ),
        (
            "failed-have-advantages",
            "config.advantage, valid, ",
            "config.advantage, None, ",
            "less_the_divergence",
        ),
        (
            "advantages-without-lengths",
            "valid, lengths), metrics",
            "valid), metrics",
            "less_the_divergence",
        ),
        (
            "penalty-too-late",
            "rl.overlong_penalty(lengths, longest,",
            "rl.overlong_penalty(lengths, longest + 1,",
            "less_the_divergence",
        ),
        (
            "failed-learned-from",
            "~rewards.failed",
            "np.ones_like(rewards.failed)",
            "failed_reward",
        ),
        (
            "filling-is-real",
            "real = np.pad(np.ones(len(values), bool), (0, missing))",
            "real = np.ones(len(values) + missing, bool)",
            f"{SESSION} fills_a_batch",
        ),
        (
            "filling-is-valid",
            "np.pad(valid, (0, missing)), real",
            "np.pad(valid, (0, missing), constant_values=True), real",
            f"{SESSION} fills_a_batch or compile_nothing",
        ),
        (
            "failed-scores-learned-from",
            "rewards.rewards, ~rewards.failed",
            "rewards.rewards, np.ones_like(rewards.failed)",
            "failed_reward",
        ),
        (
            "none-is-zero",
            "valid = np.array([reward is not None for",
            "valid = np.array([True for",
            f"{SESSION} that_is_none",
        ),
    ),
    *of(
        "training/serving.py",
        WIRING,
        ("old-scales", "self.scales, metrics =", "_, metrics =", "scales_are"),
        (
            "calibrated-on-prompts",
            "batch.tokens, batch.present, served",
            "None, None, served",
            "scales_are",
        ),
        (
            "calibrated-on-padding",
            "batch.tokens, batch.present,",
            "batch.tokens, batch.present | True,",
            "scales_are",
        ),
        ("served-scales-unseen", "batch.present, served", "batch.present, None", "scales_are"),
        (
            "other-scale-told",
            "getattr(scales, role).max() for",
            "scales.query.max() for",
            "scales_are",
        ),
        (
            "resumed-without-scales",
            "self.scales = scales if measured else None",
            "self.scales = None",
            "training/test_loop.py resume",
        ),
        (
            "resumed-version",
            "self.engine.version = version",
            "self.engine.version = 0",
            "training/test_loop.py resume",
        ),
        (
            "warm-start-unserved",
            "self.due = self._moved = True",
            "self._moved = True",
            f"{SESSION} warm_start",
        ),
    ),
    *of(
        "training/prompts.py",
        WIRING,
        (
            "demonstrations-end-early",
            "mask[row, : len(ids)] = ids, True",
            "mask[row, : len(ids) - 1] = ids, True",
            "walk_through",
        ),
    ),
    *of(
        "statistics.py",
        "test_statistics.py",
        ("wilson-centre", "z * z / (2 * count)", "z * z / count", "wilson"),
        ("wilson-width", "(4 * count * count)", "(2 * count * count)", "wilson"),
        ("holm-without-stop", "np.logical_and.accumulate(np.take", "np.array(np.take", "holm"),
        (
            "lower-is-better-too",
            'gain = mean if better == "higher" else -mean def',
            "gain = mean\n\n    def",
            "verdict_is",
        ),
        (
            "failed-is-no-worse",
            "p_below(gain + margin, few | barred)",
            "p_below(gain + margin, few)",
            "failed_run",
        ),
        (
            "problems-leave-no-variance",
            "np.maximum(between - within, 0.0)",
            "0.0 * between",
            "crossed",
        ),
        ("problems-with-the-rest", "np.maximum(between - within, 0.0)", "between", "crossed"),
        ("problems-may-narrow", "np.max(halves, axis=0)", "halves[-1]", "never_narrow"),
        (
            "lost-in-full",
            "2 * np.minimum(below, of_lost)",
            "np.minimum(below, of_lost)",
            "few_seeds",
        ),
        ("ties-without-spread", "step / math.sqrt(6), 0.0)", "0.0, 0.0)", "ties"),
        (
            "floor-everywhere",
            "np.where(ties.any(-1), step",
            "np.where(step > 0, step",
            "few_outcomes",
        ),
        ("look-spends-all", "self.number / self.of))", "1.0))", "published"),
        (
            "one-sided-level",
            "1 - level / 2) * error for",
            "1 - level) * error for",
            "paired_t_test",
        ),
        ("collapsed-dropped", "np.isnan(x) | down[name]", "np.isnan(x)", "few_seeds"),
    ),
    *of(
        "training/loop.py",
        WIRING,
        ("inexact-again", "and not self.inexact:", "and True:", "goes_on_and_is_marked"),
        (
            "inexact-stops",
            "if not self.session.exact_by_default:",
            "if True:",
            "goes_on_and_is_marked",
        ),
        (
            "failed-in-the-mean",
            "samples, jnp.asarray(~scores.failed)",
            "samples, jnp.asarray(scores.failed)",
            "failed_reward",
        ),
        (
            "all-enter",
            "found.entering, prompts",
            "None, prompts",
            "teach_nothing_stay",
        ),
        (
            "accuracy-of-any-reward",
            "scores.correct.mean()",
            "(scores.rewards > -1).mean()",
            "a_step_learns",
        ),
        (
            "failures-not-watched",
            "metrics |= self.watch.see(step, metrics, found.scores)",
            "pass",
            "failed_reward",
        ),
        ("samples-of-no-step", '{"step": step, **row}', '{"step": 0, **row}', "a_step_learns"),
        (
            "evaluation-never-the-same",
            "sample_key(self.config.seed, 0)",
            "sample_key(self.config.seed, step)",
            "evaluation_is_due",
        ),
        (
            "evaluation-draws-as-training",
            "sample_key(self.config.seed, 0)",
            "jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), 0), 0)",
            "evaluation_is_due",
        ),
        ("evaluation-always", "(step % config.every and", "(step < 0 and", "evaluation_is_due"),
        (
            "no-evaluation-at-the-end",
            "config.every and step < self.steps",
            "config.every",
            "evaluation_is_due",
        ),
        (
            "evaluation-of-all",
            "self.setup.held_out.examples[: config.examples]",
            "self.setup.held_out.examples[:]",
            "evaluation_is_due",
        ),
        ("saves-too-early", "(step + 1) % every == 0", "step % every == 0", "a_run_serves"),
        ("last-not-saved", "step + 1 == steps or", "step == steps or", "a_run_serves"),
        (
            "saved-as-the-step-before",
            "self._save(step + 1,",
            "self._save(step,",
            "a_run_serves",
        ),
        (
            "evaluates-the-step-after",
            "metrics, found = self._evaluate(step),",
            "metrics, found = self._evaluate(step + 1),",
            "a_run_serves",
        ),
        (
            "last-evaluation-of-nothing",
            "self._evaluate(steps))",
            "self._evaluate(1))",
            "a_run_serves",
        ),
        ("starts-at-0", "in range(self.start, steps)", "in range(steps)", "a_run_serves"),
        (
            "calibrated-on-step-0",
            "self._prompts_after(self.start - 1)",
            "self.collector.prompts(0)",
            "a_run_serves",
        ),
    ),
    *of(
        "training/learner.py",
        WIRING,
        (
            "always-the-first-half",
            "i=i: x[i], minis)",
            "i=i: x[0], minis)",
            "two_updates",
        ),
        ("one-update", "for i in range(self.count):", "for i in range(1):", "two_updates"),
        (
            "measured-and-not-used",
            'recipe.kv_calibration == "update"',
            'recipe.kv_calibration == "rollout"',
            f"{SESSION} own_forward",
        ),
        (
            "halves-corrected-apart",
            "split_batch(corrected, self.count)",
            "split_batch(batch, self.count)",
            "two_updates",
        ),
        (
            "new-for-old",
            "return state, old, metrics, None if",
            "return state, old - 1, metrics, None if",
            "two_updates",
        ),
        (
            "corrections-untold",
            "averaged | rl.metric_values(corrections)",
            "averaged",
            "two_updates",
        ),
        ("mean-of-one", "_mean(collected)", "_mean(collected[:1])", "two_updates"),
        (
            "schedule-of-steps",
            "self.trainer.steps * self.count if",
            "self.trainer.steps if",
            "two_updates",
        ),
        (
            "learning-rate-of-start",
            "self.schedule(int(state.updates))",
            "self.schedule(0)",
            "one_update",
        ),
        (
            "micro-batches-forgotten",
            "(trainer.micro_batch_prompts or of_update)",
            "of_update",
            "one_update",
        ),
        (
            "temperature-forgotten",
            "temperature=config.rollout.temperature",
            "temperature=1.0",
            "one_update",
        ),
        ("remat-turned", 'remat == "layer"', 'remat != "layer"', "one_update"),
        (
            "recipe-without-correction",
            "correction.resolve(recipe.correction)",
            'correction.resolve("none")',
            "one_update",
        ),
        ("backend-forgotten", "            backend=config.precision.backend,\n", "", "one_update"),
        ("width-of-the-cut", "of_width(self.config.rl, width)", "self.config.rl", "one_update"),
        (
            "reference-follows",
            "join(self.reference, split",
            "join(split(state.policy)[0], split",
            "the_reference_is",
        ),
        (
            "reference-shared",
            "jax.tree.map(jnp.copy, split(policy)[0])",
            "split(policy)[0]",
            "the_reference_is",
        ),
        (
            "reference-replays",
            "prompt_routes=None, routes=None",
            "prompt_routes=None",
            "the_reference_is",
        ),
        ("no-reference", "kl_coefficient > 0 or", "kl_coefficient > 0 and", "the_reference_is"),
        ("no-old-for-two", "self.count > 1 or", "self.count > 2 or", "the_reference_is"),
        (
            "no-old-for-a-mean-weight",
            "correction.whole_batch or",
            "correction.whole_batch and",
            "the_reference_is",
        ),
        (
            "scored-at-once",
            "micro_batches=micro_batches), batch",
            "micro_batches=1), batch",
            "the_reference_is",
        ),
        (
            "old-is-reference",
            "reference_logprobs=reference)",
            "old_logprobs=reference)",
            "the_reference_is",
        ),
    ),
    *of(
        "models/logprobs.py",
        "models/test_token_logprobs.py",
        (
            "sums-what-is-not-in-the-support",
            "weights = jnp.where(valid, weights, 0.0)",
            "weights = jnp.where(True, weights, 0.0)",
            "over_supports",
        ),
        (
            "outside-of-its-support",
            "jnp.where(inside, found[0], jnp.nan)",
            "found[0]",
            "over_supports",
        ),
    ),
    *of(
        "rollout/sampling.py",
        "rollout/test_sampling.py",
        (
            "draws-what-it-does-not-keep",
            "kept, support = _likeliest(kept,",
            "_, support = _likeliest(kept,",
            "what_is_kept",
        ),
    ),
    *of(
        "training/experience.py",
        WIRING,
        (
            "scored-over-the-vocabulary",
            "rollout.policy_logprobs if rollout.support is None else rollout.behaviour_logprobs",
            "rollout.policy_logprobs",
            "supports_go",
        ),
    ),
    *of(
        "training/step.py",
        "training/test_packing.py",
        (
            "packed-without-supports",
            "hidden, targets=targets, support=support)",
            "hidden, targets=targets)",
            "packed_update",
        ),
    ),
    *of(
        "training/step.py",
        "training/test_update.py",
        (
            "last-micro-batch",
            "jax.tree.map(jnp.add, carry, (loss, gradients))",
            "(loss, gradients)",
            "accumulation",
        ),
        ("no-old", "old_logprobs=micro.old_logprobs", "old_logprobs=None", "takes_old"),
        (
            "no-reference-in-loss",
            "reference_logprobs=micro.reference_logprobs",
            "reference_logprobs=micro.rollout_logprobs",
            "takes_old",
        ),
        ("no-weights", "weights=micro.weights", "weights=None", "takes_old"),
        (
            "loss-of-all",
            "mask=micro.mask if micro.loss_mask is None else micro.loss_mask",
            "mask=micro.mask",
            "takes_old",
        ),
        (
            "denominator-of-all",
            "loss_denominator(in_loss",
            "loss_denominator(batch.mask",
            "takes_old",
        ),
        ("momentum-moves-alone", ", saturated, in_loss.any()", ", saturated", "moves_nothing"),
        (
            "ratio-turned",
            "batch.old_logprobs - batch.rollout_logprobs",
            "batch.rollout_logprobs - batch.old_logprobs",
            "takes_old",
        ),
        (
            "corrected-twice",
            " or batch.weights is not None",
            "",
            "rl/test_correction_in_update.py made_before",
        ),
        (
            "loss-mask-undone",
            "mask = batch.mask if batch.loss_mask is None else batch.loss_mask",
            "mask = batch.mask",
            "rl/test_correction_in_update.py narrower",
        ),
        ("no-temperature", "temperature=config.temperature", "temperature=1.0", "shared"),
        ("prompt-end-missed", "(batch.lengths - 1)[:", "(batch.lengths - 2)[:", "shared"),
        (
            "wrong-denominator",
            "count = batch.mask.sum()",
            "count = batch.mask.size",
            f"{WIRING} mean_over_answer",
        ),
        (
            "denominator-of-rows",
            "count = batch.mask.sum()",
            "count = batch.mask.shape[0]",
            f"{WIRING} mean_over_answer",
        ),
        (
            "padding-learned",
            "jnp.where(micro.mask, logprobs, 0.0)",
            "logprobs",
            f"{WIRING} mean_over_answer",
        ),
        ("unlearns", "loss = -jnp.sum(", "loss = jnp.sum(", f"{WIRING} mean_over_answer"),
        ("next-prompt", "jnp.repeat(last, n, axis=0)", "jnp.tile(last, (n, 1, 1))", "shared"),
    ),
    *of(
        "training/experience.py",
        WIRING,
        (
            "behaviour-swapped",
            "rollout.behaviour_logprobs, rollout.policy_logprobs, config.correction",
            "rollout.policy_logprobs, rollout.behaviour_logprobs, config.correction",
            "ratios_divide",
        ),
        (
            "keeps-what-was-cut-off",
            "rl.drop_truncated(mask, rollout.stopped)",
            "rl.drop_truncated(mask, ~rollout.stopped)",
            "uninformative_samples",
        ),
        ("no-filter", "if config.overlong.filter and", "if False and", "uninformative_samples"),
        (
            "only-what-teaches-nothing",
            "& inside[:, None]",
            "& ~inside[:, None]",
            "uninformative_samples",
        ),
        (
            "filter-undone",
            "(mask if in_loss is None else in_loss)",
            "mask",
            "uninformative_samples",
        ),
        (
            "mismatch-of-behaviour",
            'rows of `batch`."""\n        return self.rollout.policy_logprobs',
            'rows of `batch`."""\n        return self.rollout.behaviour_logprobs',
            "a_batch_holds",
        ),
        (
            "work-of-padding",
            "mask.sum(1), int(mask.sum())",
            "mask.sum(1), int(mask.size)",
            "a_batch_holds",
        ),
        ("no-routes", "routes=rollout.expert_ids", "routes=None", "a_batch_holds"),
        ("clipped-is-stopped", "1.0 - stopped.mean()", "stopped.mean()", "a_batch_holds"),
        (
            "length-of-the-cut-off",
            "lengths[stopped].mean()",
            "lengths[~stopped].mean()",
            "a_batch_holds",
        ),
        (
            "filling-learned",
            "mask = mask & (np.arange(rows) < len(self.texts))[:, None]",
            "pass",
            "fills_a_batch",
        ),
        (
            "filling-counted",
            "_completion_metrics(mask[:count].sum(1)",
            "_completion_metrics(mask.sum(1)",
            "fills_a_batch",
        ),
        (
            "observations-trained-on",
            'mask=table("sampled", width, False, bool)',
            "mask=attended",
            "rows_of_episodes",
        ),
        ("observations-unread", "attended=self.attended,", "", "rows_of_episodes"),
        (
            "episode-behaviour-swapped",
            "rollout.behaviour_logprobs, rollout.policy_logprobs, config.correction",
            "rollout.policy_logprobs, rollout.behaviour_logprobs, config.correction",
            "rows_of_episodes",
        ),
        (
            "last-row-of-an-episode",
            "np.add.at(sums, self.sample_of_row[own], values[own])",
            "sums[self.sample_of_row[own]] = values[own]",
            "training/test_episodes.py scores_what_was_sampled",
        ),
        (
            "empty-rows-advantage",
            "values[self.sample_of_row], 0)",
            "values[self.sample_of_row], 1)",
            "rows_of_episodes",
        ),
        (
            "episodes-of-no-lesson",
            "self._spread(entering.astype(np.float32)) > 0",
            "self._spread(entering.astype(np.float32)) >= 0",
            "rows_of_episodes",
        ),
    ),
    *of(
        "training/collect.py",
        WIRING,
        ("first-updates-teach", "chosen.reshape(-1, self.updates).T.ravel()", "chosen", "deals"),
        (
            "one-key-for-all-steps",
            "rollout_key(self.seed, step, number)",
            "rollout_key(self.seed, 0, number)",
            "no_two_steps",
        ),
        (
            "one-key-for-all-seeds",
            "rollout_key(self.seed, step, number)",
            "rollout_key(0, step, number)",
            "no_two_steps",
        ),
        (
            "entering-by-turns",
            "np.repeat(self.informative,",
            "np.tile(self.informative,",
            "uninformative_samples",
        ),
        ("prompt-of-another", "self.examples[row // n]", "self.examples[row % n]", "shown_samples"),
        ("one-order-for-all-seeds", "self.count, self.seed)", "self.count, 0)", "no_two_steps"),
        (
            "one-key-for-all-rounds",
            "rollout_key(self.seed, step, number)",
            "rollout_key(self.seed, step)",
            "keeps_what_teaches",
        ),
        ("rounds-of-the-next-step", "step * rounds + number", "step + number", "gives_up"),
        (
            "rewards-of-the-first",
            "joined.take(rows)",
            "joined.take(np.arange(len(rows)))",
            "keeps_what_teaches",
        ),
        (
            "keeps-what-teaches-nothing",
            "np.argsort(~informative,",
            "np.argsort(informative,",
            "keeps_what_teaches",
        ),
        (
            "rows-of-another",
            "rows_of(chosen, self.samples)",
            "rows_of(chosen * 0, self.samples)",
            "keeps_what_teaches",
        ),
        (
            "teaches-of-the-first",
            "informative=informative[chosen]",
            "informative=informative[: len(chosen)]",
            "keeps_what_teaches",
        ),
        (
            "one-round-more",
            "np.sum, informative)) < self.count",
            "np.sum, informative)) <= self.count",
            "draws_once",
        ),
        (
            "scored-twice",
            "return score_distributed(self.pool, examples, sampled.texts)",
            "return [score_distributed(self.pool, examples, sampled.texts) for _ in range(2)][1]",
            "a_step_learns",
        ),
        (
            "failures-teach",
            "self.samples, jnp.asarray(~scores.failed)",
            "self.samples, jnp.asarray(~scores.failed | True)",
            "gives_up",
        ),
        (
            "completions-of-the-first",
            "joined.of_prompts(prompts)",
            "joined.of_prompts(np.arange(len(prompts)))",
            "keeps_what_teaches",
        ),
    ),
    *of(
        "training/evaluation.py",
        WIRING,
        (
            "interval-over-samples",
            "interval(accuracy, len(table))",
            "interval(accuracy, table.size)",
            "accuracy_is",
        ),
        ("pass-at-k-of-examples", "table.max(1).mean()", "table.max(0).mean()", "accuracy_is"),
        ("pass-at-k-is-a-mean", "table.max(1).mean()", "table.mean()", "accuracy_is"),
        ("filling-counted", ".sum(1)[: len(texts)]", ".sum(1)", "accuracy_is"),
        ("row-of-another", "part[row // config.samples]", "part[row % len(part)]", "accuracy_is"),
        (
            "samples-mixed",
            "reshape(len(examples), config.samples)",
            "reshape(config.samples, len(examples)).T",
            "accuracy_is",
        ),
        (
            "evaluates-training",
            "setup.session examples = setup.held_out.examples[",
            "setup.session\n    examples = setup.train.examples[",
            "held_out_set",
        ),
        (
            "held-out-of-all",
            "setup.session examples = setup.held_out.examples[: config.examples]",
            "setup.session\n    examples = setup.held_out.examples[:]",
            "held_out_set",
        ),
    ),
    *of(
        "training/sft.py",
        WIRING,
        (
            "one-batch-for-all-steps",
            "examples = self.setup.train.batch(step,",
            "examples = self.setup.train.batch(0,",
            "walk_through",
        ),
        (
            "optimizer-of-the-run",
            "session.restart(self.config.sft.optimizer, self.steps)",
            "session.restart()",
            "walk_through",
        ),
        (
            "last-step-unlogged",
            "or step + 1 == self.steps",
            "or step == self.steps",
            "walk_through",
        ),
        (
            "same-flaws-every-step",
            "default_rng((config.seed, step))",
            "default_rng(config.seed)",
            "cut_anew",
        ),
        ("end-cut", "[*target[:-2], target[-1]]", "target[:-1]", "end_with"),
    ),
    *of(
        "training/text.py",
        "training/test_text.py",
        (
            "row-begins-late",
            "[:, None] * self.width +",
            "[:, None] * (self.width + 1) +",
            "rows_hold",
        ),
        ("documents-joined", "number - number[:, :1] + 1", "number > 0", "own_document"),
        ("same-order-every-epoch", "batch_indices(step,", "batch_indices(step % 3,", "each_epoch"),
        ("first-of-a-document-learned", "(own == following) & (own > 0)", "own > 0", "rows_hold"),
    ),
    *of(
        "tasks/text.py",
        "tasks/test_text.py",
        (
            "held-out-trained",
            "documents[:count], documents[count:]",
            "documents[:count], documents",
            "no_part",
        ),
        ("end-trained", "Document(front, first.source)", "first", "one_long"),
    ),
    *of(
        "training/prompts.py",
        WIRING,
        ("no-end", "return [*tokens, self.end]", "return tokens", "through_the_tokenizer"),
        (
            "target-begins-anew",
            "encode(example.target, add_special_tokens=False)",
            "encode(example.target)",
            "through_the_tokenizer",
        ),
        (
            "ids-of-the-batch",
            "[e.index for e in examples]",
            "list(range(len(examples)))",
            "through_the_tokenizer",
        ),
        (
            "padding-decoded",
            "decode(row[kept].tolist())",
            "decode(row.tolist())",
            "through_the_tokenizer",
        ),
        ("one-token-less-fits", "<= self.width", "< self.width", "through_the_tokenizer"),
        ("padded-with-0", "self.width, self.pad)", "self.width)", "through_the_tokenizer"),
        (
            "no-system-prompt",
            "prompt_tokens(self.tokenizer, example.prompt, self.system_prompt)",
            "prompt_tokens(self.tokenizer, example.prompt)",
            "through_the_tokenizer",
        ),
        (
            "answers-forgotten",
            "[*last.prompt, *last.tokens, *",
            "[*last.prompt, *",
            "episodes_go_on",
        ),
    ),
    *of(
        "training/experience.py",
        WIRING,
        ("one-key-for-all-turns", "jax.random.fold_in(key, turn)", "key", "episodes_go_on"),
        (
            "neighbours-share-draws",
            "example.index * samples + sample for",
            "example.index + sample for",
            "episodes_go_on",
        ),
        ("ended-go-on", "if not episode.done]", "if True]", "episodes_go_on"),
        ("ids-of-all", "[ids[i] for i in filled]", "ids[: len(filled)]", "episodes_go_on"),
        (
            "turns-swapped",
            "rollout.behaviour_logprobs, rollout.policy_logprobs, rollout.mask,",
            "rollout.policy_logprobs, rollout.behaviour_logprobs, rollout.mask,",
            "episodes_go_on",
        ),
        (
            "padding-said",
            "tuple(tokens[row][mask[row]].tolist())",
            "tuple(tokens[row].tolist())",
            "episodes_go_on",
        ),
        (
            "stopped-turned",
            "stopped=bool(stopped[row])",
            "stopped=not stopped[row]",
            "episodes_go_on",
        ),
        ("room-wasted", "> encoder.width", ">= encoder.width", "no_room"),
        ("height-of-episodes", "max(slots, len(episodes))", "len(episodes)", "no_room"),
    ),
    *of(
        "rollout/engine.py",
        "rollout/test_engine.py",
        ("changed-weights-served", "if not same.all():", "if not same.any():", "one_bit"),
        ("too-narrow", "-(-width // n)", "width // n", f"{WIRING} episodes_go_on"),
        (
            "room-of-its-own",
            "return least_of(name, free, processes)",
            "return free",
            "rollout/test_paged.py least_room",
        ),
        (
            "scales-kept",
            "served = with_scales(served, context.scales)",
            "served = with_scales(served, self._replaced or context.scales)",
            f"{WIRING} scales_are",
        ),
        (
            "version-of-none",
            "prompts=prompts, weight_version=self.version)",
            "prompts=prompts, weight_version=0)",
            "forward_that_serves",
        ),
        (
            "base-copied",
            "if _kinds(jax.tree.leaves(form)) == _kinds(arrays)",
            "if False",
            "rollout/test_adapter_sync.py without_a_copy",
        ),
        ("version-jumps", "self.version += 1", "self.version += 2", "versions"),
        (
            "padded-left",
            "table[row, : len(prompt)] = prompt",
            "table[row, -len(prompt) :] = prompt",
            "pad",
        ),
    ),
    *of(
        "config/recipe.py",
        "precision/test_recipes.py",
        (
            "first-rule",
            "for rule in self.layers if",
            "for rule in self.layers[::-1] if",
            "taken_over",
        ),
        ("activation-stays", "if not made.rollout.weight.quantized", "if False", "along"),
        (
            "gradients-stay",
            "trainer=trainer, **backward",
            "trainer=trainer",
            "along",
        ),
    ),
    *of(
        "models/forms.py",
        "models/test_layer_formats.py",
        ("one-format", "own = recipe.of_linear(linear)", "own = recipe", "own_format"),
        ("first-layer's", "[kinds[n][s.index(i)]]", "[kinds[n][0]]", "own_format"),
        (
            "uncast-trainer",
            "probability=recipe.trainer.probability,",
            "",
            "precision/test_attention_formats.py cast_by_the_reference",
        ),
    ),
    *of(
        "self_test.py",
        "test_self_test.py",
        ("refused-by-folder", "for name in SERVES[kernel]", "for name in [kernel]", "gone_around"),
        ("any-sources", 'and entry["fingerprint"] == _fingerprint(name)', "", "are_kept"),
        ("any-machine", "json.dumps(here, sort_keys=True)", '"one"', "are_kept"),
        ("model-untried", "dict.fromkeys((None, model))", "(None,)", "models_sizes_alone"),
        ("never-ends", "timeout=seconds,", "", "gone_around and hangs"),
        ("moments-are-kept", "found=not (why and other)", "found=True", "of_the_moment"),
        ("old-assembler", "int(release[1]) < OLDEST_PTXAS", "False", "missing_or_too_old"),
        ("by-name-goes-on", 'if wrong and backend == "hopper":', "if False:", "gone_around"),
        ("as-any-gpu", "if capability != [9, 0]:", "if False:", "known_by_its_driver"),
        (
            "each-for-itself",
            "text = told_by_first(",
            "text = (lambda name, find, seconds: find())(",
            "parallel/test_distributed.py what_one_does",
        ),
    ),
    *of(
        "compare/linears.py",
        "cli/test_doctor.py",
        ("same-side-twice", "reversed(quantized)", "quantized", "one_side_leaves_out"),
    ),
    *of(
        "training/adapters.py",
        "training/test_lora_run.py",
        ("norms-frozen", ") | norms_of(policy, lora)", ")", "norms_are_trained"),
    ),
    *of(
        "weights/peft_format.py",
        "weights/test_peft_format.py",
        (
            "every-norm-saved",
            'f"model.{name}" if name == FINAL_NORM else name',
            "name",
            "modules_to_save",
        ),
    ),
    *of(
        "training/source.py",
        "training/test_stored_base.py",
        (
            "optimizer-of-what-follows",
            'if read_record(run).get("supervised"):',
            "if False:",
            "training/test_source.py cut_short",
        ),
        (
            "base-anew",
            "held=base_formats(config, read_policy_config(directory))",
            "held={}",
            "a_base_is_the_files",
        ),
    ),
    *of(
        "compare/inputs.py",
        "compare/test_inputs.py",
        ("last-rows-inputs", "max(largest, found.get(linear, 0.0))", "largest", "float64_forward"),
    ),
    *of(
        "weights/load.py",
        "training/test_stored_base.py",
        ("codes-of-others", "if _stands_for(own, weight.value)", "if True", "from_python"),
    ),
    *of(
        "weights/stored_linears.py",
        "training/test_stored_base.py",
        ("offset-integers", "columns // 2] ^ 0x88", "columns // 2]", "own_codes"),
    ),
    *of(
        "precision/compute.py",
        "precision/test_attention_formats.py",
        ("cast-gradient", "with_gradient_of(attend, cast)", "(cast)", "both_sides_cast"),
    ),
    *of(
        "precision/exact.py",
        "precision/test_attention_formats.py",
        ("cast-by-no-kernel", "self.probability.quantized or not", "not", "both_sides_cast"),
        ("uncast-exact", "scale, self.cast())", "scale)", "both_sides_cast"),
    ),
    *of(
        "models/forward.py",
        "training/test_update.py",
        (
            "unscaled",
            "scales=None if scales is None",
            "scales=None if True",
            "rollout/test_generate.py fp8_policy",
        ),
        (
            "positions-anew",
            "positions = jnp.repeat(lengths, n)[:, None] +",
            "positions = 0 * jnp.repeat(lengths, n)[:, None] +",
            "shared",
        ),
        (
            "prompt-padding-read",
            "behind = KVCache(KVBlock((), (), real, slots))",
            "behind = KVCache(KVBlock((), (), slots >= 0, slots))",
            "shared",
        ),
    ),
    *of(
        "rollout/partial.py",
        "rollout/test_partial.py",
        (
            "one-version-for-all-tokens",
            "np.where(new, version, before.versions)",
            "np.full_like(before.versions, version)",
            "weights_that_sampled_it",
        ),
        (
            "carried-behind-the-new",
            "[split_batch(one, shards), split_batch(other, shards)]",
            "[split_batch(other, shards), split_batch(one, shards)]",
            "carried_in_front",
        ),
        (
            "incomplete-first",
            "np.argsort(~whole, axis=1",
            "np.argsort(whole, axis=1",
            "carried_in_front",
        ),
    ),
    *of(
        "training/carry_over.py",
        "training/test_partial_rollouts.py",
        (
            "carried-and-not-saved",
            "if self.progress is not None: return self.progress",
            "",
            "goes_on_with_what_was_carried",
        ),
    ),
    *of(
        "rollout/vllm/engine.py",
        "rollout/test_vllm.py",
        (
            "vllm-samples-of-other-prompts",
            "row = prompt * samples + sample",
            "row = sample * len(bodies) + prompt",
            "what_vllm_answered",
        ),
        (
            "vllm-one-seed-for-all-prompts",
            "jax.random.fold_in(key, i)",
            "jax.random.fold_in(key, 0)",
            "what_vllm_answered",
        ),
        (
            "vllm-version-read-before-a-batch-alone",
            "self._check_version(server) return answers",
            "return answers",
            "before_and_after_a_batch",
        ),
        (
            "vllm-served-before-the-check",
            "self._ready, self._vocab = False, policy.config.vocab_size",
            "self._ready, self._vocab = True, policy.config.vocab_size",
            "weights_that_are_not_served",
        ),
        (
            "vllm-greedy-behaviour",
            "jnp.zeros_like(logprobs) if greedy else logprobs",
            "logprobs",
            "what_vllm_answered",
        ),
        (
            "vllm-stop-token-may-be-missing",
            "(by in ends and ids[-1] == by)",
            "by in ends",
            "answers_that_cannot_be",
        ),
        (
            "vllm-key-and-value-scales-swapped",
            "[scales.query, scales.key, scales.value]",
            "[scales.query, scales.value, scales.key]",
            "kv_scales_go",
        ),
    ),
    *of(
        "rollout/vllm/server.py",
        "rollout/test_vllm.py",
        ("vllm-no-turns", ", body, math.inf)", ", body)", "one_after_the_other"),
        (
            "vllm-old-prefixes-stay",
            'self.post("/reset_prefix_cache")',
            "",
            "hands_over_weights_and_version",
        ),
        (
            "vllm-half-a-push-has-its-version",
            'f"loading {version}"',
            "version",
            "half_a_push",
        ),
    ),
    *of(
        "rollout/paged/programs.py",
        "rollout/test_paged.py",
        (
            "page-given-twice",
            'return free.at[jnp.where(missing, pages, none)].set(False, mode="drop"), pages',
            "return free, pages",
            "by_their_rank",
        ),
        (
            "prompt-freed-early",
            "fill_value=1) == 0)",
            "fill_value=1) < 9)",
            "small",
        ),
        ("kept-pages-given-away", "go = leaving & ~stay", "go = leaving", "conversation"),
        ("evicted-forgotten", '.set(EVICTED, mode="drop")', '.set(DONE, mode="drop")', "tight"),
        ("never-caught-up", "(state.slots.held < count - 1)", "(state.slots.held < 0)", "tight"),
        (
            "key-of-a-slot",
            "_of_rows(queue.keys, row), count",
            "_of_rows(queue.keys, 0 * row), count",
            "small",
        ),
    ),
    *of(
        "rollout/paged/reuse.py",
        "rollout/test_paged.py",
        (
            "kept-tokens-elsewhere",
            "column < first, places(old, 0, column)",
            "column <= first, places(old, 0, column)",
            "conversation",
        ),
    ),
    *of(
        "models/moe.py",
        "models/test_expert_mesh.py",
        ("part-of-a-cotangent", "cotangent * lax.psum(1, whole)", "cotangent * 1", "gradients"),
    ),
    *of(
        "ablation/runner.py",
        "ablation/test_runner.py",
        (
            "lines-of-a-killed-run",
            "for rows in ROWS:",
            "for rows in ROWS[:1]:",
            "before_a_checkpoint",
        ),
    ),
    *of(
        "training/roofline.py",
        "training/test_roofline.py",
        (
            "blocks-of-the-whole",
            "if scale_spec(spec, sides, block, blocks, mesh) != spec",
            "if any(side % part for side, part in zip(sides[-2:], block, strict=True))",
            "would_share",
        ),
    ),
    *of(
        "models/moe.py",
        "models/test_glm.py",
        (
            "bias-in-the-weights",
            "weights = jnp.take_along_axis(scores, ids, axis=-1)",
            "weights = jnp.take_along_axis(ranked, ids, axis=-1)",
            "best_groups",
        ),
        ("groups-by-their-best", "lax.top_k(grouped, 2)", "lax.top_k(grouped, 1)", "best_groups"),
    ),
    *of(
        "models/attention.py",
        "models/test_glm.py",
        (
            "pairs-as-they-are",
            "if turned == dim:\n            return x\n        ends = turned // 2, turned,",
            "if True:\n            return x\n        ends = turned // 2, turned,",
            "transformers",
        ),
        ("yarn-at-one", "1.0 if scaling is None else scaling.amplitude", "1.0", "transformers"),
    ),
    *of(
        "models/latent.py",
        "models/test_deepseek.py",
        ("latents-by-the-key-s-scale", "scales[1:]", "(scales[1],) * 2", "fp8_cache"),
        (
            "latents-by-the-layer-s-eps",
            "norm(latent, layer.kv_a_layernorm, LATENT_NORM_EPS)",
            "norm(latent, layer.kv_a_layernorm)",
            "transformers",
        ),
        (
            "neighbours-of-the-cache-apart",
            "jnp.stack(jnp.split(turned, 2, axis=-1), axis=-1)",
            "jnp.stack(jnp.split(turned, 2, axis=-1), axis=-2)",
            "neighbours",
        ),
    ),
    *of(
        "models/attention.py",
        "rollout/test_kv_granularity.py",
        (
            "heads-interleaved",
            "jnp.repeat(scale, x.shape[2] // len(scale))",
            "jnp.tile(scale, x.shape[2] // len(scale))",
            "full_forward",
        ),
    ),
    *of(
        "rollout/calibration.py",
        "rollout/test_engine.py",
        ("completions-unseen", "first.observed + second.observed", "first.observed", "no_padding"),
        ("prompts-unseen", "first.observed + second.observed", "second.observed", "no_padding"),
        (
            "heads-mixed",
            "kv_heads, -1, x.shape[-1])",
            "-1, kv_heads, x.shape[-1]).swapaxes(2, 3)",
            "rollout/test_kv_granularity.py scales_of_each_head",
        ),
        ("no-margin", "amax * recipe.kv_margin / divisor", "amax / divisor", "percentile"),
        ("smallest", "jnp.sort(amax, axis=0)", "-jnp.sort(-amax, axis=0)", "percentile"),
        (
            "key-for-value",
            "scales[:, 0], scales[:, 1], scales[:, 2]",
            "scales[:, 0], scales[:, 2], scales[:, 1]",
            "percentile",
        ),
        (
            "starts-of-another",
            "jnp.repeat(lengths, completions",
            "jnp.tile(lengths, completions",
            "no_padding",
        ),
        (
            "positions-from-0",
            "starts[:, None] + jnp.arange",
            "0 * starts[:, None] + jnp.arange",
            "no_padding",
        ),
        (
            "padding-attended",
            "mask.astype(jnp.int32), cache",
            "jnp.ones_like(completions), cache",
            "no_padding",
        ),
        (
            "prompt-padding-attended",
            "run(prompts, segment_ids=segments)",
            "run(prompts)",
            "no_padding",
        ),
        (
            "without-prompt",
            "cache = KVCache(first.cache)",
            "cache = KVCache()",
            "no_padding",
        ),
    ),
    *of(
        "rollout/sampler.py",
        "rollout/test_generate.py",
        (
            "neighbouring-keys",
            "jax.random.fold_in(jax.random.fold_in(key, prompt_id), sample)",
            "jax.random.fold_in(key, prompt_id + sample)",
            "neighbouring",
        ),
        (
            "one-key-for-all-samples",
            "jax.random.fold_in(key, prompt_id), sample)",
            "jax.random.fold_in(key, prompt_id), 0)",
            "neighbouring",
        ),
        (
            "one-draw-for-all-positions",
            "(0, None))(fixed.keys, t)",
            "(0, None))(fixed.keys, 0)",
            "every_position",
        ),
        (
            "one-position-on",
            "positions = (fixed.starts + state.t)",
            "positions = (fixed.starts + state.t + 1)",
            "equal_a_full_forward",
        ),
        (
            "logprobs-swapped",
            "jnp.where(live, behaviour, 0.0), jnp.where(live, full, 0.0)",
            "jnp.where(live, full, 0.0), jnp.where(live, behaviour, 0.0)",
            "truncated_behaviour",
        ),
        (
            "starts-of-another-prompt",
            "jnp.repeat(lengths, samples), row_keys",
            "jnp.tile(lengths, samples), row_keys",
            "equal_a_full_forward",
        ),
        ("never-stopped", "state.stopped | stopped", "state.stopped", "stop_tokens"),
        (
            "stop-token-left-out",
            "drawn = (tokens, live,",
            "drawn = (tokens, live & ~stopped,",
            "stop_tokens",
        ),
    ),
    *of(
        "tasks/distributed.py",
        WIRING,
        (
            "each-scores-all",
            "np.arange(jax.process_index(), count, jax.process_count())",
            "np.arange(count)",
            "processes_score",
        ),
        (
            "scored-twice-by-each",
            "own = pool.score(",
            "own = pool.score(examples, completions) and pool.score(",
            "a_step_learns",
        ),
        (
            "examples-of-another",
            "examples[row // repeats]",
            "examples[row % len(examples)]",
            "processes_score",
        ),
        ("correct-is-rewarded", "correct=correct > 0", "correct=rewards > 0", "processes_score"),
        (
            "timeouts-are-errors",
            "int(failed.sum() - timeouts)",
            "int(failed.sum())",
            "processes_score",
        ),
        (
            "correct-has-failed",
            "own.rewards, own.correct, own.failed,",
            "own.rewards, own.failed, own.correct,",
            "processes_score",
        ),
        ("turns-of-the-first", "shares[row % len(shares)]", "shares[0]", "processes_play"),
        (
            "turns-of-another",
            '["turns"][row // len(shares)]',
            '["turns"][row // len(shares) - 1]',
            "processes_play",
        ),
        ("correct-above-1", "(rewards >= 1.0)", "(rewards > 1.0)", "processes_play"),
    ),
    *of(
        "tasks/scores.py",
        WIRING,
        ("failed-have-scores", "scores[~self.failed]", "scores", "summed_weighed"),
        (
            "failures-of-the-first",
            "self.failed[rows]",
            "self.failed[: len(rows)][::-1]",
            "gives_up",
        ),
        (
            "last-errors",
            "errors=sum(part.errors for",
            "errors=max(part.errors for",
            "summed_weighed",
        ),
    ),
    *of(
        "tasks/sandbox/pool.py",
        WIRING,
        ("right-above-1", "self.deciding] >= 1.0", "self.deciding] > 1.0", "summed_weighed"),
        (
            "credit-turned",
            "if not self.partial_credit:",
            "if self.partial_credit:",
            "tasks/test_reward_sum.py no_partial_credit",
        ),
        (
            "errors-are-timeouts",
            "self.timeouts += timed_out",
            "self.timeouts += 1",
            "summed_weighed",
        ),
        ("unweighed", "(summed @ list(self.weights.values()))", "summed.sum(1)", "summed_weighed"),
        (
            "timeouts-counted-twice",
            "int(self.failed.sum()) - self.timeouts",
            "int(self.failed.sum())",
            "summed_weighed",
        ),
        ("last-error-told", "self.first_error or error", "error", "summed_weighed"),
    ),
    *of(
        "precision/rounding.py",
        "rollout/test_arrival.py",
        ("middles-move", "size > smallest", "size < smallest", "masters"),
        ("crossings-kept", "jnp.where(stays(drawn), drawn, x)", "drawn", "change_a_scale"),
        (
            "no-number-before-the-border",
            "jnp.where(stays(drawn), narrow, _neighbour(narrow, inwards))",
            "narrow",
            "masters_of_an_fp8",
        ),
        (
            "left-on-the-border",
            "jnp.where(beyond == served, drawn, served + beyond - drawn)",
            "jnp.where(beyond == served, drawn, x)",
            "all_at_once",
        ),
        ("largest-moves", "jnp.abs(x) == largest", "x == 0", "cells_of_both"),
        (
            "every-block-is-drawn",
            "block_amax(off, q.block) == 0",
            "block_amax(off, q.block) >= 0",
            "what_lies",
        ),
    ),
    *of(
        "models/forward.py",
        "models/test_forward.py",
        (
            "layers-in-8-bits",
            "to_bits(run_of_layers(policy, start, stop))",
            "run_of_layers(policy, start, stop)",
            "no_loop",
        ),
    ),
    *of(
        "precision/linear.py",
        "models/test_forward.py",
        (
            "inputs-in-8-bits",
            "to_bits(quantize(flat, fmt, compute.backend))",
            "quantize(flat, fmt, compute.backend)",
            "no_loop",
        ),
    ),
    *of(
        "models/dither.py",
        "rollout/test_arrival.py",
        ("unlike-sides-too", "and one.weight == other.weight", "", "what_lies"),
        ("router-is-drawn", 'if name.removeprefix("layers.") in', "if name in", "router"),
        (
            "all-layers",
            "jnp.where(here, drawn, made)",
            "drawn",
            "what_lies",
        ),
    ),
    *of(
        "training/advantages.py",
        "rl/test_selection.py",
        ("weights-lost", "made.advantages * weights", "made.advantages", "chosen_rows"),
        ("weight-0-teaches", "(weights > 0)[:, None]", "(weights >= 0)[:, None]", "chosen_rows"),
    ),
    *of(
        "rollout/engine.py",
        "rollout/test_transform.py",
        ("not-transformed", "if self.transform is not None:", "if False:", "served_copy"),
    ),
    *of(
        "training/optimizer.py",
        "training/test_moments.py",
        (
            "schedule-of-the-moments",
            "rate = self.schedule(updates)",
            "rate = self.schedule(before.count)",
            "training/test_update.py schedule_follows",
        ),
        (
            "sgd-unclipped",
            "change = _clipped(load(gradient), norm, numbers.norm)",
            "change = load(gradient)",
            "sgd_is",
        ),
    ),
    *of(
        "training/gradients.py",
        "training/test_gradients.py",
        (
            "factor-kept",
            "scales / mu[..., None, None]",
            "scales * mu[..., None, None]",
            "its_factor",
        ),
        ("never-halved", "share > SATURATED", "share > 1", "a_factor_is"),
        ("grows-on", "jnp.minimum(mu * 2.0 **", "jnp.maximum(mu * 2.0 **", "a_factor_is"),
    ),
    *of(
        "training/kept.py",
        "training/test_gradients.py",
        ("becomes-0", "if divides:", "if False:", "how_it_is"),
        ("never-drawn", 'rounding == "stochastic"', "False", "how_it_is"),
    ),
    *of(
        "precision/linear.py",
        "precision/test_own_formats.py",
        ("odd-tokens", "_more_rows(dy, more)", "dy", "products_are"),
    ),
    *of(
        "precision/formats/mx.py",
        "precision/test_formats.py",
        ("mx-scales-down", 'if self.scale == "up":', 'if self.scale == "down":', "rounded_up_is"),
    ),
    *of(
        "parallel/watch.py",
        "parallel/test_left_behind.py",
        (
            "a-thread-waits",
            "return threading.current_thread() is threading.main_thread()",
            "return True",
            "another_thread",
        ),
    ),
    *of(
        "training/watch.py",
        "training/test_watch.py",
        (
            "never-diverged",
            "median > best + SPIKE * spread_of_best",
            "median > self._first",
            "does_not_come",
        ),
        ("half-of-the-spikes", "self.count += found", "self.count |= found", "planted_spikes"),
    ),
    *of(
        "rl/sharpness.py",
        "rl/test_sharpness.py",
        ("box-without-the-target", "room + of_target(room)", "room", "best_corner"),
    ),
    *of(
        "training/step.py",
        "training/test_packing.py",
        (
            "sharpness-of-the-first-token",
            "jnp.take_along_axis(x, last, axis=1)",
            "jnp.take_along_axis(x, 0 * last, axis=1)",
            "last_tokens_logits",
        ),
    ),
    *of(
        "precision/formats/fp4.py",
        "precision/test_fp4.py",
        (
            "outliers-lost",
            "self.numbers(q.values) + outside",
            "self.numbers(q.values)",
            "clamped_and_compensated",
        ),
        ("bounds-of-all-tokens", 'x if self.of == "row" else', "", "is_its_own"),
    ),
    *of(
        "precision/estimator.py",
        "precision/test_fp4.py",
        (
            "slope-of-the-unscaled-weight",
            "gradient * e2m1_slope(scaled)",
            "gradient * e2m1_slope(master)",
            "gradients_of_a_linear",
        ),
    ),
    *of(
        "precision/formats/nvfp4.py",
        "precision/test_formats.py",
        (
            "nvfp4-tied-rows",
            'axis=-1 if self.outer == "row" else (-2, -1)',
            "axis=(-2, -1)",
            "nvfp4_is_transformer_engines",
        ),
    ),
    *of(
        "precision/linear.py",
        "precision/test_formats.py",
        (
            "weight-as-it-lies",
            "weight.quantized if weight.turned is None else weight.turned",
            "weight.quantized",
            "products_of_a_linear",
        ),
        (
            "gradients-to-nearest",
            "return made.quantize_stochastic(x, stochastic_salt(x) + jnp.uint32(use))",
            "return made.quantize(x, backend)",
            "drawn_gradients",
        ),
    ),
    *of(
        "rl/correction.py",
        "rl/test_correction.py",
        (
            "one-direction-of-kpop",
            "return jnp.maximum(p * of_token",
            "return jnp.minimum(p * of_token",
            "kpop or every_criterion",
        ),
    ),
    *of(
        "rl/objectives.py",
        "rl/test_objectives.py",
        (
            "pulled-back-where-fresh",
            "(1 - effective) * divergence",
            "effective * divergence",
            "p3o",
        ),
    ),
    *of(
        "training/acceptance.py",
        "training/test_acceptance.py",
        ("accepts-what-it-should-not", "not gap >= -tolerance", "gap >= -tolerance", "counts"),
    ),
    *of(
        "training/session.py",
        "training/test_acceptance.py",
        (
            "moments-stay-ahead",
            "policy=policy, optimizer=held.optimizer",
            "policy=policy",
            "going_back",
        ),
        ("scales-stay-ahead", "self.serving.scales = held.scales", "pass", "going_back"),
    ),
    *of(
        "parallel/rules.py",
        "parallel/test_rules.py",
        ("expert-axis-copies", '("data", "fsdp", "expert")', '("data", "fsdp")', "expert_axis"),
    ),
    *of(
        "models/forward.py",
        "parallel/test_collectives.py",
        (
            "every-device-computes-all-rows",
            'return constrain(x, "batch", None, None)',
            "return x",
            "update_sends",
        ),
    ),
    *of(
        "models/logprobs.py",
        "parallel/test_collectives.py",
        (
            "head-gathered-a-part",
            "if axes := splitting_axes(len(hidden)):",
            "if axes := ():",
            "update_sends",
        ),
    ),
    *of(
        "precision/linear.py",
        "parallel/test_collectives.py",
        (
            "weights-that-share-an-input-apart",
            "if shards == 1 or not all(map(fits, weights)):",
            "if True:",
            "share_an_input",
        ),
    ),
    *of(
        "precision/linear.py",
        "parallel/test_formats_mesh.py",
        (
            "joined-weights-in-their-own-order",
            "product.reshape(*lead, shards, -1), ends[:-1], axis=-1)",
            "product, [shards * end for end in ends[:-1]], axis=-1)",
            "codes_are",
        ),
    ),
    *of(
        "training/checkpoint.py",
        "training/test_checkpoint_rubbish.py",
        ("other-checkpoints", "if other != seen[0]:", "if False:", "see_other_checkpoints"),
    ),
    *of(
        "config/fingerprint.py",
        "ablation/test_design.py",
        ("any-objective", "specs += [rl.objective, ", "specs += [", "functions_that_are_files"),
    ),
    *of(
        "rollout/paged/layout.py",
        "rollout/test_paged.py",
        ("pages-for-prompts-alone", "if found.prompt_pages(*prompts) <= room:", "if True:", "turn"),
    ),
    *of(
        "parallel/distributed.py",
        "parallel/test_distributed.py",
        (
            "no-threads-to-spare",
            "address, count, process = place _spare_threads()",
            "address, count, process = place",
            "threads_to_spare",
        ),
        (
            "its-own-is-least",
            "min(value, *map(float, told))",
            "value",
            "what_one_does",
        ),
    ),
    *of(
        "rollout/sampler.py",
        "parallel/test_collectives.py",
        (
            "weights-gathered-a-token",
            "policy = lax.with_sharding_constraint(policy, policy_shardings(policy, mesh, rules))",
            "pass",
            "decode_step",
        ),
    ),
]


def unfit(mutants: Sequence[Mutant], tree: Path) -> list[str]:
    """What is wrong with the list, one line each: texts that are not found exactly once, names that
    are used twice, and what is no Python."""
    texts = {file: (tree / file).read_text() for file in {mutant.file for mutant in mutants}}
    names = [(mutant.file, mutant.name) for mutant in mutants]
    found = [
        f"{file}: two mutants are called {name}"
        for file, name in set(names)
        if names.count((file, name)) > 1
    ]
    for mutant in mutants:
        places = mutant.places(text := texts[mutant.file])
        if len(places) != 1:
            found.append(f"{mutant.file}: {mutant.name}: found {len(places)} times: {mutant.old!r}")
            continue
        try:
            ast.parse(mutated(text, mutant, places[0]))
        except SyntaxError as error:
            found.append(f"{mutant.file}: {mutant.name}: {error.msg}, with {mutant.new!r}")
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where at least LEAST of the chosen mutants were killed, 1 where fewer were, 2 where list or
    tests are at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", help="only mutants that have one of these in file or name"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many run at one time")
    options = parser.parse_args(arguments)
    chosen = [
        m
        for m in LIST
        if not options.words or any(word in f"{m.file} {m.name}" for word in options.words)
    ]
    if faults := unfit(LIST, ROOT) or (
        [] if chosen else [f"no mutant has one of {options.words} in file or name"]
    ):
        print("\n".join(faults), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees: queue.Queue[Path] = queue.Queue()
        first = copy_tree(Path(directory) / "0")
        if failed := failing(chosen, first):
            print(f"without any mutant these tests fail already:\n{failed}", file=sys.stderr)
            return 2
        trees.put(first)
        for number in range(1, options.jobs):
            trees.put(Path(shutil.copytree(first, Path(directory) / str(number))))

        def attempt(mutant: Mutant) -> str:
            tree, start = trees.get(), time.monotonic()
            try:
                verdict, said = run(mutant, tree)
            finally:
                trees.put(tree)
            what = "" if verdict == "killed" else f": {mutant.old!r} -> {mutant.new!r}"
            what += f"\n{said}" if verdict == "broken" else ""
            print(
                f"{verdict:8} {mutant.file} {mutant.name} ({time.monotonic() - start:.0f} s){what}",
                flush=True,
            )
            return verdict

        with ThreadPoolExecutor(options.jobs) as workers:
            verdicts = list(workers.map(attempt, chosen))
    killed, broken = verdicts.count("killed"), verdicts.count("broken")
    print(
        f"{killed} of {len(verdicts)} mutants killed ({killed / len(verdicts):.1%})"
        + (f", {broken} broken" if broken else "")
    )
    return 2 if broken else int(killed < LEAST * len(verdicts))


def mutated(text: str, mutant: Mutant, place: re.Match[str]) -> str:
    """The text with its mutant in it."""
    return text[: place.start()] + mutant.new + text[place.end() :]


def copy_tree(target: Path) -> Path:
    """What git tracks or would track, in `target`."""
    names = subprocess.check_output(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """killed: a test fails; SURVIVED: none does; broken: the tests did not run to an answer. And
    what pytest said."""
    path = tree / mutant.file
    text, stat = path.read_text(), path.stat()
    try:
        (place,) = mutant.places(text)
        path.write_text(mutated(text, mutant, place))
        # a time of its own, whatever the clock's grain: no compiled module of the original is taken
        # for it
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**10))
        code, said = pytest(mutant.tests.split(" ", 1), tree, PYTHONDONTWRITEBYTECODE="1")
    finally:
        path.write_text(text)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return {0: "SURVIVED", 1: "killed"}.get(code, "broken"), f"status {code}: {said}"


def failing(mutants: Sequence[Mutant], tree: Path) -> str:
    """What pytest says where a test that is to kill a mutant fails without one, or is not there;
    else nothing. It leaves the tree compiled, which halves the time of what follows."""
    words: dict[str, set[str]] = {}
    for mutant in mutants:
        file, _, keywords = mutant.tests.partition(" ")
        words.setdefault(file, set()).add(keywords)
    for file, keywords in words.items():
        code, said = pytest([file, " or ".join(sorted(keywords))], tree, PYTHONDONTWRITEBYTECODE="")
        if code:
            return said
    return ""


def pytest(tests: Sequence[str], tree: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output of pytest in `tree` on a file of tests, and with a second string on what
    `-k` chooses there."""
    file, *keywords = tests
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"tests/{file}",
    ]
    command += ["--deselect", OF_THE_LIST]
    for words in keywords:
        command += ["-k", words]
    flags = f"{UNOPTIMIZED} {os.environ.get('XLA_FLAGS', '').replace(UNOPTIMIZED, '')}".strip()
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=dict(os.environ) | {"PYTHONPATH": str(tree), "XLA_FLAGS": flags} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"{' '.join(command)}: not done after {TIMEOUT} s"
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main())
