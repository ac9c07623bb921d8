"""Sum the gradients of a batch's shards, with the same bits on any number of workers: begin at `reduce`.

`tree_sum` is the fixed tree, `votes` what is summed beside the gradients; losses in `whole_batch` see all shards.
"""
