"""The group to put each token on, by the tables of `semmoe solve --attention tp` (tables/README.md), on whole batches."""
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

    def likeliest(self, layer, tokens, older=None, newer=None):
        """[n] int64 and [n] float64: the likeliest group of each token in the layer (an index into the MoE layers) and the share expected
        there, given the groups in the two layers before (each [n], -1 = not known); -1 and 0 where the tables say nothing. As
        `likeliest_group` of the crate semmoe-tables."""
        known = (tokens >= 0) & (tokens < self.token_group.shape[1])
        row = torch.where(known, tokens, 0)
        first = self._pick(self.token_group[layer][row], self.token_share[layer][row], known)
        if older is None or newer is None or layer < 2:
            return self._first(first)
        both = (older >= 0) & (newer >= 0)
        at = torch.where(both, older, 0), torch.where(both, newer, 0)
        second = self._pick(self.next_group[layer][at], self.next_share[layer][at], both)
        # The first's labels, then those of the second that are new.
        candidates = torch.cat([first[0], second[0]], dim=1)
        rests = self._rest(first) * self._rest(second)
        scores = self._share(first, candidates) * self._share(second, candidates)
        repeated = (second[0][:, :, None] == first[0][:, None, :]).any(2)
        labelled = torch.cat([first[0] >= 0, (second[0] >= 0) & ~repeated], dim=1)
        at = torch.where(labelled, scores, -1.0).argmax(1, keepdim=True)
        group, share = candidates.gather(1, at)[:, 0], scores.gather(1, at)[:, 0]
        share = share / (torch.where(labelled, scores, 0.0).sum(1) + (self.groups - labelled.sum(1)) * rests)
        has = [(labels >= 0).any(1) for labels, _ in (first, second)]
        (group_a, share_a), (group_b, share_b) = self._first(first), self._first(second)
        one = torch.where(has[0], group_a, group_b), torch.where(has[0], share_a, share_b)
        both = has[0] & has[1]
        return torch.where(both, group, one[0]), torch.where(both, share, one[1])

    @staticmethod
    def _first(labels):
        groups, shares = labels
        return groups[:, 0], torch.where(groups[:, 0] >= 0, shares[:, 0], 0.0)

    @staticmethod
    def _pick(groups, shares, known):
        return torch.where(known[:, None], groups, -1), shares.double()

    def _rest(self, labels):
        """[n]: the share of each group that has none of m labels."""
        groups, shares = labels
        used = groups >= 0
        count = used.sum(1)
        last = torch.where(count > 0, shares.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], 1.0)
        left = (1.0 - torch.where(used, shares, 0.0).sum(1)) / (self.groups - count).clamp(min=1)
        return torch.minimum(left, last).clamp(min=_LEAST_SHARE)

    def _share(self, labels, candidates):
        """[n, c]: the share of each candidate by m labels, or what the labels leave for those without one."""
        groups, shares = labels
        used = groups >= 0
        match = (candidates[:, :, None] == groups[:, None, :]) & used[:, None, :]
        own = torch.where(match, shares[:, None, :].clamp(min=_LEAST_SHARE), 0.0).sum(2)
        return torch.where(match.any(2), own, self._rest(labels)[:, None])
