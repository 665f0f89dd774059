"""What the plug-in does in every SGLang: joins the attention-TP group, and moves a layer's tokens to their ranks and
back.

`sglang_communicator.py` and `sglang_boundary.py` hook it into the two ways in which SGLang moves tokens between
layers."""
import logging
from typing import NamedTuple

import torch

from . import ops
from .sglang_join import GpuGroup, join_group

logger = logging.getLogger("semmoe_kernels.sglang")


class Order(NamedTuple):
    """How the tokens of one layer were shuffled."""

    # The layer's exit is recognised by this object.
    owner: object
    permutation: torch.Tensor
    offsets: torch.Tensor
    # The batch's `num_token_non_padded`, which is wrong for shuffled rows and is restored afterwards.
    real_tokens: object


class Shuffle:
    """One process. Everything passes through unchanged until `join` has made a communicator of the attention-TP
    group, which all of its ranks do or none; SGLang builds its layers after that."""

    def __init__(self, path, group_of=GpuGroup):
        self.path, self.group_of = path, group_of
        self.comm = self.tables = None
        self.too_large = False

    def layout(self, runner):
        """The sglang_join.Layout of this SGLang."""
        raise NotImplementedError

    def use(self, tables, comm):
        """Enables shuffling from now on."""
        self.moe_layer = {layer: index for index, layer in enumerate(tables.layer_ids)}
        self.tables, self.comm = tables, comm

    def join(self, original, runner):
        """Wraps ModelRunner.init_torch_distributed, where SGLang's groups exist for the first time."""
        answer = original(runner)
        if self.comm is not None or getattr(runner, "is_draft_worker", False):
            return answer
        try:
            layout = self.layout(runner)
            tables, comm = join_group(runner, layout, self.path, self.group_of(runner, layout))
        except Exception as error:
            # All ranks of the group arrive here, with one sentence or with their own.
            logger.error("semmoe: the plug-in stays off: %s", error)
            return answer
        self.use(tables, comm)
        logger.info("semmoe: on, for layers %s over %d ranks, up to %d tokens a batch", tables.layer_ids, comm.world, comm.max_tokens)
        return answer

    def fits(self, hidden_states, residual, norm, batch):
        """Whether these tokens can be shuffled. Equal on all ranks, as it depends only on shapes and settings."""
        tokens = batch.input_ids
        if not (residual is not None and plain_rms_norm(norm) and tokens is not None
                and hidden_states.shape[0] == tokens.shape[0] > 0 and residual.shape == hidden_states.shape
                and norm.weight.dtype == residual.dtype == hidden_states.dtype):
            return False
        fits = tokens.shape[0] <= self.comm.max_tokens and hidden_states.nbytes <= self.comm.memory.buffer_bytes
        if not fits and not self.too_large:
            self.too_large = True
            logger.warning("semmoe: a batch of %d tokens is not shuffled, nor are others of more than %d (SEMMOE_SGLANG_TOKENS)",
                           tokens.shape[0], self.comm.max_tokens)
        return fits

    def scatter(self, layer, hidden_states, residual, norm, batch, owner=None):
        """SRS with residual and RMSNorm: normed rows and the new residual of this rank's tokens. `gather` must
        follow; it is recognised by `owner`, by default the new residual."""
        n, world = hidden_states.shape[0], self.comm.world
        permutation, _, offsets = ops.argsort(self._ranks(layer, batch), world, self.comm.id)
        rows = -(-n // world)
        normed, new_residual = ops.shuffled_reduce_scatter_norm(
            hidden_states, residual, norm.weight.detach(), norm.variance_epsilon, permutation, offsets, rows, self.comm.id)
        if n % world:
            # No rank has more rows, but some have fewer: experts then compute zeros, which nothing reads.
            own = torch.arange(rows, device=offsets.device) < offsets[self.comm.rank + 1] - offsets[self.comm.rank]
            normed, new_residual = (torch.where(own[:, None], found, 0.0) for found in (normed, new_residual))
        batch.semmoe_order = Order(new_residual if owner is None else owner, permutation, offsets, batch.num_token_non_padded)
        # SGLang drops the experts of rows from this count on, as padding. After a shuffle they may be real tokens, so
        # padding is computed too; nothing reads its rows.
        batch.num_token_non_padded = None
        return normed, new_residual

    def gather(self, hidden_states, residual, batch):
        """SAG of the layer's output, added to its residual: [n, H] in the order of the tokens, on every rank."""
        order, batch.semmoe_order = batch.semmoe_order, None
        batch.num_token_non_padded = order.real_tokens
        return ops.shuffled_allgather(hidden_states + residual, order.permutation, order.offsets, self.comm.id)

    def _ranks(self, layer, batch):
        """[n] int32: each token's rank, by the tables. Those of all layers are found at the first one of a pass; the same
        batch may pass again, as it does when CUDA graphs are captured."""
        if layer <= getattr(batch, "semmoe_layer", layer):
            batch.semmoe_ranks = self.tables.ranks(batch.input_ids).int()
        batch.semmoe_layer = layer
        return batch.semmoe_ranks[layer]


def plain_rms_norm(norm):
    """Whether SRS computes the same as SGLang's norm: other classes, and these options of RMSNorm, compute something
    else."""
    return (type(norm).__name__ == "RMSNorm" and getattr(norm, "variance_size_override", None) is None
            and not getattr(norm, "x_pad_to_multiple", 0))
