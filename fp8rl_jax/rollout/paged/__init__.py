"""Continuous batching over a paged KV cache: a slot whose completion has ended takes the next
request at once.

All prompts of a step are known when it begins, so nothing has to be served while it waits: there
is a queue on the device (state.py), and programs that work on it (programs.py).

    begin       an empty cache, the queue, and nothing in the slots
    load        prefill of the next prompts of the queue, `Layout.together` at a time
    run         up to `Layout.steps` decode steps, slots refilled from the prompts that are loaded
    catch_up    prefill of tokens that rows already have, of rows that had lost their pages
    shrink      the same state with fewer slots, when fewer rows are left

The host calls them as the signals of the last call say (host.py). Shapes are fixed (layout.py), so
each program is compiled once.

A prompt's pages are shared by its samples, and freed with the last of them. A row's own pages hold
what it has sampled, one more whenever a page is full. If none is free then, the row that loses
least gives up its pages and its slot, keeps its tokens, and goes to the front of the queue. One row
alone always has room (`choose_layout`), so every row ends.

A call can leave the cache to the next one (`converse`, reuse.py): prompts and what was sampled
behind them stay in their pages, until others need these, and prompts that go on from there, as the
next turn of a conversation does, are prefilled from where they differ.

A row's randomness comes from (key, prompt id, sample number, position) alone, as in `sampler`, so
its tokens do not depend on the slot, the pages and the rows beside it, but for what a matrix
product rounds differently (and in exact mode for nothing).

On a mesh each shard of the batch has a queue, slots and pages of its own; the loops are manual over
the batch's axes. Where each device has the whole model, a shard steps as often as it has to; where
the model is split, all shards step together (`_most`), and one that is done waits for the others.
"""
