//! The configurations compared: for each kind of attention, a baseline and semmoe.

use serde::Serialize;

use crate::prepare::Attention;

/// One way to run the ranks and to route requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Config {
    /// Name in tables and figures.
    pub(crate) name: &'static str,
    /// Solved tables; without them experts are placed in order.
    pub(crate) solved: bool,
    /// The gateway's policy.
    pub(crate) policy: &'static str,
    /// Further arguments of `semmoe worker`.
    #[serde(skip)]
    pub(crate) arguments: &'static [&'static str],
}

/// Two configurations whose measurements alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Contest {
    pub(crate) attention: Attention,
    pub(crate) before: Config,
    pub(crate) after: Config,
}

/// Attention dp: the gateway routes requests.
pub(crate) const DP: Contest = Contest {
    attention: Attention::Dp,
    before: Config { name: "dp, contiguous, round robin", solved: false, policy: "round_robin", arguments: &[] },
    after: Config { name: "dp, E, affinity", solved: true, policy: "affinity", arguments: &[] },
};

/// Attention tp: the unit routes tokens, layer by layer.
pub(crate) const TP: Contest = Contest {
    attention: Attention::Tp,
    before: Config {
        name: "tp, contiguous, no shuffle",
        solved: false,
        policy: "round_robin",
        arguments: &["--attention", "tp", "--shuffle", "off"],
    },
    after: Config {
        name: "tp, E, SRS and SAG",
        solved: true,
        policy: "round_robin",
        arguments: &["--attention", "tp"],
    },
};

/// Experts as MoETuner places them, for each kind of attention; everything else is as before.
pub(crate) const MOETUNER: [Config; 2] = [
    Config { name: "dp, MoETuner, round robin", solved: true, ..DP.before },
    Config { name: "tp, MoETuner, no shuffle", solved: true, ..TP.before },
];

impl Contest {
    pub(crate) fn configs(&self) -> [Config; 2] {
        [self.before, self.after]
    }
}
