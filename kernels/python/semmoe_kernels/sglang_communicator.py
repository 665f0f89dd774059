"""The hooks of SGLang 0.5.16, where LayerCommunicator moves tokens between layers.

0.5.17 to 0.5.20 have that class too, but were neither compared nor run, so they are refused."""
from .sglang_join import PARALLEL, SETTINGS, Layout
from .sglang_shuffle import Shuffle

VERSIONS = ("0.5.16",)
_COMMUNICATOR = "sglang.srt.layers.communicator"
_RUNNER = "sglang.srt.model_executor.model_runner"


def hooked(version):
    """The hooked functions of a version: module, function or method, and the parameters that the hook relies on; by hook."""
    return {
        "init_new": (_COMMUNICATOR, "LayerScatterModes.init_new", ["kwargs"]),
        "output_mode": (_COMMUNICATOR, "LayerScatterModes._compute_layer_output_mode", ["context"]),
        "prepare_mlp": (_COMMUNICATOR, "LayerCommunicator.prepare_mlp", ["self", "hidden_states", "residual", "forward_batch", "cache"]),
        "postprocess_layer": (_COMMUNICATOR, "LayerCommunicator.postprocess_layer", ["self", "hidden_states", "residual", "forward_batch"]),
        "join": (_RUNNER, "ModelRunner.init_torch_distributed", ["self"]),
    }


class Plugin(Shuffle):
    def __init__(self, path, version, group_of):
        from sglang.srt.layers.communicator import ScatterMode

        super().__init__(path, group_of)
        self.modes = ScatterMode

    def layout(self, runner):
        return Layout.read(runner.attention_tp_group, [(runner.ps, PARALLEL), (runner.server_args, SETTINGS)])

    def init_new(self, original, cls, **kwargs):
        """Keeps the layer's number, which LayerCommunicator does not get."""
        modes = original(cls, **kwargs)
        modes.semmoe_layer = kwargs["layer_id"]
        return modes

    def output_mode(self, original, cls, context):
        """Layers return all tokens on all ranks, so that the next one can shuffle them again."""
        mode = original(cls, context)
        return self.modes.TP_ATTN_FULL if self.comm is not None and mode == self.modes.SCATTERED else mode

    def prepare_mlp(self, original, communicator, hidden_states, residual, forward_batch, cache=None):
        """SRS with residual and RMSNorm instead of reduce-scatter and norm, if the tables have the layer."""
        if self.comm is None:
            return original(communicator, hidden_states, residual, forward_batch, cache)
        layer = self.moe_layer.get(getattr(communicator.layer_scatter_modes, "semmoe_layer", None))
        forward_batch.semmoe_order = None
        norm = communicator.post_attention_layernorm
        if layer is None or not self._scatters(communicator) or not self.fits(hidden_states, residual, norm, forward_batch):
            return original(communicator, hidden_states, residual, forward_batch, cache)
        return self.scatter(layer, hidden_states, residual, norm, forward_batch, owner=communicator)

    def postprocess_layer(self, original, communicator, hidden_states, residual, forward_batch):
        """SAG instead of allgather, if the layer's tokens were shuffled."""
        order = getattr(forward_batch, "semmoe_order", None)
        if order is None or order.owner is not communicator:
            return original(communicator, hidden_states, residual, forward_batch)
        return self.gather(hidden_states, residual, forward_batch), None

    def _scatters(self, communicator):
        modes = communicator.layer_scatter_modes
        return (modes.mlp_mode == self.modes.SCATTERED and modes.layer_input_mode == modes.layer_output_mode == self.modes.TP_ATTN_FULL
                and communicator._context.attn_tp_size == self.comm.world)
