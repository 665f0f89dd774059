"""Short messages between ranks during startup, through a torch.distributed store or group. Every wait is bounded."""
import datetime
import json

import torch

from .error import DISAGREE, PEER_FAILED, TIMED_OUT, SemmoeError

# Maximum length of a rank's message.
MOST_BYTES = 2048


class Exchange:
    """Messages of all ranks to all ranks, in the same steps on every rank. `rank` and `world` are this rank and their number."""

    def __init__(self, rank, world):
        if not 0 <= rank < world:
            raise SemmoeError(2, f"rank is {rank}, expected below {world}")
        self.rank, self.world = rank, world

    def all(self, step, message):
        """One dict of each rank, in rank order; `message` is this rank's. The replies are checked to be dicts; their contents are not."""
        raw = json.dumps(message).encode()
        if len(raw) > MOST_BYTES:
            raise SemmoeError(1, f"a message of {len(raw)} bytes, expected at most {MOST_BYTES}")
        return [self._read(rank, answer) for rank, answer in enumerate(self._gather(step, raw))]

    def agree(self, step, error=None, same=None, own=None):
        """All ranks go on together, or none does: raises on every rank if any tells an error, or if what must be the `same` differs.
        The error names the first such rank. Gives each rank's message, with what each has for its `own`."""
        same = same or {}
        answers = self.all(step, {**(own or {}), **same, "error": None if error is None else str(error)[:512]})
        for rank, answer in enumerate(answers):
            if answer.get("error") is not None:
                mine = rank == self.rank and isinstance(error, SemmoeError)
                raise SemmoeError(error.status if mine else PEER_FAILED, f"rank {rank}: {answer['error']}")
        for name, value in same.items():
            for rank, answer in enumerate(answers):
                if answer.get(name) != value:
                    raise SemmoeError(DISAGREE, f"rank {rank} has {name} {answer.get(name)}, rank {self.rank} has {value}")
        return answers

    @staticmethod
    def _read(rank, raw):
        try:
            message = json.loads(raw[:MOST_BYTES])
        except ValueError as error:
            raise SemmoeError(PEER_FAILED, f"rank {rank} sent an invalid message: {error}") from None
        if not isinstance(message, dict):
            raise SemmoeError(PEER_FAILED, f"rank {rank} sent an invalid message")
        return message

    def _gather(self, step, raw):
        raise NotImplementedError


class StoreExchange(Exchange):
    """Through a store (torch.distributed.TCPStore, FileStore, HashStore): `name` is one that all ranks of the group give, and no other
    group of the store. A rank that is not there within `timeout_s` is an error that names it."""

    def __init__(self, store, rank, world, name="semmoe", timeout_s=60.0):
        super().__init__(rank, world)
        self.store, self.timeout = store, datetime.timedelta(seconds=timeout_s)
        # The name may be reused by the next communicator of these ranks.
        self.prefix = f"{name}/{store.add(f'{name}/joined/{rank}', 1)}"

    def _gather(self, step, raw):
        self.store.set(f"{self.prefix}/{step}/{self.rank}", raw)
        answers = []
        for rank in range(self.world):
            key = f"{self.prefix}/{step}/{rank}"
            try:
                self.store.wait([key], self.timeout)
            except RuntimeError:
                seconds = self.timeout.total_seconds()
                raise SemmoeError(TIMED_OUT, f"rank {rank} did not reach step {step!r} within {seconds:g} s") from None
            answers.append(bytes(self.store.get(key)))
        return answers


class GroupExchange(Exchange):
    """Through a process group of torch.distributed, one that takes CPU tensors (gloo) or one of GPUs (nccl); its own timeout holds."""

    def __init__(self, group=None):
        import torch.distributed as distributed

        super().__init__(distributed.get_rank(group), distributed.get_world_size(group))
        self.group = group
        on_gpu = distributed.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _gather(self, step, raw):
        import torch.distributed as distributed

        mine = torch.zeros(MOST_BYTES, dtype=torch.uint8)
        # Steps are compared too: ranks in different steps have made different calls.
        whole = json.dumps({"step": step, "raw": raw.decode()}).encode()
        if len(whole) > MOST_BYTES:
            raise SemmoeError(1, f"a message of {len(whole)} bytes, expected at most {MOST_BYTES}")
        mine[:len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        answers = [torch.empty(MOST_BYTES, dtype=torch.uint8, device=self.device) for _ in range(self.world)]
        try:
            distributed.all_gather(answers, mine.to(self.device), group=self.group)
        except RuntimeError as error:
            raise SemmoeError(PEER_FAILED, f"step {step!r} did not reach all ranks: {str(error).splitlines()[0]}") from None
        return [self._of_step(step, rank, bytes(answer.cpu().tolist())) for rank, answer in enumerate(answers)]

    def _of_step(self, step, rank, raw):
        envelope = self._read(rank, raw.rstrip(b"\0"))
        if envelope.get("step") != step or not isinstance(envelope.get("raw"), str):
            raise SemmoeError(DISAGREE, f"rank {rank} is in step {envelope.get('step')!r}, rank {self.rank} in {step!r}")
        return envelope["raw"].encode()
