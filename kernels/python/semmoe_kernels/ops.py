"""Operators `semmoe::*` for torch.compile: `comm` is a Communicator's id. Shapes follow from the arguments alone.

Collectives have an effect on other ranks, so that none may be left out, doubled or moved past another: each takes and gives
tensors that depend on what came before, and the graphs of all ranks are the same."""
import functools
from typing import Tuple

import torch
from torch import Tensor
from torch.library import custom_op

from .comm import Communicator
from .error import SemmoeError

# One implementation for both devices: the communicator knows its device and refuses tensors of another.
_operator = functools.partial(custom_op, mutates_args=(), device_types=("cpu", "cuda"))


def _find(comm, world):
    found = Communicator.find(comm)
    if found.world != world:
        raise SemmoeError(1, f"world is {world}, the communicator has {found.world} ranks")
    return found


@_operator("semmoe::argsort")
def argsort(destinations: Tensor, world: int, comm: int) -> Tuple[Tensor, Tensor, Tensor]:
    """int32 [n] to permutation [n], inverse [n], offsets [world + 1]."""
    return _find(comm, world).argsort(destinations)


@argsort.register_fake
def _(destinations, world, comm):
    return torch.empty_like(destinations), torch.empty_like(destinations), destinations.new_empty(world + 1)


@_operator("semmoe::shuffled_reduce_scatter")
def shuffled_reduce_scatter(part: Tensor, permutation: Tensor, offsets: Tensor, rows: int, comm: int) -> Tensor:
    """[n, H] of every rank to this rank's [rows, H]."""
    return Communicator.find(comm).reduce_scatter(part, permutation, offsets, rows)[0]


@shuffled_reduce_scatter.register_fake
def _(part, permutation, offsets, rows, comm):
    return part.new_empty(rows, part.shape[1])


@_operator("semmoe::shuffled_reduce_scatter_norm")
def shuffled_reduce_scatter_norm(
    part: Tensor, residual: Tensor, weight: Tensor, epsilon: float, permutation: Tensor, offsets: Tensor, rows: int, comm: int
) -> Tuple[Tensor, Tensor]:
    """The same with residual [n, H] added and normed: normed rows and the new residual, each [rows, H]."""
    return Communicator.find(comm).reduce_scatter(part, permutation, offsets, rows, residual, weight, epsilon)


@shuffled_reduce_scatter_norm.register_fake
def _(part, residual, weight, epsilon, permutation, offsets, rows, comm):
    return part.new_empty(rows, part.shape[1]), part.new_empty(rows, part.shape[1])


@_operator("semmoe::shuffled_allgather")
def shuffled_allgather(rows: Tensor, permutation: Tensor, offsets: Tensor, comm: int) -> Tensor:
    """This rank's [rows, H] to [n, H] in the order of the tokens, on every rank."""
    return Communicator.find(comm).allgather(rows, permutation, offsets)


@shuffled_allgather.register_fake
def _(rows, permutation, offsets, comm):
    return rows.new_empty(permutation.shape[0], rows.shape[1])


@_operator("semmoe::all_reduce")
def all_reduce(part: Tensor, comm: int) -> Tensor:
    """[n, H] of every rank to their sum, on every rank."""
    return Communicator.find(comm).all_reduce(part)


@all_reduce.register_fake
def _(part, comm):
    return part.new_empty(part.shape)


@_operator("semmoe::dispatch")
def dispatch(
    x: Tensor, experts: Tensor, weights: Tensor, rank_of_expert: Tensor, capacity: int, world: int, comm: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Received rows [capacity, H], tokens [capacity], experts and weights [capacity, k], offsets by source [world + 1], and
    sent_rows [n, world] for combine. What lies past the last received row is unspecified."""
    return _find(comm, world).dispatch(x, experts, weights, rank_of_expert, capacity)


@dispatch.register_fake
def _(x, experts, weights, rank_of_expert, capacity, world, comm):
    top_k = experts.shape[1]
    return (x.new_empty(capacity, x.shape[1]), experts.new_empty(capacity), experts.new_empty(capacity, top_k),
            weights.new_empty(capacity, top_k), experts.new_empty(world + 1), experts.new_empty(x.shape[0], world))


@_operator("semmoe::combine")
def combine(sums: Tensor, sent_rows: Tensor, comm: int) -> Tensor:
    """Sums [capacity, H] of every rank to this rank's [n, H]."""
    return Communicator.find(comm).combine(sums, sent_rows)


@combine.register_fake
def _(sums, sent_rows, comm):
    return sums.new_empty(sent_rows.shape[0], sums.shape[1])
