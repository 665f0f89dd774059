"""One rank's end of a group, on tensors."""
import ctypes
import threading
import weakref

import torch

from . import library as abi
from .error import SemmoeError

_DTYPES = {torch.float32: abi.F32, torch.float16: abi.F16, torch.bfloat16: abi.BF16}
_library = None
_lock = threading.Lock()
_communicators = weakref.WeakValueDictionary()


def native():
    """The library, loaded on first use."""
    global _library
    with _lock:
        if _library is None:
            _library = abi.load()
        return _library


def _check(status):
    if status != 0:
        raise SemmoeError(status, native().semmoe_last_error().decode(errors="replace"))


def signal_bytes(kind, world):
    """Bytes of one rank's signals on a kind of device (library.CPU, library.CUDA)."""
    found = ctypes.c_uint64()
    _check(native().semmoe_signal_bytes(kind, world, ctypes.byref(found)))
    return found.value


class SharedMemory:
    """Symmetric buffers and signals of a group on the CPU, for threads, or for processes that torch.multiprocessing starts with it.

    What a Communicator needs of memory: `kind`, `device` (where tensors must be) and `ordinal`; `buffer_bytes` and `signal_bytes` of each
    rank; `buffer_pointers` and `signal_pointers`, by rank, as mapped here; `buffer(rank)`, bytes; `stream()`; `settle()`, which waits for
    all work, `agree(step, error)` and `close()`."""

    kind, device, ordinal = abi.CPU, torch.device("cpu"), 0

    def __init__(self, world, buffer_bytes):
        self.signal_bytes, self.buffer_bytes, self.world = signal_bytes(abi.CPU, world), max(buffer_bytes, 64), world
        self._buffers = [torch.zeros(self.buffer_bytes, dtype=torch.uint8).share_memory_() for _ in range(world)]
        self._signals = [torch.zeros(self.signal_bytes, dtype=torch.uint8).share_memory_() for _ in range(world)]

    @property
    def buffer_pointers(self):
        return [buffer.data_ptr() for buffer in self._buffers]

    @property
    def signal_pointers(self):
        return [signals.data_ptr() for signals in self._signals]

    def buffer(self, rank):
        """A rank's symmetric buffer, bytes."""
        return self._buffers[rank]

    def stream(self):
        return None

    def settle(self):
        """Nothing to wait for: calls return when they are done."""

    def agree(self, step, error=None):
        """Each rank reports its own error only."""
        if error is not None:
            raise error

    def close(self):
        """The memory is freed with its last reference."""


def _leave(memory, handle):
    memory.settle()
    native().semmoe_free(handle)


class Communicator:
    """A rank of a group. `memory` is kept (SharedMemory, or CudaMemory of `cuda_communicator`); `id` names it in operators.

    With CUDA a call launches on PyTorch's current stream and returns: nothing is waited for, and nothing is allocated but the tensors
    that it gives. What goes wrong on the GPU is told by `check()` and by every later call."""

    _next = iter(range(1, 1 << 62))

    def __init__(self, rank, memory, max_tokens=1 << 16, timeout_ms=60_000):
        self.rank, self.world, self.memory, self.device, self.max_tokens = rank, memory.world, memory, memory.device, max_tokens
        self.buffer = memory.buffer(rank) if 0 <= rank < self.world else None
        table = ctypes.c_void_p * self.world
        args = abi.InitArgs(
            struct_bytes=ctypes.sizeof(abi.InitArgs), device=memory.kind, ordinal=memory.ordinal, rank=rank, world=self.world,
            buffer_bytes=memory.buffer_bytes, signal_bytes=memory.signal_bytes, buffers=table(*memory.buffer_pointers),
            signals=table(*memory.signal_pointers), max_tokens=max_tokens, timeout_ms=timeout_ms)
        handle = ctypes.c_void_p()
        _check(native().semmoe_init(ctypes.byref(args), ctypes.byref(handle)))
        self._handle = handle
        self._free = weakref.finalize(self, _leave, memory, handle)
        self.id = next(self._next)
        _communicators[self.id] = self

    @staticmethod
    def find(id_):
        """The communicator that an operator names."""
        found = _communicators.get(id_)
        if found is None:
            raise SemmoeError(1, f"there is no communicator {id_}")
        return found

    def close(self):
        """Leaves the group. On the CPU, ranks that wait for this one fail at once; with CUDA all ranks close together."""
        if self._free.alive:
            self._free()
            self.memory.close()

    def abandon(self):
        """Leaves the group without freeing its memory."""
        self._free()

    def check(self):
        """Raises the error that stopped a kernel (CUDA). Does not wait, so it misses errors of unfinished work."""
        self._alive()
        _check(native().semmoe_check(self._handle))

    def self_check(self):
        """Sends known rows there and back, on all ranks together, and raises if they differ. Waits for the result."""
        n, columns = 2 * self.world + 1, torch.arange(8)
        parts = [((rank + 3 * torch.arange(n)[:, None] + columns) % 5).to(self.device, torch.float32) for rank in range(self.world)]
        destinations = (torch.arange(n, dtype=torch.int32).flip(0) % self.world).to(self.device)
        permutation, _, offsets = self.argsort(destinations)
        first, end = (int(edge) for edge in offsets[self.rank:self.rank + 2])
        rows, _ = self.reduce_scatter(parts[self.rank], permutation, offsets, end - first)
        whole = self.allgather(rows, permutation, offsets)
        total = sum(parts[1:], parts[0])
        mine = (destinations == self.rank).nonzero()[:, 0]
        self.check()
        if not torch.equal(rows, total[mine]) or not torch.equal(whole, total):
            raise SemmoeError(11, f"rank {self.rank} got wrong rows: the kernels do not undo their own shuffle")

    def _alive(self):
        if not self._free.alive:
            raise SemmoeError(1, "the communicator is closed")

    def _call(self, name, **fields):
        self._alive()
        args = abi.OPERATIONS[name](struct_bytes=ctypes.sizeof(abi.OPERATIONS[name]), **fields)
        _check(getattr(native(), name)(self._handle, ctypes.byref(args), self.memory.stream()))

    def symmetric(self, shape, dtype, offset=0):
        """A tensor in this rank's symmetric buffer, which calls take as a part without a copy. All ranks must take the same offset; what
        it holds is lost at the next call that is given another tensor, or that gathers or dispatches."""
        if offset < 0 or offset % abi.ALIGNMENT:
            raise SemmoeError(3, f"the offset is {offset}, expected a multiple of {abi.ALIGNMENT}")
        return self._place(offset, shape, dtype)[0]

    def _part(self, tensor):
        """Where the rows are in the symmetric buffer, into which they are copied if necessary."""
        offset = tensor.data_ptr() - self.buffer.data_ptr()
        if 0 <= offset and offset + tensor.numel() * tensor.itemsize <= self.buffer.numel() and offset % abi.ALIGNMENT == 0:
            return offset
        self._place(0, tensor.shape, tensor.dtype)[0].copy_(tensor)
        return 0

    def _place(self, offset, tensor_shape, dtype):
        """A tensor over this rank's symmetric buffer, and the offset after it."""
        count = 1
        for size in tensor_shape:
            count *= size
        end = offset + count * dtype.itemsize
        if end > self.buffer.numel():
            raise SemmoeError(4, f"the call needs {end} bytes of the symmetric buffer, which has {self.buffer.numel()}")
        view = self.buffer[offset:end].view(dtype).view(tensor_shape)
        return view, -(-end // abi.ALIGNMENT) * abi.ALIGNMENT

    def argsort(self, destinations):
        destinations = self._ids("destinations", destinations, 1)
        n = destinations.numel()
        permutation, inverse = torch.empty_like(destinations), torch.empty_like(destinations)
        offsets = destinations.new_empty(self.world + 1)
        self._call("semmoe_argsort", n=n, destinations=_at(destinations), permutation=_at(permutation), inverse=_at(inverse),
                   offsets=_at(offsets))
        return permutation, inverse, offsets

    def reduce_scatter(self, part, permutation, offsets, rows, residual=None, weight=None, epsilon=0.0):
        part = self._rows("part", part)
        permutation, offsets = self._ids("permutation", permutation, 1), self._ids("offsets", offsets, 1)
        self._shape("permutation", permutation, part.shape[0])
        self._shape("offsets", offsets, self.world + 1)
        out, fields, residual_out = part.new_empty(rows, part.shape[1]), {}, None
        if weight is not None:
            residual, weight = self._rows("residual", residual), self._rows("weight", weight, 1)
            if residual.shape != part.shape or weight.shape != part.shape[1:] or {residual.dtype, weight.dtype} != {part.dtype}:
                raise SemmoeError(1, "residual and weight do not fit the part")
            residual_out = torch.empty_like(out)
            fields = dict(residual=_at(residual), norm_weight=_at(weight), residual_out=_at(residual_out), epsilon=epsilon)
        self._call("semmoe_reduce_scatter", tokens=part.shape[0], hidden=part.shape[1], dtype=_DTYPES[part.dtype],
                   part_offset=self._part(part), permutation=_at(permutation), offsets=_at(offsets), capacity=rows,
                   out=_at(out), **fields)
        return out, residual_out

    def allgather(self, rows, permutation, offsets):
        rows = self._rows("rows", rows)
        permutation, offsets = self._ids("permutation", permutation, 1), self._ids("offsets", offsets, 1)
        self._shape("offsets", offsets, self.world + 1)
        place, _ = self._place(0, (permutation.numel(), rows.shape[1]), rows.dtype)
        self._call("semmoe_allgather", tokens=permutation.numel(), hidden=rows.shape[1], dtype=_DTYPES[rows.dtype], out_offset=0,
                   permutation=_at(permutation), offsets=_at(offsets), capacity=rows.shape[0], rows=_at(rows))
        return place.clone()

    def all_reduce(self, part):
        part = self._rows("part", part)
        offset = self._part(part)
        self._call("semmoe_all_reduce", tokens=part.shape[0], hidden=part.shape[1], dtype=_DTYPES[part.dtype], part_offset=offset,
                   out_offset=offset)
        return self._place(offset, part.shape, part.dtype)[0].clone()

    def dispatch(self, x, experts, weights, rank_of_expert, capacity):
        x, experts = self._rows("x", x), self._ids("experts", experts, 2)
        rank_of_expert, weights = self._ids("rank_of_expert", rank_of_expert, 1), weights.contiguous()
        if weights.device != self.device or weights.dtype != torch.float32 or weights.shape != experts.shape or experts.shape[0] != x.shape[0]:
            raise SemmoeError(1, f"x, experts and weights (float32 on {self.device}) do not have the same tokens")
        top_k = experts.shape[1]
        rows, tokens_at = self._place(0, (capacity, x.shape[1]), x.dtype)
        tokens, experts_at = self._place(tokens_at, (capacity,), torch.int32)
        got, weights_at = self._place(experts_at, (capacity, top_k), torch.int32)
        got_weights, _ = self._place(weights_at, (capacity, top_k), torch.float32)
        offsets, sent = experts.new_empty(self.world + 1), experts.new_empty(x.shape[0], self.world)
        self._call("semmoe_dispatch", tokens=x.shape[0], hidden=x.shape[1], dtype=_DTYPES[x.dtype], top_k=top_k,
                   experts_total=rank_of_expert.numel(), capacity=capacity, rank_of_expert=_at(rank_of_expert), x=_at(x),
                   experts=_at(experts), weights=_at(weights), rows_offset=0, tokens_offset=tokens_at, experts_offset=experts_at,
                   weights_offset=weights_at, source_offsets=_at(offsets), sent_rows=_at(sent))
        return rows.clone(), tokens.clone(), got.clone(), got_weights.clone(), offsets, sent

    def combine(self, sums, sent_rows):
        sums, sent_rows = self._rows("sums", sums), self._ids("sent_rows", sent_rows, 2)
        self._shape("sent_rows", sent_rows[:1].reshape(-1), self.world if sent_rows.shape[0] else 0)
        out = sums.new_empty(sent_rows.shape[0], sums.shape[1])
        self._call("semmoe_combine", tokens=sent_rows.shape[0], hidden=sums.shape[1], dtype=_DTYPES[sums.dtype],
                   capacity=sums.shape[0], sums_offset=self._part(sums), sent_rows=_at(sent_rows), out=_at(out))
        return out

    @staticmethod
    def _shape(what, tensor, expected):
        if tensor.numel() != expected:
            raise SemmoeError(1, f"{what}: {tensor.numel()} elements, expected {expected}")

    def _rows(self, what, tensor, dims=2):
        if tensor.device != self.device or tensor.dim() != dims or tensor.dtype not in _DTYPES:
            raise SemmoeError(1, f"{what} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, expected a "
                                 f"{'matrix' if dims == 2 else 'row'} of float32, float16 or bfloat16 on {self.device}")
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % abi.ALIGNMENT == 0 else tensor.clone()

    def _ids(self, what, tensor, dims):
        if tensor.device != self.device or tensor.dim() != dims or tensor.dtype != torch.int32:
            raise SemmoeError(1, f"{what} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                                 f"expected int32 on {self.device}")
        return tensor.contiguous()


def _at(tensor):
    return tensor.data_ptr() or None
