//! Initial clusterings, single starts, and many starts run on threads.

pub(crate) mod alternate;
pub(crate) mod replicate;
pub(crate) mod seeds;
pub(crate) mod sequences;
pub(crate) mod spectral;
pub(crate) mod starts;

pub(crate) use alternate::stay;
pub(crate) use replicate::{clustering, clustering_profits, replica_loads, replica_profits};
pub(crate) use seeds::for_each_centre;
pub(crate) use sequences::with_prices;
pub(crate) use starts::{Best, Progress, SolveProgress, mix, run_starts};
