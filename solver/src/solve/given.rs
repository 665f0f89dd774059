//! Solves for given placements: the experts stay in place, and only the units are assigned.

use semmoe_tables::{Attention, LayerIdx, ModelInfo, Placement, Replicas, in_parallel};

use crate::input::{GivenPlacement, Problem, SolveError, SolveOptions, once_each, padded_replicas, uneven};
use crate::start::{Best, Progress, SolveProgress, clustering, replica_profits, with_prices};
use crate::step::{Clustering, FREE, Held, Limits, Task, Transport, mass_capacity, weighed_profits};

/// A given placement that fits the model and the options.
pub(crate) struct Given {
    /// The group of each expert.
    pub(crate) placement: Placement,
    /// The placement's slots, if an expert has several or a slot is empty.
    pub(crate) slots: Option<Replicas>,
    /// All groups of every expert, if any has several.
    held: Option<Held>,
}

impl Given {
    pub(crate) fn new(given: &GivenPlacement, model: &ModelInfo, options: &SolveOptions) -> Result<Self, SolveError> {
        let (layers, experts, groups) = (model.layers(), model.num_experts, options.groups);
        let (placement, slots) = match given {
            GivenPlacement::Linear | GivenPlacement::RoundRobin => {
                options.check_groups(experts)?;
                let layer = uneven(experts, groups, matches!(given, GivenPlacement::RoundRobin));
                match experts.is_multiple_of(groups) {
                    true => (Placement::new(groups, vec![layer; layers])?, None),
                    false => {
                        let slots = padded_replicas(model, groups, std::iter::repeat_n(layer, layers))?;
                        (slots.primary(), Some(slots))
                    }
                }
            }
            GivenPlacement::Experts(placement) => (Placement::clone(placement), None),
            GivenPlacement::Slots(slots) => (slots.primary(), Some(Replicas::clone(slots))),
        };
        let shape = |groups, layers, experts| format!("{groups} groups, {layers} layers of {experts} experts");
        let found = shape(placement.groups(), placement.layers(), placement.experts());
        let wanted = shape(groups, layers, experts);
        if found != wanted {
            return Err(SolveError::OtherShape { what: "the given placement", found, expected: wanted });
        }
        // With only padding, every expert is still in one group.
        let replicated = slots.as_ref().filter(|slots| !once_each(slots, &placement));
        let held = replicated.map(|slots| held(slots, model));
        if held.is_some() {
            let one = "a placement with replicas";
            if options.attention == Attention::Tp {
                let why = "it labels each token with one group, but a replicated expert has several";
                return Err(SolveError::Together { one, other: "attention tp", why });
            }
            if options.nodes.is_some() {
                let why = "the evaluation of replicas treats all groups alike";
                return Err(SolveError::Together { one, other: "a number of nodes", why });
            }
        }
        Ok(Given { placement, slots, held })
    }

    /// Runs the exact unit step of every problem for the given groups of experts, regardless of their load. `progress`
    /// is polled between problems; once it breaks, the remaining problems get a plan without a search.
    pub(crate) fn best(
        &self,
        problems: &[Problem],
        options: &SolveOptions,
        limits: Limits,
        progress: Progress<'_>,
    ) -> Best {
        let jobs: Vec<usize> = (0..problems.len()).collect();
        let mut progress_so_far = SolveProgress { starts_done: 0, starts: jobs.len(), best_lar: None };
        let mut stopped = false;
        let mut clusterings = Vec::with_capacity(jobs.len());
        for some in jobs.chunks(options.threads.max(1)) {
            stopped = stopped || progress(progress_so_far).is_break();
            let assign = |at: usize| self.assign(problems, at, limits, options.token_margin, stopped);
            clusterings.extend(in_parallel(some, options.threads, assign));
            progress_so_far.starts_done += some.len();
        }
        let iterations = clusterings.len() as u64;
        Best { clusterings, iterations, stopped, ..Best::default() }
    }

    fn assign(&self, problems: &[Problem], at: usize, limits: Limits, margin: f64, stopped: bool) -> Clustering {
        let problem = &problems[at];
        let first: usize = problems[..at].iter().map(|problem| problem.layers).sum();
        let layers = (first..first + problem.layers).map(|layer| LayerIdx::new(layer as u16));
        let group_of: Vec<u16> = layers.flat_map(|layer| self.placement.layer(layer).iter().copied()).collect();
        let capacity = mass_capacity(problem.total_mass(), limits.groups, margin);
        let profit = match &self.held {
            Some(held) => replica_profits(problem, held),
            None => weighed_profits(problem, &group_of, limits.groups, limits.topology),
        };
        let transport = Transport { mass: &problem.mass, profit: &profit, capacity: &capacity };
        let plan = if stopped { transport.greedy() } else { transport.solve(None) };
        match &self.held {
            Some(held) => clustering(problem, held.clone(), plan, limits, 1),
            None => {
                let found = Clustering::whole(problem, group_of, plan, limits, 1);
                let task = Task { problem, capacity: &capacity, limits, placement: None, sequences: &FREE };
                with_prices(task, found, &|| stopped)
            }
        }
    }
}

fn held(slots: &Replicas, model: &ModelInfo) -> Held {
    let holders = LayerIdx::all(model.layers()).flat_map(|layer| slots.holders(layer)).collect();
    Held { groups: usize::from(slots.groups()), experts: usize::from(model.num_experts), holders }
}
