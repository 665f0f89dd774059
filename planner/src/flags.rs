//! Launch arguments for running a layout in SGLang and vLLM.

use serde::Serialize;

use crate::layout::Layout;

/// The launch command for one unit, or the reason why the engine cannot run the layout.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Launch {
    /// Command to run once per host; with several hosts, fill in `RANK` and `HOST:PORT`.
    Command(String),
    /// One sentence.
    Impossible(String),
}

/// Placeholder for the checkpoint path.
const MODEL: &str = "MODEL";

/// Appends a degree of parallelism, unless it is 1, every engine's default.
fn add(command: &mut String, name: &str, value: u64) {
    if value > 1 {
        command.push_str(&format!(" {name} {value}"));
    }
}

/// Returns the command for SGLang 0.5.22 or later; `host_gpus` is the number of GPUs per host.
///
/// SGLang's `--tp-size` counts all GPUs in a stage: dividing it by `--attn-dp-size` gives attention TP, and dividing it
/// by `--ep-size` gives expert TP.
pub fn sglang(layout: &Layout, host_gpus: u64) -> Launch {
    let mut command = format!("python -m sglang.launch_server --model-path {MODEL} --tp-size {}", layout.stage());
    let mut add = |name, value| add(&mut command, name, value);
    add("--attn-dp-size", layout.attention_dp);
    add("--ep-size", layout.expert_ep);
    add("--pp-size", layout.pipeline);
    let hosts = layout.gpus().div_ceil(host_gpus.max(1));
    add("--nnodes", hosts);
    if hosts > 1 {
        command.push_str(" --node-rank RANK --dist-init-addr HOST:PORT");
    }
    if layout.expert_tp == 1 && layout.attention_dp > 1 {
        command.push_str(" --moe-a2a-backend deepep");
    }
    Launch::Command(command)
}

/// Returns the command for vLLM, which distributes whole experts over all GPUs in a stage with
/// `--enable-expert-parallel`, and otherwise slices every expert over all of them.
pub fn vllm(layout: &Layout, host_gpus: u64) -> Launch {
    if layout.expert_tp > 1 && layout.expert_ep > 1 {
        let (tp, ep) = (layout.expert_tp, layout.expert_ep);
        return Launch::Impossible(format!("vLLM supports either whole or sliced experts, not expert TP{tp}+EP{ep}"));
    }
    let mut command = format!("vllm serve {MODEL} --tensor-parallel-size {}", layout.attention_tp);
    let mut add = |name, value| add(&mut command, name, value);
    add("--data-parallel-size", layout.attention_dp);
    add("--pipeline-parallel-size", layout.pipeline);
    let hosts = layout.gpus().div_ceil(host_gpus.max(1));
    if hosts > 1 && layout.attention_dp >= hosts {
        add("--data-parallel-size-local", layout.attention_dp / hosts);
        command.push_str(" --data-parallel-address HOST --data-parallel-start-rank RANK");
    } else if hosts > 1 {
        command.push_str(" --distributed-executor-backend ray");
    }
    if layout.expert_ep > 1 {
        command.push_str(" --enable-expert-parallel");
    }
    Launch::Command(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixtures::layout;

    #[test]
    fn layouts_are_the_engines_arguments() {
        let of = |launch| match launch {
            Launch::Command(text) | Launch::Impossible(text) => text,
        };
        let whole = layout(1, [4, 4], [1, 16]);
        assert_eq!(
            of(sglang(&whole, 8)),
            "python -m sglang.launch_server --model-path MODEL --tp-size 16 --attn-dp-size 4 --ep-size 16 --nnodes 2 \
             --node-rank RANK --dist-init-addr HOST:PORT --moe-a2a-backend deepep"
        );
        assert_eq!(
            of(vllm(&whole, 8)),
            "vllm serve MODEL --tensor-parallel-size 4 --data-parallel-size 4 --data-parallel-size-local 2 \
             --data-parallel-address HOST --data-parallel-start-rank RANK --enable-expert-parallel"
        );
        let slices = layout(1, [8, 1], [8, 1]);
        assert_eq!(of(sglang(&slices, 8)), "python -m sglang.launch_server --model-path MODEL --tp-size 8");
        assert_eq!(of(vllm(&slices, 8)), "vllm serve MODEL --tensor-parallel-size 8");
        assert!(matches!(vllm(&layout(1, [8, 2], [8, 2]), 8), Launch::Impossible(_)));
    }
}
