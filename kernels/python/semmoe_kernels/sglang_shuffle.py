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

    # By this object the layer's exit is recognised.
    owner: object
    permutation: torch.Tensor
    offsets: torch.Tensor
    # The batch's `num_token_non_padded`, which is wrong for shuffled rows and is put back afterwards.
    real_tokens: object


class Shuffle:
    """One process. Everything passes through unchanged until `join` has made a communicator of the attention-TP
    group, which all of its ranks do or none; SGLang builds its layers after that."""

    def __init__(self, path, group_of=GpuGroup):
        self.path, self.group_of = path, group_of
        self.comm = self.tables = None
        self.too_large = False

    def layout(self, runner):
        """The sglang_join.Layout that SGLang runs with."""
        raise NotImplementedError

    def use(self, tables, comm):
        """From now on layers are shuffled."""
        self.moe_layer = {layer: index for index, layer in enumerate(tables.layer_ids)}
        self.tables, self.comm = tables, comm

    def join(self, original, runner):
        """Around ModelRunner.init_torch_distributed, where SGLang's groups exist for the first time."""
        answer = original(runner)
        if self.comm is not None or getattr(runner, "is_draft_worker", False):
            return answer
        try:
            layout = self.layout(runner)
            tables, comm = join_group(runner, layout, self.path, self.group_of(runner, layout))
        except Exception as error:
            # All ranks of the group come here, with the same sentence or one of their own.
            logger.error("semmoe: the plug-in stays off: %s", error)
            return answer
        self.use(tables, comm)
        logger.info("semmoe: on, for layers %s over %d ranks, up to %d tokens a batch", tables.layer_ids, comm.world, comm.max_tokens)
        return answer

    def fits(self, hidden_states, residual, norm, batch):
        """Whether these tokens can be shuffled. The same on all ranks, as it depends on shapes and settings only."""
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
        ranks = self._ranks(layer, batch)
        permutation, _, offsets = ops.argsort(ranks.int(), self.comm.world, self.comm.id)
        normed, new_residual = ops.shuffled_reduce_scatter_norm(
            hidden_states, residual, norm.weight.detach(), norm.variance_epsilon, permutation, offsets,
            even_rows(ranks.shape[0], self.comm.world)[self.comm.rank], self.comm.id)
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
        """[n]: each token's rank, by the tables and as far as ranks have room."""
        before = getattr(batch, "semmoe_groups", {})
        groups, shares = self.tables.likeliest(layer, batch.input_ids, before.get(layer - 2), before.get(layer - 1))
        batch.semmoe_groups = {layer - 1: before.get(layer - 1), layer: groups}
        return evened(groups, shares, self.comm.world)


def plain_rms_norm(norm):
    """Whether SRS computes the same as SGLang's norm: other classes, and these options of RMSNorm, compute something
    else."""
    return (type(norm).__name__ == "RMSNorm" and getattr(norm, "variance_size_override", None) is None
            and not getattr(norm, "x_pad_to_multiple", 0))


def even_rows(tokens, world):
    """Rows of each rank where parts are even: the first n mod P ranks have one more."""
    return [tokens // world + (rank < tokens % world) for rank in range(world)]


def evened(groups, shares, world):
    """[n] int64: each token's group, or, for tokens without one (-1) and for those that come when it is full, the
    first rank that still has room, so that rank r gets `even_rows(n, world)[r]` tokens. The greatest of `shares` [n]
    come first, of equals the first token. Waits for nothing."""
    order = shares.argsort(descending=True, stable=True)
    return torch.empty_like(groups).scatter_(0, order, _evened_in_turn(groups[order], world))


def _evened_in_turn(groups, world):
    ranks = torch.arange(world, device=groups.device)
    # As even_rows, without a copy from the host.
    room = groups.shape[0] // world + (ranks < groups.shape[0] % world).long()
    asked = groups[:, None] == ranks
    place = asked.cumsum(0).gather(1, groups.clamp(min=0)[:, None])[:, 0]
    placed = (groups >= 0) & (place <= room[groups.clamp(min=0)])
    left = room - (asked & placed[:, None]).sum(0)
    # The i-th token without a place gets the i-th free one.
    index = (~placed).cumsum(0) - 1
    free = torch.searchsorted(left.cumsum(0), index, right=True).clamp(max=world - 1)
    return torch.where(placed, groups, free)
