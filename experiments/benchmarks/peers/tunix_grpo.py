"""Peer: one GRPO step of tunix's own learner, with its own sampler and its own llama model.

`GRPOLearner.train` pulls one batch of prompts a step from an iterable. That iterable is this
script's clock: it waits for a request, starts timing, hands out the prompts, and when the learner
comes back for the next batch the step is over.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from link import Link
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

NO_TOKEN = -1  # an end-of-sequence id that is never sampled: every completion takes all its tokens


class IdTokenizer:
    """Text that is token ids already: "17 4 9"."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 0  # false: nothing is put in front of a prompt

    def eos_id(self):
        return NO_TOKEN

    def pad_id(self):
        return 0


class TimedSteps:
    """The learner's data set: one batch a request, timed from its hand-over to the learner's return
    for the next."""

    def __init__(self, link, cluster):
        self.link, self.cluster = link, cluster
        self.prompts = np.array([" ".join(map(str, prompt)) for prompt in link.settings["prompts"]])
        self.generation_seconds, self.tokens = 0.0, 0
        self._generate, cluster.generate = cluster.generate, self.generate

    def generate(self, *arguments, **options):
        """Time the cluster's `generate`.

        It returns arrays on the host, so nothing is left to wait for.
        """
        start = time.perf_counter()
        output = self._generate(*arguments, **options)
        self.generation_seconds += time.perf_counter() - start
        self.tokens += sum(len(row) for row in output.tokens)
        return output

    def __iter__(self):
        for _ in self.link:
            self.generation_seconds, self.tokens = 0.0, 0
            start = time.perf_counter()
            yield {"prompts": self.prompts}
            jax.block_until_ready(nnx.state(self.cluster.actor_trainer.model))
            seconds = time.perf_counter() - start
            gen = self.generation_seconds
            self.link.answer(
                {"seconds": seconds, "gen": gen, "train": seconds - gen, "tokens": self.tokens}
            )


def load_model(settings, mesh):
    """Load `settings["model"]` into tunix's llama3 class in the shape `settings["config"]`."""
    shape = settings["config"]
    config = ModelConfig(
        num_layers=shape["num_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_kv_heads"],
        rope_theta=shape["rope_theta"],
        norm_eps=shape["rms_norm_eps"],
        weight_tying=shape["tie_word_embeddings"],
    )
    model: Llama3 = create_model_from_safe_tensors(settings["model"], config, mesh, jnp.float32)
    return model


def make_cluster(settings, mesh):
    """Actor and rollout share one set of weights on one mesh, so tunix has no weight sync to do."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(settings["learning_rate"], 0.9, 0.99, 1e-8, weight_decay=0.0),
    )
    longest = settings["prompt_tokens"] + settings["new_tokens"]
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        rollout_engine="vanilla",
        # no micro-batch size, so that the optimizer is not wrapped in optax.MultiSteps
        training_config=RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=10**9
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=settings["new_tokens"],
            max_prompt_length=settings["prompt_tokens"],
            kv_cache_size=longest,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[NO_TOKEN],
        ),
    )
    return RLCluster(
        actor=load_model(settings, mesh), tokenizer=IdTokenizer(), cluster_config=config
    )


def reward(prompts, completions, **_):
    """0 and 1 in turn: every group has something to learn, and nothing is computed."""
    return [float(row % 2) for row in range(len(completions))]


def main():
    link = Link()
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    cluster = make_cluster(link.settings, mesh)
    algorithm = GRPOConfig(
        num_generations=link.settings["samples"],
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        loss_agg_mode="token-mean",
    )
    learner = GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)
    link.ready(
        ("google-tunix", "jax", "jaxlib", "flax", "optax"),
        {
            "weights": "from the safetensors, float32; the llama3 class takes 1e6 as rotary "
            "base, whatever the model's is",
            "rollout": "vanilla engine; cache of exactly prompt + completion tokens; prompts "
            "padded to their own length",
            "update": "one, no micro-batches, no KL, no old log-probabilities, AdamW behind "
            "clipping at norm 1, no remat",
            "loss": "token mean",
            "sync": "none: actor and rollout share their weights",
            "logging": "none",
            "train": "everything of the step that is not RLCluster.generate",
        },
    )
    learner.train(TimedSteps(link, cluster))


if __name__ == "__main__":
    main()
