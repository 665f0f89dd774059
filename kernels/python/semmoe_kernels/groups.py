"""The group to put each token on, by the tables of `semmoe solve --attention tp` (tables/README.md), on whole batches."""
import functools
import json

import torch

_UNUSED = 65535
_LEAST_SHARE = 2.0 ** -14


class Groups:
    """T_group, T_prob, A_group and A_prob of a tables file, on a device."""

    def __init__(self, path, device="cpu"):
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("attention") != "tp":
                raise ValueError(f"{path} is for attention {metadata.get('attention')}, expected tp")
            self.groups = int(metadata["groups"])
            self.layer_ids = json.loads(metadata["layer_ids"])
            tensors = {name: file.get_tensor(name) for name in ("T_group", "T_prob", "A_group", "A_prob") if name in file.keys()}
        self.token_group, self.token_share = self._labels(path, tensors, "T", device)
        self.next_group, self.next_share = self._labels(path, tensors, "A", device)

    def _labels(self, path, tensors, table, device):
        group, share = tensors[f"{table}_group"].to(torch.int64), tensors[f"{table}_prob"]
        if len(group) != len(self.layer_ids) or group.shape != share.shape:
            raise ValueError(f"{path}: {table} has shapes {tuple(group.shape)} and {tuple(share.shape)}, {len(self.layer_ids)} layers")
        used = group != _UNUSED
        if bool(((group >= self.groups) & used).any()):
            raise ValueError(f"{path}: {table} has a group that is not below {self.groups}")
        return torch.where(used, group, -1).to(device), share.to(device)

    def ranks(self, tokens):
        """[L, n] int64: the group of each token in every layer, no group with more than ceil(n / G) of them. A is asked with
        the likeliest groups of the two layers before."""
        before, expected = (None, None), []
        for layer in range(len(self.layer_ids)):
            expected.append(self._expected(layer, tokens, *before))
            before = before[1], expected[-1][0]
        groups, products, both = (torch.stack(parts) for parts in zip(*expected))
        # Group by group, as in the crate: bitwise equal results.
        sums = functools.reduce(torch.add, products.unbind(2))
        return even_groups(groups, products / torch.where(both, sums, 1.0)[..., None])

    def _expected(self, layer, tokens, older=None, newer=None):
        """As `group_shares` of the crate semmoe-tables: [n] int64, the likeliest group of each token in the layer (an index
        into the MoE layers) given the groups in the two layers before (each [n], -1 = not known), or -1 where the tables say
        nothing; [n, G] float64, what is expected on each group; and [n], whether T and A both say something, so that this
        must be divided by its sum."""
        known = (tokens >= 0) & (tokens < self.token_group.shape[1])
        row = torch.where(known, tokens, 0)
        labels = [self._pick(self.token_group[layer][row], self.token_share[layer][row], known)]
        if older is not None and newer is not None and layer >= 2:
            known = (older >= 0) & (newer >= 0)
            at = torch.where(known, older, 0), torch.where(known, newer, 0)
            labels.append(self._pick(self.next_group[layer][at], self.next_share[layer][at], known))
        shares = functools.reduce(torch.mul, (self._shares(*of) for of in labels))
        # The order of labels breaks ties.
        candidates = torch.cat([groups for groups, _ in labels], dim=1)
        scores = torch.where(candidates >= 0, shares.gather(1, candidates.clamp(min=0)), -1.0)
        group = candidates.gather(1, scores.argmax(1, keepdim=True))[:, 0]
        both = (labels[0][0] >= 0).any(1) & (labels[-1][0] >= 0).any(1) & (len(labels) > 1)
        return group, shares, both

    @staticmethod
    def _pick(groups, shares, known):
        return torch.where(known[:, None], groups, -1), shares.double()

    def _shares(self, groups, shares):
        """[n, G]: the share of each group by m labels, or what the labels leave for those without one; 1 without labels."""
        used = groups >= 0
        count = used.sum(1)
        last = shares.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        left = (1.0 - torch.where(used, shares, 0.0).sum(1)) / (self.groups - count).clamp(min=1)
        rest = torch.where(count > 0, torch.minimum(left, last).clamp(min=_LEAST_SHARE), 1.0)
        match = groups[:, :, None] == torch.arange(self.groups, device=groups.device)
        own = torch.where(match, shares[:, :, None].clamp(min=_LEAST_SHARE), 0.0).sum(1)
        return torch.where(match.any(1), own, rest[:, None])


def even_groups(likeliest, shares):
    """[L, n] int64: the group of each of n tokens in each of L steps, as `EvenGroups` of the crate semmoe-tables, from its
    likeliest group ([L, n], -1 = nothing is known of it) and the shares expected on all groups ([L, n, G]). Waits for
    nothing, and does all steps together."""
    steps, n, world = shares.shape
    most, ids = -(-n // world), torch.arange(world, device=shares.device)
    placed = likeliest.clone()
    # Rows move in order of loss. A loss changes only when a group becomes full, which ends a round; one group never does.
    for _ in range(world - 1):
        counts = (placed[..., None] == ids).sum(1)
        open_, row = counts < most, placed.clamp(min=0)
        leaves = (placed >= 0) & (counts > most).gather(1, row)
        best, to = torch.where(open_[:, None], shares, -1.0).max(2)
        loss = torch.where(leaves, (shares.gather(2, row[..., None])[..., 0] - best).clamp(min=0), torch.inf)
        # Among equal losses the last row moves.
        order = n - 1 - loss.flip(1).argsort(dim=1, stable=True)
        leaves, from_, to = leaves.gather(1, order), placed.gather(1, order), to.gather(1, order)
        turn = (leaves[..., None] & (from_[..., None] == ids)).cumsum(1).gather(2, from_.clamp(min=0)[..., None])[..., 0]
        leaves &= turn <= (counts - most).gather(1, from_.clamp(min=0))
        arrived = (leaves[..., None] & (to[..., None] == ids)).cumsum(1)
        full = (open_[:, None] & (arrived >= (most - counts)[:, None])).any(2)
        moves = leaves & ~torch.cat([torch.zeros_like(full[:, :1]), full[:, :-1]], dim=1)
        placed.scatter_(1, order, torch.where(moves, to, from_))
    # Rows without evidence go where the fewest are: into the free places, level by level.
    counts = (placed[..., None] == ids).sum(1)
    free = (torch.arange(most, device=shares.device)[:, None] >= counts[:, None]).flatten(1).cumsum(1)
    unknown = placed < 0
    return torch.where(unknown, torch.searchsorted(free, unknown.cumsum(1)) % world, placed)
