//! The exact steps of one clustering (units to groups, and experts to groups), and the limits on both.

pub(crate) mod clustering;
pub(crate) mod division;
pub(crate) mod expert_step;
pub(crate) mod gating;
pub(crate) mod held;
pub(crate) mod load_limit;
pub(crate) mod placement;
pub(crate) mod replica_step;
pub(crate) mod swaps;
pub(crate) mod topology;
pub(crate) mod transport;
pub(crate) mod unit_step;
pub(crate) mod whole;

pub(crate) use clustering::{Clustering, FREE, Limits, SequencePrice, Task, local_rate};
pub(crate) use division::{Division, MAX_RANKS, Requests};
pub(crate) use expert_step::{column_gains, expert_step, layer_cap, load_cap, load_floor};
pub(crate) use held::{Exchange, Held, Traffic};
pub(crate) use load_limit::{excess, group_loads};
pub(crate) use placement::CurrentPlacement;
pub(crate) use replica_step::{ReplicaLayer, replicate_within};
pub(crate) use swaps::{Loaded, MIN_GAIN, Search, exchange, keeps_cap, swap_pass};
pub(crate) use topology::{Topology, check_nodes};
pub(crate) use transport::{Plan, Stop, Transport, assign_evenly, best_group};
pub(crate) use unit_step::{
    PROFIT_ONE, charge_sequences, mass_capacity, profits_of_local, to_profit, unit_step, weighed_profits,
};
pub(crate) use whole::{MAX_ROUNDS, whole};
