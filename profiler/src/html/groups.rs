//! Group loads with contiguous placement and with the tables.

use semmoe_tables::{ExpertId, LayerIdx, ModelInfo, Placement, Profile, Tables};

use super::draw::{Cells, Scale, Svg};

/// Each group's load over the layer's mean, with contiguous placement and with the tables.
#[derive(Debug)]
pub struct GroupLoads {
    layer_ids: Vec<u16>,
    /// [L][G]; `None` if the groups do not divide the experts.
    before: Option<Vec<Vec<f64>>>,
    after: Vec<Vec<f64>>,
}

impl GroupLoads {
    /// Computes the loads for the traffic in a profile. Activations of an expert with replicas are split evenly among
    /// them.
    pub fn of_profile(profile: &Profile, tables: &Tables) -> Self {
        let model = profile.model();
        let loads = |layer: usize| profile.expert_loads(LayerIdx::new(layer as u16));
        Self::new(model, tables, &(0..model.layers()).map(loads).collect::<Vec<_>>())
    }

    /// `loads` are [L][N].
    pub(super) fn new(model: &ModelInfo, tables: &Tables, loads: &[Vec<u64>]) -> Self {
        let groups = tables.groups();
        let contiguous = Placement::contiguous(model.layers(), model.num_experts, groups).ok();
        let home = |placement: &Placement, layer: LayerIdx, expert| vec![placement.group_of(layer, expert).index()];
        let before =
            contiguous.map(|placement| over_mean(loads, groups, |layer, expert| home(&placement, layer, expert)));
        let after = over_mean(loads, groups, |layer, expert| match tables.physical_to_logical() {
            Some(slots) => slots.groups_of(layer, expert).map(semmoe_tables::GroupId::index).collect(),
            None => home(tables.placement(), layer, expert),
        });
        Self { layer_ids: model.layer_ids.clone(), before, after }
    }

    /// Number of groups, G.
    pub fn groups(&self) -> usize {
        self.after.first().map_or(1, Vec::len)
    }

    /// Returns maximum over mean, averaged over layers: before, if known, and after.
    pub fn max_over_mean(&self) -> (Option<f64>, f64) {
        let mean = |layers: &Vec<Vec<f64>>| {
            layers.iter().map(|layer| largest(layer)).sum::<f64>() / layers.len().max(1) as f64
        };
        (self.before.as_ref().map(mean), mean(&self.after))
    }
}

fn largest(layer: &[f64]) -> f64 {
    layer.iter().copied().fold(0.0, f64::max)
}

/// Computes group loads over the mean, [L][G]; `hosts` returns the groups that serve an expert.
fn over_mean(loads: &[Vec<u64>], groups: u16, hosts: impl Fn(LayerIdx, ExpertId) -> Vec<usize>) -> Vec<Vec<f64>> {
    let of_layer = |(layer, loads): (usize, &Vec<u64>)| {
        let mut sums = vec![0.0; usize::from(groups)];
        for (expert, load) in loads.iter().enumerate() {
            let hosts = hosts(LayerIdx::new(layer as u16), ExpertId::new(expert as u16));
            hosts.iter().for_each(|group| sums[*group] += *load as f64 / hosts.len() as f64);
        }
        let mean = sums.iter().sum::<f64>() / sums.len() as f64;
        // A layer without activations counts as balanced.
        sums.into_iter().map(|sum| if mean > 0.0 { sum / mean } else { 1.0 }).collect()
    };
    loads.iter().enumerate().map(of_layer).collect()
}

const LEFT: f64 = 56.0;
const TOP: f64 = 44.0;
const HALF: f64 = 300.0;
const GAP: f64 = 70.0;

/// Draws both maps side by side, followed by each layer's maximum load.
pub fn group_loads(loads: &GroupLoads) -> String {
    let groups = loads.groups();
    let wide = (HALF / groups as f64).clamp(3.0, 60.0);
    let high = (420.0 / loads.after.len().max(1) as f64).clamp(9.0, 20.0);
    let (step, bottom) = (wide * groups as f64 + GAP, TOP + high * loads.after.len() as f64);
    let sides = [("blocks of experts", &loads.before), ("with the tables", &Some(loads.after.clone()))];
    let mut svg = Svg::new((LEFT + 2.0 * step + 20.0).max(560.0), bottom + 60.0);
    let mut left = LEFT;
    for (name, layers) in sides {
        let Some(layers) = layers else { continue };
        let over_mean: Vec<Vec<f64>> =
            layers.iter().map(|layer| layer.iter().map(|load| load.max(0.25).log2()).collect()).collect();
        let cells = Cells { x: left, y: TOP, wide, high, rows: &over_mean, scale: Scale::Around(1.0) };
        svg.cells(&cells);
        svg.tips(&cells, |row, column| {
            let of = |group: usize| format!("group {group} {:.3}", layers[row][group]);
            let shown = column.map_or_else(|| (0..groups).map(of).collect::<Vec<_>>().join(", "), of);
            format!("layer {}, {name}, load over the mean: {shown}", loads.layer_ids[row])
        });
        svg.numbers(left, TOP, wide, groups, &format!("groups, {name}"));
        for (row, layer) in layers.iter().enumerate() {
            let y = TOP + (row as f64 + 0.5) * high + 4.0;
            svg.text(left + wide * groups as f64 + 8.0, y, "start", "", &format!("{:.2}", largest(layer)));
            svg.text(left - 6.0, y, "end", "", &loads.layer_ids[row].to_string());
        }
        left += step;
    }
    svg.layers(
        LEFT,
        TOP,
        bottom,
        Scale::Around(1.0),
        "activations over the layer's mean",
        ["1/2 or less", "1", "2 or more"],
    );
    let (before, after) = loads.max_over_mean();
    let before = before
        .map_or_else(|| "unknown: the groups do not divide the experts".to_owned(), |before| format!("{before:.3}"));
    format!(
        "<p>Activations that each group serves. Maximum over mean, averaged over the layers: {before} with blocks of consecutive experts, \
         {after:.3} with the tables; a layer waits for its busiest group.</p>\n{}",
        svg.finish(&format!("Loads of {groups} groups in {} layers, before and after", loads.after.len()))
    )
}
